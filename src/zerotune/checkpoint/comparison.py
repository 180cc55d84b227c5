"""Does a checkpoint belong to this engine? Every difference, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from zerotune._util.text import listing
from zerotune.checkpoint.drafting import buffer_records, plan_record
from zerotune.checkpoint.manifest import Manifest, ParameterRecord, TensorRecord
from zerotune.decisions import Decision, Severity
from zerotune.errors import CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_NAMES_LISTED = 10

_OWN_ORIGIN: Final = "save_checkpoint"
"""``Manifest.origin`` of checkpoints that were not converted."""


def check_model(manifest: Manifest, engine: Engine) -> None:
    """Check that the engine's trained parameters and buffers have the saved names and shapes."""
    running = {name: tuple(shape) for name, shape in engine.master_weights.parameters.items()}
    saved, buffers = _shapes(manifest.parameters), _shapes(buffer_records(engine.module))
    saved_buffers = _shapes(manifest.buffers)
    if manifest.plan is None:
        # A model folder does not record which parameters are trained; the engine does.
        saved_buffers = {name: shape for name, shape in saved.items() if name in buffers}
        named = engine.module.named_parameters(remove_duplicate=False)
        untrained = {*(name for name, _ in named), *buffers} - set(running)
        saved = {name: shape for name, shape in saved.items() if name not in untrained}
    differences = [
        *_shape_differences("parameter", saved, running),
        *_shape_differences("buffer", saved_buffers, buffers),
    ]
    if differences:
        raise CheckpointMismatchError(
            f"the checkpoint belongs to a different model: {'; '.join(differences)}",
            "build the model that was saved, with the same trainable parameters",
            "model",
            type(engine.module).__name__,
        )


def check_accumulation(engine: Engine) -> None:
    """Check that the engine is not in the middle of an accumulation window."""
    steps = engine.plan.gradient_accumulation_steps
    if left := engine.state.micro_step % steps:
        raise CheckpointError(
            f"{left} of {steps} micro batches are accumulated, and their gradients would be "
            "applied to the loaded weights",
            "load before training starts, or after engine.step() returns boundary=True",
            "gradient_accumulation_steps",
            steps,
        )


def changes(manifest: Manifest, engine: Engine) -> tuple[Decision, ...]:
    """Return a decision for each setting that differs between the saved and the running plan."""
    saved, running = manifest.plan, plan_record(engine)
    if saved is None:
        return ()
    # Settings that decide which rank stores which part, and in which format.
    sharding = _pairs(
        "",
        {**saved.sharding, "world_size": manifest.world_size},
        {**running.sharding, "world_size": engine.group.world_size},
    )
    pairs = _pairs(
        "scheduler.", _scheduler_settings(saved.scheduler), _scheduler_settings(running.scheduler)
    )
    # DeepSpeed's checkpoints lack the arguments of an optimizer that a script made.
    params = saved.optimizer["params"]
    if params and saved.optimizer["name"] == running.optimizer["name"]:
        pairs += _pairs("optimizer.params.", params, running.optimizer["params"])
    batches = (saved.config.get("train_batch_size"), running.config.get("train_batch_size"))
    if batches[0] is not None and batches[0] != batches[1]:
        pairs.append(("train_batch_size", *batches))
    if manifest.origin != _OWN_ORIGIN:
        # A converted checkpoint lacks settings that its source did not store.
        sharding, pairs = [], [each for each in pairs if each[1] is not None]
    divided = "the checkpoint was saved with a different plan and is repartitioned"
    changed = "the checkpoint was saved with a different value; the running plan's value is used"
    return (
        *(load_decision(*each, divided) for each in sharding),
        *(load_decision(*each, changed, warning=True) for each in pairs),
    )


def _shapes(records: Iterable[ParameterRecord | TensorRecord]) -> dict[str, tuple[int, ...]]:
    return {record.name: tuple(record.shape) for record in records}


def _shape_differences(
    what: str, saved: Mapping[str, tuple[int, ...]], running: Mapping[str, tuple[int, ...]]
) -> list[str]:
    missing = [name for name in running if name not in saved]
    unexpected = [name for name in saved if name not in running]
    reshaped = [
        f"{name} {saved[name]} instead of {running[name]}"
        for name in saved
        if name in running and saved[name] != running[name]
    ]
    groups = {
        "missing from the checkpoint": missing,
        "only in the checkpoint": unexpected,
        "of a different shape": reshaped,
    }
    return [
        f"{what}s {title}: {listing(names, most=_NAMES_LISTED)}"
        for title, names in groups.items()
        if names
    ]


def _scheduler_settings(scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
    if scheduler is None:
        return {"type": None}
    params = {f"params.{key}": value for key, value in scheduler["params"].items()}
    return {"type": scheduler["name"], **params}


def _pairs(
    prefix: str, saved: Mapping[str, Any], running: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (f"{prefix}{key}", saved.get(key), running.get(key))
        for key in {**saved, **running}
        if saved.get(key) != running.get(key)
    ]


def load_decision(
    key: str, before: Any, after: Any, reason: str, *, warning: bool = False
) -> Decision:
    """Return a decision that loading a checkpoint makes."""
    severity: Severity = "warning" if warning else "note"
    return Decision(key, before, after, reason, severity)
