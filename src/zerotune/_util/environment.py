"""Environment variables that hold inside a block only, and what is read from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_held: dict[str, tuple[int, str | None]] = {}
"""For each held variable how many blocks hold it, and what it was before the first."""


def user_cache() -> Path:
    """Where files lie that can be made again: ``zerotune`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotune"


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set (or, with ``None``, unset) environment variables inside the block only."""
    before = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(before)


class held:  # noqa: N801 - used like the function above
    """Set an environment variable until the last of several overlapping blocks is left.

    Two engines of one process need the same variable and need not end in reverse order, so the
    first to end must leave it to the other. A block that is never left sets nothing back: no
    generator runs at the end of the interpreter, when this module is gone.
    """

    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        holders, before = _held.get(self._name, (0, os.environ.get(self._name)))
        _held[self._name] = (holders + 1, before)
        os.environ[self._name] = self._value

    def __exit__(self, *_error: object) -> None:
        holders, before = _held.pop(self._name)
        if holders > 1:
            _held[self._name] = (holders - 1, before)
        else:
            _apply({self._name: before})


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
