"""Work that every rank does, or none: a failure on one rank is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerotune._util.files import fix_of
from zerotune.backend.distributed import ProcessGroup
from zerotune.errors import CheckpointError, ZeroTuneError

T = TypeVar("T")


def together(group: ProcessGroup, purpose: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, in rank order, everywhere.

    Collective: every rank must call it.

    Args:
        group: The processes.
        purpose: What is being done, for messages.
        work: What this rank does; must not be collective itself, since a rank on which it
            fails would leave the others waiting.
    """
    result: T | None = None
    failure: ZeroTuneError | None = None
    try:
        result = work()
    except ZeroTuneError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the others wait for what became of this rank
        fix = fix_of(error) if isinstance(error, OSError) else None
        failure = CheckpointError(f"{type(error).__name__}: {error}", key=purpose, fix=fix)
        failure.__cause__ = error
    group.barrier(purpose)
    outcomes = group.gather((result, failure))
    if failure is not None:
        raise failure
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise other.passed_on(rank)
    return [outcome for outcome, _ in outcomes]
