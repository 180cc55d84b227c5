"""End a lease: who removes the folders, and what happens when that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.lease import SwapDirectory


def release(
    directories: tuple[SwapDirectory, ...], barrier: Callable[[], None] | None
) -> tuple[tuple[Decision, ...], tuple[OffloadError, ...]]:
    """Leave after a run that ended well; its maker removes each folder once all are out.

    Without ``barrier`` the last rank to leave removes it.

    Returns:
        What went otherwise than planned, and what failed.
    """
    if barrier is not None:
        for directory in directories:
            if not directory.created:
                directory.leave()
        barrier()
    decisions: list[Decision] = []
    errors: list[OffloadError] = []
    for directory in directories:
        if not directory.held:
            continue
        try:
            removal = directory.leave_and_remove()
        except OffloadError as error:
            errors.append(error)
            continue
        # Without a barrier another rank may be in still, or may have removed the folder first.
        if barrier is None and directory.ranks > 1:
            continue
        if removal.outcome == "gone":
            decisions.append(_gone(directory.path))
        elif removal.outcome == "held":
            decisions.append(_kept(directory.path, "another process still holds it"))
    return tuple(decisions), tuple(errors)


def abandon(directories: tuple[SwapDirectory, ...]) -> tuple[Decision, ...]:
    """Leave after a failure: wait for nobody, since the other ranks may never come.

    Never raises for a folder that cannot be removed, so the failure itself is what is seen.
    """
    decisions, errors = release(directories, None)
    return (*decisions, *(kept_after(error) for error in errors))


def deleted_under(directories: tuple[SwapDirectory, ...]) -> OffloadError | None:
    """The error of a run whose swap folder somebody deleted while it ran, if somebody did."""
    for directory in directories:
        if directory.held and not directory.path.exists():
            return OffloadError(
                "somebody deleted this run's swap folder while it ran, so what was in it is lost",
                key="offload.root",
                value=str(directory.path),
                fix="start again from the last checkpoint; clean a root up with "
                "`zerotune offload clean`, which leaves living runs alone",
            )
    return None


def kept_after(error: OffloadError) -> Decision:
    """The record of a folder that could not be removed."""
    return _kept(error.value, error.reason)


def _kept(path: Path | str, reason: str) -> Decision:
    return Decision(
        key="offload.release", before=str(path), after=str(path), reason=reason, severity="warning"
    )


def _gone(path: Path) -> Decision:
    return Decision(
        key="offload.release",
        before=str(path),
        after=None,
        reason=f"somebody deleted this run's swap folder {path.name} while it ran",
        severity="warning",
    )
