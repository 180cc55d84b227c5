"""Adapt a checkpoint's states, counters and generators to another plan."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch

from zerotune.checkpoint.comparison import load_decision
from zerotune.checkpoint.drafting import plan_record
from zerotune.checkpoint.manifest import Manifest, PlanRecord
from zerotune.decisions import Decision

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine, EngineState

_SAME_STATES: Final = (frozenset({"Adam", "AdamW", "AdamWBF16States", "AdamW8BitStates"}),)
"""Sets of optimizers whose states have the same names and meanings."""

_ROUNDED: Final[Mapping[str, str]] = {
    "AdamWBF16States": ", rounded to bf16",
    "AdamW8BitStates": ", rounded to the nearest of 256 codes in blocks of 256 elements",
}
"""Rounding by optimizers that load fp32 states of other optimizers."""

_POSITION: Final = "last_batch_iteration"

Adapted = tuple["EngineState", tuple[Decision, ...]]


def keeps_states(manifest: Manifest, engine: Engine) -> bool:
    """Return whether the current optimizer can use the saved states."""
    saved, running = _optimizer_name(manifest.plan), _optimizer_name(plan_record(engine))
    if saved == running:
        return not _in_other_form(manifest, engine)
    return any({saved, running} <= alike for alike in _SAME_STATES)


def _in_other_form(manifest: Manifest, engine: Engine) -> bool:
    """Whether the states are codes of whole weights, and the engine's decoded, or the reverse."""
    saved = {state for record in manifest.parameters for state in record.states}
    # bitsandbytes' own names, which only the update on the device saves.
    coded = "state1" in saved
    by_package = str(engine.plan.optimizer.package).startswith("bitsandbytes")
    return by_package and bool(saved) and coded != (engine.plan.update is not None)


