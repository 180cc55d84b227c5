"""Every mistake of what is read at once, and not only the first.

Code that reads raises at the first mistake, as Python does. Where it can go on without what is
wrong it says so with ``noted``: then, inside ``together``, all mistakes are raised as one error,
and inside ``as_far_as_possible`` they are handed over beside what could be read without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from zerotune.errors import ZeroTuneError

P = ParamSpec("P")
T = TypeVar("T")

_MOST: Final = 20
"""Mistakes after which nobody reads on."""

_noting: ContextVar[list[ZeroTuneError] | None] = ContextVar("mistakes", default=None)


class noted:  # noqa: N801
    """Go on behind the block where one gathers mistakes; raise as always where nobody does."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Note its mistake; a type checker sees that the block may end early."""
        mistakes = _noting.get()
        if mistakes is None or not isinstance(error, ZeroTuneError) or error in mistakes:
            return False
        mistakes += error.each()
        if len(mistakes) >= _MOST:
            raise mistakes[-1] from None
        return True


class reworded:  # noqa: N801
    """Change the mistakes of the block, raised or noted."""

    def __init__(self, change: Callable[[ZeroTuneError], ZeroTuneError]) -> None:
        self._change = change

    def __enter__(self) -> None:
        """Begin the block."""
        self._before = len(_noting.get() or ())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Change what was noted, and raise anew what was raised."""
        mistakes = _noting.get()
        for number in range(self._before, len(mistakes or ())):
            if mistakes is not None and mistakes[number] is not error:
                mistakes[number] = self._change(mistakes[number])
        if isinstance(error, ZeroTuneError) and error not in (mistakes or ()):
            raise self._change(error).with_others(map(self._change, error.others)) from None


@contextmanager
def together() -> Iterator[None]:
    """Raise the mistakes noted inside as one error: the first of them, with the ``others``."""
    with _gathering() as mistakes:
        try:
            yield
        except ZeroTuneError as error:
            mistakes += [each for each in error.each() if each not in mistakes]
    raise_all(mistakes)


def raise_all(mistakes: Sequence[ZeroTuneError]) -> None:
    """Raise ``mistakes``, if there are any, as one error: the first, with the ``others``."""
    if mistakes:
        raise mistakes[0].with_others(mistakes[1:]) from None


def all_at_once(read: Callable[P, T]) -> Callable[P, T]:
    """A reader that raises its mistakes together, unless whoever calls it gathers them."""

    @wraps(read)
    def reader(*args: P.args, **kwargs: P.kwargs) -> T:
        if _noting.get() is not None:
            return read(*args, **kwargs)
        with together():
            return read(*args, **kwargs)

    return reader


def as_far_as_possible(read: Callable[[], T]) -> tuple[T | None, tuple[ZeroTuneError, ...]]:
    """What ``read`` returns without what is wrong, ``None`` where nothing is left, and what is."""
    with _gathering() as mistakes:
        try:
            return read(), tuple(mistakes)
        except ZeroTuneError as error:
            return None, (*mistakes, *(each for each in error.each() if each not in mistakes))


@contextmanager
def _gathering() -> Iterator[list[ZeroTuneError]]:
    mistakes: list[ZeroTuneError] = []
    token = _noting.set(mistakes)
    try:
        yield mistakes
    finally:
        _noting.reset(token)
