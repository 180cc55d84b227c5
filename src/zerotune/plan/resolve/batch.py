"""Batch sizes and clipping of a plan: what is written, what the run says, and defaults."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import attrs

from zerotune._util.text import is_number
from zerotune.decisions import Decision, Log, precedence
from zerotune.errors import (
    PlanConflictError,
    writes,
)
from zerotune.plan.context import RunFacts
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO


def overruled(log: Log, key: str, asked: Any, used: Any, stands: str) -> None:
    """Record a warning if the configuration overrides a requested value."""
    if asked not in (None, used):
        log.decide(key, asked, used, f"the configuration's own {stands}", "warning")


# -- The batch triple: train batch = micro batch x accumulation x world size.

TRAIN = "train_batch_size"


MICRO = "train_micro_batch_size_per_gpu"


ACCUMULATION = "gradient_accumulation_steps"


_MOST_LISTED = 8


_MOST_RANKS = 1024


@attrs.frozen(kw_only=True)
class Batch:
    """Samples per optimizer step, samples per pass and rank, and passes per optimizer step."""

    train: int
    micro: int
    accumulation: int


def solve_batch(plan: Settings, *, run: RunFacts, world_size: int) -> tuple[Batch, list[Decision]]:
    """Complete the batch sizes of ``plan`` for ``world_size``.

    Numbers in the plan always take precedence. A missing number is computed from the two others,
    else read from ``run``, else from the launcher's file. The default micro batch size is 1.
    """
    solving = _Solving(plan=plan, run=run, world_size=world_size)
    return solving.solved(), solving.decisions


def contradiction(train: int, micro: int, accumulation: int, world_size: int) -> PlanConflictError:
    """Return the error for three batch settings that contradict the world size."""
    valid, rest = divmod(train, micro * accumulation)
    holds = (
        f"these three numbers are consistent at world size {valid}"
        if rest == 0 and valid > 0
        else "no number of processes makes these three numbers consistent"
    )
    changes = {TRAIN: micro * accumulation * world_size}
    if train % (micro * world_size) == 0:
        changes[ACCUMULATION] = train // (micro * world_size)
    if train % (accumulation * world_size) == 0:
        changes[MICRO] = train // (accumulation * world_size)
    words = " or ".join(f"{key} = {value}" for key, value in changes.items())
    return PlanConflictError(
        f"{train} != {micro} ({MICRO}) x {accumulation} ({ACCUMULATION}) x {world_size}"
        f" (world size); {holds}",
        f'at world size {world_size} write {words}, or set {TRAIN} to "{AUTO}"',
        TRAIN,
        train,
        edits=[*({key: value} for key, value in changes.items()), {TRAIN: AUTO}],
    )


@attrs.define(kw_only=True)
class _Solving(Log):
    """Computation of the batch sizes, with its decisions."""

    plan: Settings
    run: RunFacts
    world_size: int

    def solved(self) -> Batch:
        plan, run = self.plan, self.run
        train = _written_number(plan.train_batch_size)
        micro = _written_number(plan.train_micro_batch_size_per_gpu)
        accumulation = _written_number(plan.gradient_accumulation_steps)
        if train is None:
            batch = self._without_train(micro, accumulation)
        elif micro is not None and accumulation is not None:
            batch = Batch(train=train, micro=micro, accumulation=accumulation)
            if train != micro * accumulation * self.world_size:
                raise contradiction(train, micro, accumulation, self.world_size)
        else:
            batch = self._from_train(train, micro, accumulation)
        for key, asked, used in (
            (MICRO, run.micro_batch_size, batch.micro),
            (ACCUMULATION, run.gradient_accumulation_steps, batch.accumulation),
        ):
            overruled(self, key, asked, used, "numbers take precedence over those of the run")
        return batch

    def _without_train(self, micro: int | None, accumulation: int | None) -> Batch:
        if micro is None:
            micro, reason = _number_said(run=self.run.micro_batch_size)
            self.decide(MICRO, self.plan.train_micro_batch_size_per_gpu, micro, reason)
        if accumulation is None:
            accumulation = self._fill_accumulation()
        train = micro * accumulation * self.world_size
        reason = f"micro batch {micro} x accumulation {accumulation} x world size {self.world_size}"
        self.decide(TRAIN, self.plan.train_batch_size, train, reason)
        return Batch(train=train, micro=micro, accumulation=accumulation)

    def _from_train(self, train: int, micro: int | None, accumulation: int | None) -> Batch:
        plan, written_micro = self.plan, self.plan.train_micro_batch_size_per_gpu
        if micro is None and accumulation is None:
            micro = self.run.micro_batch_size
            if micro is None:
                accumulation = self._fill_accumulation()
            else:
                self.decide(MICRO, written_micro, micro, "set by the run")
        if micro is not None:
            accumulation = self._divide(train, micro, MICRO, ACCUMULATION)
            key, written, solved = ACCUMULATION, plan.gradient_accumulation_steps, accumulation
            by = f"micro batch {micro}"
        else:
            accumulation = accumulation or 1
            micro = self._divide(train, accumulation, ACCUMULATION, MICRO)
            key, written, solved = MICRO, written_micro, micro
            by = f"accumulation {accumulation}"
        reason = f"train batch {train} / ({by} x world size {self.world_size})"
        self.decide(key, written, solved, reason)
        return Batch(train=train, micro=micro, accumulation=accumulation)

    def _divide(self, train: int, known: int, known_key: str, wanted: str) -> int:
        shared = known * self.world_size
        quotient, rest = divmod(train, shared)
        if rest == 0 and quotient > 0:
            return quotient
        per_rank, uneven = divmod(train, known)
        most = 0 if uneven else min(per_rank, _MOST_RANKS)
        valid = [str(n) for n in range(1, most + 1) if per_rank % n == 0]
        listed = ", ".join(valid[:_MOST_LISTED])
        holds = f"it works at world size {listed}" if valid else "no world size works"
        nearest = max(1, train // shared) * shared
        raise PlanConflictError(
            f"{train} is not divisible by {known} ({known_key}) x {self.world_size} "
            f"(world size); {holds}",
            f"at world size {self.world_size} write a multiple of {shared}, such as"
            f" {nearest}, or change {known_key} or {wanted}",
            TRAIN,
            train,
            edits=writes(nearest),
        )

    def _fill_accumulation(self) -> int:
        launch = self.plan.launch
        value, reason = _number_said(
            run=self.run.gradient_accumulation_steps,
            launched=_written_number(launch.gradient_accumulation_steps if launch else None),
        )
        self.decide(ACCUMULATION, self.plan.gradient_accumulation_steps, value, reason)
        return value


def _number_said(run: int | None, launched: int | None = None) -> tuple[int, str]:
    for value, who in precedence(run=run, launched=launched):
        return value, f"set by {who}"
    return 1, "no other value is set"


def _written_number(value: Any) -> int | None:
    return None if value in (None, AUTO) else int(value)


# -- How gradients are clipped.

CLIPPING: Final = "gradient_clipping"


DEFAULT_CLIPPING = 1.0


class Clipping(NamedTuple):
    """The maximum gradient norm, and why it has this value."""

    norm: float
    """0: off."""
    reason: str


def clipping_sources(plan: Settings, run: RunFacts) -> list[tuple[Any, str]]:
    """Return all clipping settings with their sources; the first number takes precedence."""
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    said = precedence(
        written=plan.gradient_clipping,
        run=run.gradient_clipping,
        launched=plan.launch.gradient_clipping if plan.launch else None,
    )
    beside = params.get("max_grad_norm")
    return said if beside is None else [*said, (beside, "optimizer.params.max_grad_norm")]


def clipping(plan: Settings, run: RunFacts) -> Clipping:
    """Return the maximum gradient norm, and the reason for the value."""
    for value, who in clipping_sources(plan, run):
        if is_number(value):
            return Clipping(float(value), f"set by {who}")
    return Clipping(DEFAULT_CLIPPING, "1.0 is the default of DeepSpeed 0.19.8 and of accelerate")
