"""How things end: once, in order, with or without a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self


class Closable(ABC):
    """Ends with ``close()``, or with the ``with`` block it is used in."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. May be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:  # noqa: ARG002 - for those that ask
        self.close()


class Closing(Closable):
    """A context manager that carries what it depends on.

    ``resources`` holds what must outlive it and end with it: for an engine the process group and
    the lease of its swap folder. They end in reverse order after the object itself, and learn of
    the exception when there is one.
    """

    def __init__(self) -> None:
        self.resources = ExitStack()
        self._closed = False

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """What a failed start has taken is given back."""
        try:
            yield
        except BaseException:
            self._closed = True
            self.resources.close()
            raise

    @abstractmethod
    def _release(self) -> None:
        """Free buffers; called once, before ``resources`` end."""

    @override
    def close(self) -> None:
        """End it, then what it depends on. May be repeated."""
        self._leave(None)

    @override
    def _leave(self, error: BaseException | None) -> None:
        try:
            if not self._closed:
                self._closed = True
                self._release()
        finally:
            traceback = None if error is None else error.__traceback__
            self.resources.__exit__(None if error is None else type(error), error, traceback)
