"""What surrounds the process: environment variables, the user's cache, installed packages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_held_variables: dict[str, tuple[int, str | None]] = {}
"""For each held variable how many blocks hold it, and what it was before the first."""


def user_cache() -> Path:
    """Where files lie that can be made again: ``zerotune`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotune"


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set (or, with ``None``, unset) environment variables inside the block only."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


class held:  # noqa: N801 - used like the function above
    """Set an environment variable until the last of several overlapping blocks is left.

    Two engines of one process need the same variable and need not end in reverse order, so the
    first to end must leave it to the other. A block that is never left sets nothing back: no
    generator runs at the end of the interpreter, when this module is gone.
    """

    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        holders, before = _held_variables.get(self._name, (0, os.environ.get(self._name)))
        _held_variables[self._name] = (holders + 1, before)
        os.environ[self._name] = self._value

    def __exit__(self, *_error: object) -> None:
        holders, before = _held_variables.pop(self._name)
        if holders > 1:
            _held_variables[self._name] = (holders - 1, before)
        else:
            _set_variables({self._name: before})


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# -- Versions of what is installed. The imports are late: the look-up is slower than the rest here.


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
