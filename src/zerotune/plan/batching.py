"""The batch triple: train batch = micro batch x accumulation x world size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from zerotune.decisions import Decision
from zerotune.errors import PlanConflictError
from zerotune.plan.facts import RunFacts
from zerotune.plan.kinds import AUTO

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

_MOST_LISTED = 8
_MOST_RANKS = 1024


@attrs.frozen(kw_only=True)
class Batch:
    """A solved triple, in samples per optimizer step, samples per pass and rank, and passes."""

    train: int
    micro: int
    accumulation: int


class _Partial(NamedTuple):
    train: int | None
    micro: int | None
    accumulation: int | None


def solve_batch(
    plan: DeepSpeedPlan, *, run: RunFacts, world_size: int
) -> tuple[Batch, list[Decision]]:
    """Solve the batch triple of ``plan`` at ``world_size``.

    Written numbers always stand. Missing ones come from the others, then from ``run``, then
    from the launcher's file; with nothing at all the micro batch is 1.

    Raises:
        PlanConflictError: The written numbers contradict each other at this world size.
    """
    decisions: list[Decision] = []
    known = _Partial(
        _number(plan.train_batch_size),
        _number(plan.train_micro_batch_size_per_gpu),
        _number(plan.gradient_accumulation_steps),
    )
    if known.train is None:
        batch = _solve_without_train(plan, run, world_size, known, decisions)
    elif known.micro is not None and known.accumulation is not None:
        batch = Batch(train=known.train, micro=known.micro, accumulation=known.accumulation)
        if batch.train != batch.micro * batch.accumulation * world_size:
            raise contradiction(batch.train, batch.micro, batch.accumulation, world_size)
    else:
        batch = _solve_from_train(plan, run, world_size, known, decisions)
    decisions.extend(_overruled(batch, run))
    return batch, decisions


def contradiction(train: int, micro: int, accumulation: int, world_size: int) -> PlanConflictError:
    """The error for three written numbers that do not fit one world size."""
    valid, rest = divmod(train, micro * accumulation)
    holds = (
        f"these three numbers hold at world size {valid}"
        if rest == 0 and valid > 0
        else "these three numbers hold at no world size"
    )
    changes = [f"{TRAIN} = {micro * accumulation * world_size}"]
    if train % (micro * world_size) == 0:
        changes.append(f"{ACCUMULATION} = {train // (micro * world_size)}")
    if train % (accumulation * world_size) == 0:
        changes.append(f"{MICRO} = {train // (accumulation * world_size)}")
    return PlanConflictError(
        f"{train} != {micro} ({MICRO}) x {accumulation} ({ACCUMULATION}) x {world_size}"
        f" (world size); {holds}",
        key=TRAIN,
        value=train,
        fix=f"at world size {world_size} write {' or '.join(changes)},"
        f' or leave one of the three out or "{AUTO}"',
    )


def _solve_without_train(
    plan: DeepSpeedPlan,
    run: RunFacts,
    world_size: int,
    known: _Partial,
    decisions: list[Decision],
) -> Batch:
    _, micro, accumulation = known
    if micro is None:
        micro, reason = _first((run.micro_batch_size, "the run says so"), default=1)
        decisions.append(_filled(MICRO, plan.train_micro_batch_size_per_gpu, micro, reason))
    if accumulation is None:
        accumulation = _fill_accumulation(plan, run, decisions)
    train = micro * accumulation * world_size
    reason = f"micro batch {micro} x accumulation {accumulation} x world size {world_size}"
    decisions.append(_filled(TRAIN, plan.train_batch_size, train, reason))
    return Batch(train=train, micro=micro, accumulation=accumulation)


def _solve_from_train(
    plan: DeepSpeedPlan,
    run: RunFacts,
    world_size: int,
    known: _Partial,
    decisions: list[Decision],
) -> Batch:
    train, micro, accumulation = known.train or 0, known.micro, known.accumulation
    if micro is None and accumulation is None:
        micro = run.micro_batch_size
        if micro is None:
            accumulation = _fill_accumulation(plan, run, decisions)
        else:
            written = plan.train_micro_batch_size_per_gpu
            decisions.append(_filled(MICRO, written, micro, "the run says so"))
    if micro is not None:
        accumulation = _divide(train, micro, MICRO, ACCUMULATION, world_size)
        key, written, solved = ACCUMULATION, plan.gradient_accumulation_steps, accumulation
        by = f"micro batch {micro}"
    else:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation, ACCUMULATION, MICRO, world_size)
        key, written, solved = MICRO, plan.train_micro_batch_size_per_gpu, micro
        by = f"accumulation {accumulation}"
    reason = f"train batch {train} / ({by} x world size {world_size})"
    decisions.append(_filled(key, written, solved, reason))
    return Batch(train=train, micro=micro, accumulation=accumulation)


def _divide(train: int, known: int, known_key: str, wanted: str, world_size: int) -> int:
    quotient, rest = divmod(train, known * world_size)
    if rest == 0 and quotient > 0:
        return quotient
    per_rank, uneven = divmod(train, known)
    valid = (
        [] if uneven else [n for n in range(1, min(per_rank, _MOST_RANKS) + 1) if per_rank % n == 0]
    )
    listed = ", ".join(str(n) for n in valid[:_MOST_LISTED])
    holds = f"it can at world size {listed}" if valid else "it can at no world size"
    below = max(1, train // (known * world_size)) * known * world_size
    raise PlanConflictError(
        f"{train} cannot be shared evenly by {known} ({known_key}) x {world_size} (world size);"
        f" {holds}",
        key=TRAIN,
        value=train,
        fix=f"at world size {world_size} write a multiple of {known * world_size}, such as"
        f" {below}, or change {known_key} or {wanted}",
    )


def _fill_accumulation(plan: DeepSpeedPlan, run: RunFacts, decisions: list[Decision]) -> int:
    launched = plan.launch.gradient_accumulation_steps if plan.launch else None
    value, reason = _first(
        (run.gradient_accumulation_steps, "the run says so"),
        (_number(launched), "the launcher's file says so"),
        default=1,
    )
    decisions.append(_filled(ACCUMULATION, plan.gradient_accumulation_steps, value, reason))
    return value


def _first(*sources: tuple[int | None, str], default: int) -> tuple[int, str]:
    for value, reason in sources:
        if value is not None:
            return value, reason
    return default, "nothing says otherwise"


def _overruled(batch: Batch, run: RunFacts) -> list[Decision]:
    pairs = (
        (MICRO, run.micro_batch_size, batch.micro),
        (ACCUMULATION, run.gradient_accumulation_steps, batch.accumulation),
    )
    return [
        Decision(
            key=key,
            before=asked,
            after=used,
            reason="the configuration's own numbers stand before those of the run",
            severity="warning",
        )
        for key, asked, used in pairs
        if asked is not None and asked != used
    ]


def _number(value: Any) -> int | None:
    return None if value is None or value == AUTO else int(value)


def _filled(key: str, before: Any, after: int, reason: str) -> Decision:
    return Decision(key=key, before=before, after=after, reason=reason)