def optimizer_decisions(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """Return decisions about optimizer states that are loaded, converted or reset."""
    saved, running = _optimizer_name(manifest.plan), _optimizer_name(plan_record(engine))
    split = _split_masters(engine)
    kept = keeps_states(manifest, engine)
    if kept and saved == running:
        return (*_uneven_steps(manifest, engine), *split)
    if kept:
        reason = "both optimizers have the same states, so the saved states are loaded"
        reason += _ROUNDED.get(running or "", "")
        return (load_decision("optimizer.type", saved, running, reason), *split)
    if saved == running:
        reason = (
            "only the update on the device saves bitsandbytes' codes, others save decoded moments, "
            "so weights and shadows are loaded, but the optimizer starts with fresh states"
        )
        return (load_decision("optimizer.states", saved, "anew", reason, warning=True), *split)
    if saved is None:
        reason = (
            "the checkpoint contains no optimizer states, so the optimizer starts with fresh states"
        )
        return (load_decision("optimizer.states", None, "anew", reason, warning=True), *split)
    reason = (
        "the states of the two optimizers are incompatible, so weights and shadows are loaded, "
        "but the optimizer starts with fresh states"
    )
    return (load_decision("optimizer.states", saved, running, reason, warning=True), *split)


def _split_masters(engine: Engine) -> tuple[Decision, ...]:
    """Return a decision about the rounding of masters that are not stored in fp32."""
    masters = engine.plan.masters
    if masters == "fp32":
        return ()
    if masters == "stochastic":
        reason = "master weights are only the bf16 weights, so saved ones are rounded to them; "
        reason += "weights that were saved so keep every bit"
        return (load_decision("update.masters", "fp32", "bf16", reason),)
    reason = (
        "fp32 master weights exactly halfway between two bf16 numbers (at most one in 131,072) "
        "may become one unit in the last place larger; weights that were saved in split form "
        "keep every bit"
    )
    return (load_decision("streamed.split_masters", "fp32", "bf16 and the low 16 bits", reason),)


def adapted_state(manifest: Manifest, engine: Engine) -> Adapted:
    """Return the saved counters, schedule and loss scale, adapted to the running engine.

    The number of steps is unchanged. If gradient accumulation differs, the number of micro batches
    is computed from the number of steps.
    """
    state = manifest.state
    accumulation = engine.plan.gradient_accumulation_steps
    same = manifest.plan and manifest.plan.gradient_accumulation_steps == accumulation
    # Saving never happens within an accumulation window, whatever the manifest says.
    if not same or state.micro_step % accumulation:
        state = attrs.evolve(state, micro_step=state.global_step * accumulation)
    schedule: tuple[Decision, ...] = ()
    if engine.plan.scheduler is not None and _POSITION not in state.scheduler:
        position = state.global_step - state.skipped_steps - 1
        state = attrs.evolve(state, scheduler={_POSITION: position})
        reason = (
            "the checkpoint has no schedule, so the plan's schedule continues from the number of "
            "steps taken"
        )
        schedule = (load_decision("scheduler.position", None, position + 1, reason, warning=True),)
    state, scale = carried_loss_scale(
        state,
        saved=manifest.plan,
        running=plan_record(engine),
        fresh=engine.state.loss_scaler,
    )
    return state, (*schedule, *scale)


def restart_generators(tensors: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Seed the global random number generators of a rank that did not exist in the saved run.

    Args:
        tensors: Saved generator states of one rank, from which the seed is derived.
        rank: This rank's number; each rank gets its own seed, which is the same each time the
            checkpoint is loaded.
    """
    digest = hashlib.sha256(f"rank {rank}".encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:7], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def world_decisions(manifest: Manifest, engine: Engine, *, rng: bool) -> tuple[Decision, ...]:
    """Return decisions about per-process state if the number of processes differs."""
    saved, running = manifest.world_size, engine.group.world_size
    if saved == running:
        return ()
    decisions = []
    if rng and manifest.rng:
        reason = (
            "ranks that existed in the saved run continue with their random states, and "
            "additional ranks are seeded from rank 0's state, so the run differs from an "
            "uninterrupted run"
        )
        decisions.append(load_decision("rng", saved, running, reason, warning=True))
    if manifest.buffers:
        reason = "buffers are saved per process, so additional ranks start with rank 0's buffers"
        decisions.append(load_decision("buffers", saved, running, reason))
    return tuple(decisions)


def _uneven_steps(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    steps = {record.step for record in manifest.parameters if record.step is not None}
    slabs = [address.slab for address in engine.master_weights.addresses]
    if len(steps) < 2 or len(set(slabs)) == len(slabs):
        return ()
    if any(states.counts_each for _, states in engine.master_weights.describe()):
        return ()
    reason = (
        "some parameters had no gradient in some steps, so their step counters differ; this "
        "engine has one counter for several parameters and uses the largest"
    )
    return (load_decision("optimizer.step", sorted(steps), max(steps), reason),)


def carried_loss_scale(
    state: EngineState,
    *,
    saved: PlanRecord | None,
    running: PlanRecord,
    fresh: Mapping[str, Any],
) -> Adapted:
    """Adapt the saved state's loss scale to the running engine; return the state and any decision.

    Args:
        state: The saved state.
        saved: Record of the saved plan; ``None`` if the checkpoint contains only weights.
        running: Record of the running plan.
        fresh: State of the running engine's loss scaler.
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
        reason = "the checkpoint has no loss scale, so the loss scale starts at the plan's value"
    else:
        key = "cur_scale" if "cur_scale" in fresh else "scale"
        after, scaler = before, {**fresh, key: before}
        reason = "the saved loss scale is used; the count of steps since its last change is reset"
    state = attrs.evolve(state, loss_scaler=scaler)
    if before is None and after is None:
        return state, ()
    return state, (load_decision("fp16.loss_scale", before, after, reason),)


def _scale(scaler: Mapping[str, Any]) -> float | None:
    value = scaler.get("cur_scale", scaler.get("scale"))
    return None if value is None else float(value)


def _optimizer_name(plan: PlanRecord | None) -> str | None:
    return None if plan is None else str(plan.optimizer["name"])
