"""Automatic choices, recorded where they are made and announced once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs

from zerotune.errors import readable, shorten

logger = logging.getLogger("zerotune")

Severity = Literal["note", "warning"]

_LONGEST_VALUE = 1000

_announced: set[tuple[str, str, str]] = set()


@attrs.frozen(kw_only=True)
class Decision:
    """One automatic choice: what it was, what it became, and why."""

    key: str
    """Path of the setting, as DeepSpeed's JSON spells it (``"zero_optimization.stage"``)."""
    before: Any
    """The value as given; ``None`` when nothing was given."""
    after: Any
    """The value that will be used; ``None`` when the setting was dropped."""
    reason: str
    """One sentence that says why."""
    severity: Severity = "note"
    """``"warning"`` when the user would probably object, else ``"note"``."""
    written: str | None = attrs.field(default=None, eq=False, repr=False)
    """What the user's own file calls the setting, where that is not ``key``."""

    @property
    def told(self) -> bool:
        """Whether reports show it: what stays as it was is on record only, warnings excepted."""
        return self.severity == "warning" or self.before != self.after

    def __str__(self) -> str:
        name = readable(self.written or self.key)
        return f"{name}: {_show(self.before)} -> {_show(self.after)} ({self.reason})"


def _show(value: Any) -> str:
    return "unset" if value is None else shorten(value, _LONGEST_VALUE)


def announce(decisions: Iterable[Decision], *, rank: int | None = None) -> None:
    """Log each decision once per process, on rank 0 only.

    Args:
        decisions: What to log; those already announced in this process are left out.
        rank: This process's global rank; read from ``RANK`` when not given.
    """
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        return
    for decision in decisions:
        identity = (decision.key, shorten(decision.after, _LONGEST_VALUE), decision.reason)
        if identity in _announced:
            continue
        _announced.add(identity)
        level = logging.WARNING if decision.severity == "warning" else logging.INFO
        logger.log(level, "%s", decision)


def render_decisions(decisions: Sequence[Decision]) -> str:
    """Decisions as aligned text lines, warnings first."""
    told = [decision for decision in decisions if decision.told]
    ordered = sorted(told, key=lambda decision: decision.severity != "warning")
    return "\n".join(f"  [{decision.severity}] {decision}" for decision in ordered)
