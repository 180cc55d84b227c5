"""What happens when a loss or a gradient is NaN or infinite: raise, skip, or roll back."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

from zerotune._util.text import whole
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.verify import finite_checkpoint
from zerotune.decisions import Decision, announce
from zerotune.errors import TrainingError

if TYPE_CHECKING:
    from zerotune.training.events import RunView, StepMetrics


@attrs.frozen(kw_only=True)
class NonFinite:
    """A step whose loss or gradient is not finite; the same on every rank."""

    step: int
    """Number of the step."""
    what: Literal["loss", "gradient norm", "weights"]
    value: float
    """Mean over the ranks."""
    ranks: tuple[int, ...]
    """Ranks whose own loss is not finite; all of them for a gradient, which is everyone's."""
    lr: float
    weights_changed: bool
    """The weights are spoiled: it was found out only after the step."""

    def __str__(self) -> str:
        weights = (
            "the weights have been changed by it"
            if self.weights_changed
            else "the weights are still those of the step before"
        )
        ranks = ", ".join(map(str, self.ranks))
        return f"not finite at step {self.step} on rank(s) {ranks}; {weights}"

    def decision(self) -> Decision:
        """That it was dropped."""
        return Decision(
            key=self.what, before=self.value, after="skipped", reason=str(self), severity="warning"
        )

    def error(self, *, because: str = "") -> TrainingError:
        """What to raise for it."""
        return TrainingError(
            f"{self}{because}",
            key=self.what,
            value=self.value,
            fix=f"lower the learning rate (now {self.lr:g}), look for bad samples, "
            "clip gradients, or use bf16 or fp32 instead of fp16; resume from a checkpoint",
        )


@runtime_checkable
class NonFinitePolicy(Protocol):
    """Decides about steps that are not finite; every rank decides the same."""

    def judge(self, found: NonFinite) -> None:
        """Raise, or return to have the step dropped on all ranks. No collective work."""
        ...

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """After every step, bad ones included. Collective work is safe here."""
        ...


class RaiseNonFinite:
    """Stops the run with ``TrainingError``; the default.

    A loss is looked at before the weights change, so they are still good.
    """

    def judge(self, found: NonFinite) -> None:
        """Raise."""
        raise found.error()

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Nothing to do."""


class SkipNonFinite:
    """Drops the whole accumulation window on all ranks together, and goes on with the next.

    Weights, optimizer, schedule and EMA are as if there had been no such batch; the step counts
    as skipped (``metrics.applied`` is ``False``), as one whose fp16 loss scale overflowed does.

    Args:
        most_in_a_row: One more than these raises after all.
    """

    def __init__(self, *, most_in_a_row: int = 10) -> None:
        self._most = whole(most_in_a_row, key="most_in_a_row")
        self._in_a_row = 0
        self.skipped = 0
        """How many were dropped."""

    def judge(self, found: NonFinite) -> None:
        """Count; raise when there are too many or the weights are spoiled."""
        self._in_a_row += 1
        if found.weights_changed:
            raise found.error()
        if self._in_a_row > self._most:
            raise found.error(because=f", number {self._in_a_row} in a row")
        self.skipped += 1
        announce((found.decision(),))

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """A good step ends the row."""
        if metrics.applied:
            self._in_a_row = 0


class RollBackNonFinite:
    """Drops bad steps and, after several in a row, goes back to the newest checkpoint.

    Weights, optimizer, schedule, step and EMA become the checkpoint's, which is the newest without
    NaN or infinity. The data and the random
    numbers go on from where they are: repeating the same batches would end the same way.

    Args:
        root: Where ``SaveEvery`` puts checkpoints.
        after: Bad steps in a row before going back; 1 or more. Spoiled weights go back at once.
        most: Times to go back; once more raises.
    """

    def __init__(self, *, root: str | os.PathLike[str], after: int = 3, most: int = 3) -> None:
        self._root = Path(root)
        self._after = whole(after, key="after")
        self._most = whole(most, key="most")
        self._in_a_row = 0
        self._latest: NonFinite | None = None
        self.rolled_back = 0
        """How often it went back."""

    def judge(self, found: NonFinite) -> None:
        """Count."""
        self._in_a_row += 1
        self._latest = found
        announce((found.decision(),))

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Go back when it is time."""
        found = self._latest
        if found is None or found.step != metrics.step:
            self._in_a_row = 0 if metrics.applied else self._in_a_row
            return
        if self._in_a_row < self._after and not found.weights_changed:
            return
        if self.rolled_back == self._most:
            raise found.error(because=f", after going back {self._most} times")
        group = trainer.engine.group
        look = f"look for a checkpoint in {self._root}"
        path = together(group, look, lambda: self._newest(group.is_main))[0]
        if path is None:
            raise found.error(
                because=f", and {self._root} holds no checkpoint to go back to that is finite"
            )
        self.rolled_back += 1
        self._in_a_row, self._latest = 0, None
        trainer.roll_back(path, reason=str(found))

    def _newest(self, is_main: bool) -> Path | None:
        return finite_checkpoint(self._root) if is_main else None


def is_finite(norm: float | None) -> bool:
    """Whether a gradient norm is a norm; DeepSpeed writes -1 for some that are not."""
    return norm is None or (math.isfinite(norm) and norm >= 0)
