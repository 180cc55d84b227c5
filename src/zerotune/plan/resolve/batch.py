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
    log = Log()
    launched = plan.launch.gradient_accumulation_steps if plan.launch else None
    said = {
        MICRO: precedence(run=run.micro_batch_size),
        ACCUMULATION: precedence(
            run=run.gradient_accumulation_steps, launched=_written_number(launched)
        ),
    }
    train = _written_number(plan.train_batch_size)
    solved = {key: _written_number(getattr(plan, key)) for key in said}
    missing = [key for key, number in solved.items() if number is None]
    # With a train batch size, at most one of the two others is free.
    first = ACCUMULATION if run.micro_batch_size is not None else MICRO
    computed = None if train is None or not missing else first if missing[1:] else missing[0]
    for key in missing:
        if key != computed:
            value, who = (*said[key], (1, None))[0]
            solved[key] = value
            reason = f"set by {who}" if who else "no other value is set"
            log.decide(key, getattr(plan, key), value, reason)
    if computed is not None and train is not None:
        known = next(key for key in said if key != computed)
        solved[computed] = _divided(train, solved[known] or 1, known, computed, world_size)
        by = f"{_WORDS[known]} {solved[known]} x world size {world_size}"
        reason = f"train batch {train} / ({by})"
        log.decide(computed, getattr(plan, computed), solved[computed], reason)
    micro, accumulation = solved[MICRO] or 1, solved[ACCUMULATION] or 1
    if train is None:
        train = micro * accumulation * world_size
        reason = f"micro batch {micro} x accumulation {accumulation} x world size {world_size}"
        log.decide(TRAIN, plan.train_batch_size, train, reason)
    if train != micro * accumulation * world_size:
        raise _contradiction(train, micro, accumulation, world_size)
    stands = "numbers take precedence over those of the run"
    overruled(log, MICRO, run.micro_batch_size, micro, stands)
    overruled(log, ACCUMULATION, run.gradient_accumulation_steps, accumulation, stands)
    return Batch(train=train, micro=micro, accumulation=accumulation), log.decisions


_WORDS: Final = {MICRO: "micro batch", ACCUMULATION: "accumulation"}


def _contradiction(train: int, micro: int, accumulation: int, world_size: int) -> PlanConflictError:
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


def _divided(train: int, known: int, known_key: str, wanted: str, world_size: int) -> int:
    shared = known * world_size
    quotient, rest = divmod(train, shared)
    if rest == 0 and quotient > 0:
        return quotient
    nearest = max(1, quotient) * shared
    raise PlanConflictError(
        f"{train} is not divisible by {known} ({known_key}) x {world_size} (world size)",
        f"at world size {world_size} write a multiple of {shared}, such as {nearest}, or change"
        f" {known_key} or {wanted}",
        TRAIN,
        train,
        edits=writes(nearest),
    )


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
    return precedence(
        written=plan.gradient_clipping,
        run=run.gradient_clipping,
        launched=plan.launch.gradient_clipping if plan.launch else None,
    )


def clipping(plan: Settings, run: RunFacts) -> Clipping:
    """Return the maximum gradient norm, and the reason for the value."""
    for value, who in clipping_sources(plan, run):
        if is_number(value):
            return Clipping(float(value), f"set by {who}")
    return Clipping(DEFAULT_CLIPPING, "1.0 is the default of DeepSpeed 0.19.8 and of accelerate")
