"""Does a checkpoint belong to this engine? Every difference, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zerotune.checkpoint.manifest import Manifest, ParameterRecord, PlanRecord, TensorRecord
from zerotune.checkpoint.records import buffer_records, plan_record
from zerotune.decisions import Decision
from zerotune.errors import CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_MOST_NAMES = 10


def check_model(manifest: Manifest, engine: Engine) -> None:
    """Check that the trainable parameters and the buffers are those that were saved.

    Raises:
        CheckpointMismatchError: Lists what is missing, unexpected or of another shape, by name.
    """
    running = {name: tuple(shape) for name, shape in engine.master_weights.parameters.items()}
    saved, buffers = _shapes(manifest.parameters), _shapes(buffer_records(engine))
    saved_buffers = _shapes(manifest.buffers)
    if manifest.plan is None:
        # A model folder does not tell what of it is trained; the engine does.
        saved_buffers = {name: shape for name, shape in saved.items() if name in buffers}
        known = set(engine.module.state_dict(keep_vars=True)) - set(running)
        saved = {name: shape for name, shape in saved.items() if name not in known}
    differences = [
        *_differences("parameter", saved, running),
        *_differences("buffer", saved_buffers, buffers),
    ]
    if differences:
        raise CheckpointMismatchError(
            f"the checkpoint belongs to another model: {'; '.join(differences)}",
            key="model",
            value=type(engine.module).__name__,
            fix="build the model it was saved from, with the same parameters trainable",
        )


def check_accumulation(engine: Engine) -> None:
    """Refuse an engine in the midst of a group of micro batches: their gradients would stay.

    Raises:
        CheckpointError: Micro batches are accumulated.
    """
    steps = engine.plan.gradient_accumulation_steps
    if left := engine.state.micro_step % steps:
        raise CheckpointError(
            f"{left} of {steps} micro batches are accumulated, and their gradients would be "
            "added to the loaded weights",
            key="gradient_accumulation_steps",
            value=steps,
            fix="load before training, or when engine.step() returned boundary=True",
        )


def changes(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """What differs but does not stand in the way: the running plan's values are used."""
    saved, running = manifest.plan, plan_record(engine)
    if saved is None:
        return ()
    return (*_sharding(manifest, engine), *_values(saved, running))


def _sharding(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """Differences that decide which rank holds which part, in which form."""
    if manifest.plan is None:
        return ()
    saved = {**manifest.plan.sharding, "world_size": manifest.world_size}
    running = {**plan_record(engine).sharding, "world_size": engine.group.world_size}
    return tuple(
        Decision(
            key=key,
            before=value,
            after=running[key],
            reason="the checkpoint was saved under another plan and is divided anew",
        )
        for key, value in saved.items()
        if running[key] != value
    )


def _values(saved: PlanRecord, running: PlanRecord) -> tuple[Decision, ...]:
    pairs = _pairs("scheduler", _flat(saved.scheduler), _flat(running.scheduler))
    if saved.optimizer["name"] == running.optimizer["name"]:
        pairs += _pairs("optimizer.params", saved.optimizer["params"], running.optimizer["params"])
    batches = (saved.config.get("train_batch_size"), running.config.get("train_batch_size"))
    if batches[0] != batches[1]:
        pairs.append(("train_batch_size", *batches))
    return tuple(
        Decision(
            key=key,
            before=before,
            after=after,
            reason="the checkpoint was saved with another value; the running plan's is used",
            severity="warning",
        )
        for key, before, after in pairs
    )


def _shapes(records: Iterable[ParameterRecord | TensorRecord]) -> dict[str, tuple[int, ...]]:
    return {record.name: tuple(record.shape) for record in records}


def _differences(
    what: str, saved: Mapping[str, tuple[int, ...]], running: Mapping[str, tuple[int, ...]]
) -> list[str]:
    missing = [name for name in running if name not in saved]
    unexpected = [name for name in saved if name not in running]
    reshaped = [
        f"{name} {saved[name]} instead of {running[name]}"
        for name in saved
        if name in running and saved[name] != running[name]
    ]
    groups = (
        (f"{what}s missing from it", missing),
        (f"{what}s only in it", unexpected),
        (f"{what}s of another shape", reshaped),
    )
    return [f"{title}: {_listed(names)}" for title, names in groups if names]


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _flat(scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
    if scheduler is None:
        return {"type": None}
    params = {f"params.{key}": value for key, value in scheduler["params"].items()}
    return {"type": scheduler["name"], **params}


def _pairs(
    prefix: str, saved: Mapping[str, Any], running: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (f"{prefix}.{key}", saved.get(key), running.get(key))
        for key in {**saved, **running}
        if saved.get(key) != running.get(key)
    ]
