"""Objects that are closed once, in order, with or without a ``with`` block."""

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
    """Base class of objects that end with ``close()`` or with their ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:  # noqa: ARG002 - used by subclasses
        self.close()


class Closing(Closable):
    """Base class of context managers that own the resources on which they depend.

    ``resources`` contains what must outlive the object and end with it: for an engine, the process
    group and the lease of its swap folder. The resources are closed in reverse order after the
    object itself, and receive the exception if there is one.
    """

    def __init__(self) -> None:
        self.resources = ExitStack()
        self._closed = False

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Release the resources if the start inside the block fails."""
        try:
            yield
        except BaseException:
            self._closed = True
            self.resources.close()
            raise

    @abstractmethod
    def _release(self) -> None:
        """Free buffers; called once, before ``resources`` are closed."""

    @override
    def close(self) -> None:
        """Close the object and then its resources; may be called more than once."""
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
