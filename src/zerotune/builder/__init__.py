"""The config builder: a page that builds, explains and saves a plan.

The builder requires the extra ``zerotune[builder]``. The builder itself serves every file that the
page loads, without CDNs, web fonts or telemetry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerotune.errors import MissingDependencyError

if TYPE_CHECKING:
    from zerotune.builder.app import create_app
    from zerotune.builder.serving import serve

__all__ = ["create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = "app" if name == "create_app" else "serving"
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"starlette", "jinja2", "uvicorn"}:
            raise
        raise MissingDependencyError(
            f"the builder needs the package {error.name}",
            "pip install 'zerotune[builder]'",
            "zerotune.builder",
        ) from error
