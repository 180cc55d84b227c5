"""Versions of what is installed. The imports are late: the look-up is slower than the rest here."""

from __future__ import annotations

from collections.abc import Iterable


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or ``None``; never imports it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}


def release_of(version: str) -> tuple[int, ...]:
    """Numbers of a release: ``"0.19.8+cpu"`` is ``(0, 19, 8)``; ``()`` where it is no version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        return ()
