"""What a manifest says of an engine, made from the engine itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import attrs

from zerotune._util.versions import installed_version
from zerotune.checkpoint.contents import persistent_buffers, plain_data
from zerotune.checkpoint.manifest import Manifest, PlanRecord, TensorRecord
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from zerotune.backend.engine import Engine


def draft(
    engine: Engine, *, shadows: Mapping[str, Any], rng: bool, extra: Mapping[str, Any]
) -> Manifest:
    """The manifest of an engine as it is now, with neither parameters nor files.

    Raises:
        CheckpointError: A schedule or loss scale cannot be stored.
    """
    state = attrs.evolve(
        engine.state,
        scheduler=plain_data(engine.state.scheduler, "scheduler"),
        loss_scaler=plain_data(engine.state.loss_scaler, "loss_scaler"),
    )
    frozen, aliases = _untrained(engine)
    return Manifest(
        created=now(),
        versions={"zerotune": version(), **engine.plan.platform.versions},
        world_size=engine.group.world_size,
        plan=plan_record(engine),
        state=state,
        model=model_config(engine.module),
        parameters=(),
        frozen=frozen,
        aliases=aliases,
        buffers=buffer_records(engine),
        files=(),
        shadows=sorted(shadows),
        rng=rng,
        extra=extra,
    )


def plan_record(engine: Engine) -> PlanRecord:
    """What the manifest says of the plan an engine runs under."""
    plan = engine.plan
    return PlanRecord(
        engine="deepspeed" if plan.uses_deepspeed else "plain",
        stage=plan.stage,
        precision=plan.precision,
        offload_optimizer=plan.offload_optimizer,
        offload_param=plan.offload_param,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        digest=plan.digest(),
        config=plan.to_deepspeed(),
        optimizer=_as_plain(plan.optimizer),
        scheduler=None if plan.scheduler is None else _as_plain(plan.scheduler),
    )


def buffer_records(engine: Engine) -> tuple[TensorRecord, ...]:
    """What the manifest says of the model's buffers."""
    return tuple(_record(name, b) for name, b in persistent_buffers(engine.module).items())


def model_config(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """A diffusers model's ``config.json``; ``None`` of a module that has none."""
    write = getattr(module, "to_json_string", None)
    if write is None:
        return None
    try:
        config: Mapping[str, Any] = plain_data(json.loads(write()), "model.config")
    except (TypeError, ValueError, CheckpointError):
        # A configuration that is no JSON cannot be exported either, and that says so.
        return None
    return config


def now() -> str:
    """UTC time, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def version() -> str:
    """The installed zerotune."""
    return installed_version("zerotune") or "unknown"


def _untrained(engine: Engine) -> tuple[list[TensorRecord], dict[str, str]]:
    """Parameters that are not trained, and further names of tied ones."""
    module = engine.module
    named = list(module.named_parameters())
    first = {id(parameter): name for name, parameter in named}
    trained = engine.master_weights.parameters
    frozen = [_record(name, p) for name, p in named if name not in trained]
    every = module.named_parameters(remove_duplicate=False)
    return frozen, {name: first[id(p)] for name, p in every if first[id(p)] != name}


def _record(name: str, tensor: torch.Tensor) -> TensorRecord:
    # ZeRO-3 keeps the full shape beside a partitioned parameter.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return TensorRecord(name=name, shape=shape, dtype=str(tensor.dtype).removeprefix("torch."))


def _as_plain(choice: Any) -> dict[str, Any]:
    plain: dict[str, Any] = plain_data(attrs.asdict(choice), "optimizer")
    return plain
