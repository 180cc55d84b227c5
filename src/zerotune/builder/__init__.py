"""The config builder: a page that builds, explains and saves a plan.

Needs the extra ``zerotune[builder]``. Everything is served from this package: no CDN, no fonts,
no telemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.builder.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zerotune.errors import MissingDependencyError

    try:
        from zerotune.builder.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"starlette", "jinja2"}:
            raise
        raise MissingDependencyError(
            f"the builder needs the package {error.name}",
            key="zerotune.builder",
            fix="pip install 'zerotune[builder]'",
        ) from error
    return create_app
