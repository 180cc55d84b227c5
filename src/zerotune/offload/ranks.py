"""What the ranks of a run tell each other before they share a lease."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.record import is_run_id

if TYPE_CHECKING:
    from zerotune.plan.resolved import ResolvedPlan

Share = Callable[[str], str]
"""Collective: every rank calls it and gets the string rank 0 passed."""
Barrier = Callable[[], None]
"""Collective: returns once every rank has called it."""

_FAILED: Final = "failed: "


@attrs.frozen(kw_only=True)
class Invitation:
    """What rank 0 tells the others."""

    run_id: str
    aio: Mapping[str, Any] = attrs.field(factory=dict)
    """Measured ``aio`` settings: all ranks must use those of one machine."""

    def to_text(self) -> str:
        """One line."""
        return f"{self.run_id} {json.dumps(dict(self.aio), sort_keys=True)}"

    @classmethod
    def from_text(cls, text: str) -> Invitation:
        """Read what :meth:`to_text` wrote; a bare run id will do.

        Raises:
            OffloadError: It is something else, or rank 0 failed.
        """
        if text.startswith(_FAILED):
            raise OffloadError(f"rank 0 could not lease it: {text.removeprefix(_FAILED)}")
        run_id, _, rest = text.partition(" ")
        try:
            aio = json.loads(rest) if rest else {}
        except ValueError:
            aio = None
        if not is_run_id(run_id) or not isinstance(aio, dict):
            raise OffloadError(
                "is not a run id; share must return what rank 0 passed",
                key="OffloadManager.share",
                value=text,
                fix="give a collective broadcast from rank 0",
            )
        return cls(run_id=run_id, aio=aio)

    @staticmethod
    def failure(error: BaseException) -> str:
        """What rank 0 says when there is nothing to join."""
        return f"{_FAILED}{error}"


def local_ranks(resolved: ResolvedPlan, environ: Mapping[str, str] | None = None) -> int:
    """Ranks of this machine: ``LOCAL_WORLD_SIZE`` of the launcher, else all of them."""
    written = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "")
    count = int(written) if written.isdecimal() else resolved.world_size
    return min(max(count, 1), resolved.world_size)


def check_ranks(resolved: ResolvedPlan, rank: int, world_size: int | None) -> None:
    """Refuse a rank that the plan does not have.

    Raises:
        OffloadError: It was resolved for other ranks.
    """
    if world_size not in (None, resolved.world_size):
        raise OffloadError(
            f"the plan was resolved for {resolved.world_size} ranks",
            key="world_size",
            value=world_size,
            fix="resolve the plan with the number of ranks that run it",
        )
    if not 0 <= rank < resolved.world_size:
        raise OffloadError(
            f"is not a rank of {resolved.world_size}",
            key="rank",
            value=rank,
            fix="count ranks from 0",
        )


def need_share(share: Share | None) -> Share:
    """``share``, which several ranks cannot do without.

    Raises:
        OffloadError: There is none.
    """
    if share is not None:
        return share
    raise OffloadError(
        "several ranks need one run id, and nothing carries it between them",
        key="OffloadManager.share",
        value=None,
        fix="pass share=, a function that returns rank 0's string on every rank",
    )
