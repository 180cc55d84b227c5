"""What a checkpoint's counters and generators become under another plan, and why."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch

from zerotune.checkpoint.manifest import Manifest, PlanRecord
from zerotune.checkpoint.records import plan_record
from zerotune.decisions import Decision

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine, EngineState

_ALIKE: Final = (frozenset({"Adam", "AdamW", "AdamWBF16States"}),)
"""Optimizers that keep the same states with the same meaning."""
_POSITION: Final = "last_batch_iteration"

Adapted = tuple["EngineState", tuple[Decision, ...]]


def keeps_states(manifest: Manifest, engine: Engine) -> bool:
    """Whether the optimizer that runs can go on with the states that were saved."""
    saved, running = _optimizer(manifest.plan), _optimizer(plan_record(engine))
    return saved == running or any({saved, running} <= alike for alike in _ALIKE)


def optimizer_decisions(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """What becomes of the optimizer's states."""
    saved, running = _optimizer(manifest.plan), _optimizer(plan_record(engine))
    if saved == running:
        return _uneven_steps(manifest, engine)
    if keeps_states(manifest, engine):
        reason = "both keep the same states, which carry over"
        return (_decision("optimizer.type", saved, running, reason),)
    reason = (
        "the states of one mean nothing to the other: weights and shadows carry over, the "
        "optimizer starts with fresh states"
    )
    return (_decision("optimizer.states", saved, running, reason, warning=True),)


def adapted_state(manifest: Manifest, engine: Engine) -> Adapted:
    """Counters, schedule and loss scale for the engine that runs.

    Steps taken carry over; micro batches are counted anew when the accumulation differs.
    """
    state = manifest.state
    accumulation = engine.plan.gradient_accumulation_steps
    if manifest.plan is None or manifest.plan.gradient_accumulation_steps != accumulation:
        state = attrs.evolve(state, micro_step=state.global_step * accumulation)
    state, schedule = _schedule(state, engine)
    state, scale = carried_loss_scale(
        state,
        saved=manifest.plan,
        running=plan_record(engine),
        fresh=engine.state.loss_scaler,
    )
    return state, (*schedule, *scale)


def restart_generators(tensors: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Seed the global generators of a rank that the saved run did not have.

    Args:
        tensors: The generator states of a rank of the saved run.
        rank: This process; each gets numbers of its own, the same in every resumption.
    """
    digest = hashlib.sha256(f"rank {rank}".encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:7], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def world_decisions(manifest: Manifest, engine: Engine, *, rng: bool) -> tuple[Decision, ...]:
    """What another number of processes means for what each of them has for itself."""
    saved, running = manifest.world_size, engine.group.world_size
    if saved == running:
        return ()
    found = []
    if rng and manifest.rng:
        reason = (
            "the first processes go on with their random numbers, further ones are seeded from "
            "those of rank 0: the run cannot be that of the other number of processes"
        )
        found.append(_decision("rng", saved, running, reason, warning=True))
    if manifest.buffers:
        reason = "each process has buffers of its own; further ones begin with those of rank 0"
        found.append(_decision("buffers", saved, running, reason))
    return tuple(found)


def _uneven_steps(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    steps = {record.step for record in manifest.parameters if record.step is not None}
    slabs = [address.slab for address in engine.master_weights.addresses]
    if len(steps) < 2 or len(set(slabs)) == len(slabs):
        return ()
    reason = (
        "some parameters got no gradient in some steps and were counted on their own; this engine "
        "counts them together, with the largest"
    )
    return (_decision("optimizer.step", sorted(steps), max(steps), reason),)


def _schedule(state: EngineState, engine: Engine) -> Adapted:
    if engine.plan.scheduler is None or _POSITION in state.scheduler:
        return state, ()
    position = state.global_step - state.skipped_steps - 1
    reason = "the checkpoint has no schedule; it goes on where the steps taken would have led it"
    decision = _decision("scheduler.position", None, position + 1, reason, warning=True)
    return attrs.evolve(state, scheduler={_POSITION: position}), (decision,)


def carried_loss_scale(
    state: EngineState,
    *,
    saved: PlanRecord | None,
    running: PlanRecord,
    fresh: Mapping[str, Any],
) -> Adapted:
    """The loss scale for the engine that runs.

    Args:
        state: What was saved.
        saved: The plan it was saved under.
        running: The plan that runs.
        fresh: The loss scaler of the engine that runs, as it is now.
    """
    if saved is not None and (saved.precision, saved.engine) == (running.precision, running.engine):
        return state, ()
    before = _scale(state.loss_scaler) if saved and saved.precision == "fp16" else None
    scaler: dict[str, Any] = {}
    after: float | None = None
    if running.precision != "fp16":
        reason = f"{running.precision} needs no loss scale"
    elif before is None:
        after = _scale(fresh)
        reason = "the checkpoint has no loss scale; it starts as the plan says"
    else:
        key = "cur_scale" if "cur_scale" in fresh else "scale"
        after, scaler = before, {**fresh, key: before}
        reason = "the scale carries over; the steps since its last change are counted anew"
    state = attrs.evolve(state, loss_scaler=scaler)
    if before is None and after is None:
        return state, ()
    return state, (_decision("fp16.loss_scale", before, after, reason),)


def _scale(scaler: Mapping[str, Any]) -> float | None:
    value = scaler.get("cur_scale", scaler.get("scale"))
    return None if value is None else float(value)


def _optimizer(plan: PlanRecord | None) -> str | None:
    return None if plan is None else str(plan.optimizer["name"])


def _decision(key: str, before: Any, after: Any, reason: str, *, warning: bool = False) -> Decision:
    return Decision(
        key=key,
        before=before,
        after=after,
        reason=reason,
        severity="warning" if warning else "note",
    )
