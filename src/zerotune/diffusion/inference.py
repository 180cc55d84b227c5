"""Work with a model between its training steps: in evaluation mode, divided over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from zerotune.errors import CollectiveError

T = TypeVar("T")


def evaluating(model: Any) -> AbstractContextManager[None]:
    """No gradients and evaluation mode inside of it; what was before is back afterwards.

    Args:
        model: An ``Engine`` or a ``torch.nn.Module``.
    """
    if hasattr(model, "evaluating"):
        return cast("AbstractContextManager[None]", model.evaluating())
    return _module_evaluating(model)


@contextmanager
def _module_evaluating(module: torch.nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)


class Gathering(Protocol):
    """The processes that share the work."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank."""
        ...


class Group(Gathering, Protocol):
    """Those of an engine, which know their places and compare what they were given."""

    rank: int
    world_size: int

    def agree(self, value: Any, what: str) -> None:
        """Check that every rank holds the same value."""
        ...


def shared(group: Gathering | None, purpose: str, work: Callable[[], T]) -> list[T]:
    """Each rank's part of some work, in rank order, on every rank.

    A rank that fails still comes to the exchange, so that the others learn of it there and do
    not wait. Where the work is a collective itself, as a forward pass at stage 3 is, they wait in
    it until the group's timeout.

    Args:
        group: The processes; ``None`` is this one alone.
        purpose: What is done, for the message.
        work: This rank's part.

    Raises:
        CollectiveError: It failed on another rank; the message names it and says why.
        Exception: What ``work`` raised here.
    """
    if group is None:
        return [work()]
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = group.gather((result, told))
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            raise CollectiveError(f"rank {rank} reports {why}", key=purpose)
    return [part for part, _ in outcomes]


def group_of(model: Any) -> Group | None:
    """The processes of an engine; ``None`` for a model on its own."""
    return cast("Group | None", getattr(model, "group", None))


def equal_share(count: int, group: Group | None) -> list[int]:
    """Numbers below ``count`` that this rank works on: equally many on every rank.

    At stage 3 each forward pass is a collective, so a rank without work of its own repeats the
    last number; what is computed twice counts once.
    """
    rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
    each = math.ceil(count / world_size)
    return [min(number, count - 1) for number in range(rank * each, (rank + 1) * each)]
