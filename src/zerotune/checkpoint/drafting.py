"""The manifest of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune._util.proc import installed_version
from zerotune.checkpoint.contents import persistent_buffers, plain_data
from zerotune.checkpoint.manifest import Manifest, PlanRecord, TensorRecord
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


def draft(
    engine: Engine, *, shadows: Mapping[str, Any], rng: bool, extra: Mapping[str, Any]
) -> Manifest:
    """Create a manifest of an engine's current state; parameters and files are added later.

    Args:
        engine: Engine to save.
        shadows: EMA shadows by name.
        rng: Whether the random number generators are saved.
        extra: The caller's data.
    """
    state = attrs.evolve(
        engine.state,
        scheduler=plain_data(engine.state.scheduler, "scheduler"),
        loss_scaler=plain_data(engine.state.loss_scaler, "loss_scaler"),
    )
    return Manifest(
        created=now(),
        versions={**versions(), **engine.plan.platform.versions},
        world_size=engine.group.world_size,
        plan=plan_record(engine),
        state=state,
        model=model_config(engine.module),
        parameters=(),
        frozen=[tensor_record(name, p) for name, p in untrained_parameters(engine).items()],
        aliases=tied_names(engine.module),
        buffers=buffer_records(engine.module),
        files=(),
        shadows=sorted(shadows),
        rng=rng,
        extra=extra,
    )


def plan_record(engine: Engine) -> PlanRecord:
    """Return the manifest's record for an engine's plan."""
    plan = engine.plan
    optimizer: Any = plan.optimizer
    scheduler: Any = plan.scheduler
    return PlanRecord(
        engine="deepspeed" if plan.uses_deepspeed else "plain",
        stage=plan.stage,
        precision=plan.precision,
        offload_optimizer=plan.offload_optimizer,
        offload_param=plan.offload_param,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        digest=plan.digest(),
        config=plan.to_deepspeed(),
        optimizer=plain_data(attrs.asdict(optimizer), "optimizer"),
        scheduler=scheduler and plain_data(attrs.asdict(scheduler), "scheduler"),
    )


def buffer_records(module: torch.nn.Module) -> tuple[TensorRecord, ...]:
    """Return the manifest's records for the model's buffers."""
    return tuple(tensor_record(name, b) for name, b in persistent_buffers(module).items())


def untrained_parameters(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that have no master weights because they are frozen or empty."""
    trained = engine.master_weights.parameters
    return {name: p for name, p in engine.module.named_parameters() if name not in trained}


def model_config(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return the content of a diffusers model's ``config.json``; ``None`` for other modules."""
    write = getattr(module, "to_json_string", None)
    if write is None:
        return None
    try:
        config: Mapping[str, Any] = plain_data(json.loads(write()), "model.config")
    except (TypeError, ValueError, CheckpointError):
        # A configuration that is not JSON cannot be exported either; the export reports it.
        return None
    return config


def now() -> str:
    """Return the current UTC time in ISO 8601 format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of zerotune and torch."""
    return {
        "zerotune": installed_version("zerotune") or "unknown",
        "torch": torch.__version__,
    }


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Map each additional name of a tied parameter to its first name."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def tensor_record(name: str, tensor: torch.Tensor) -> TensorRecord:
    """Return the manifest's record for a tensor."""
    # ZeRO-3 keeps the full shape beside a partitioned parameter.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return TensorRecord(name=name, shape=shape, dtype=str(tensor.dtype).removeprefix("torch."))
