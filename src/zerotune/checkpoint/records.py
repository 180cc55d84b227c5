"""What a manifest says of an engine, made from the engine itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from zerotune.checkpoint.contents import persistent_buffers, plain_data
from zerotune.checkpoint.manifest import ParameterRecord, PlanRecord

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


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


def buffer_records(engine: Engine) -> tuple[ParameterRecord, ...]:
    """What the manifest says of the model's buffers."""
    return tuple(
        ParameterRecord(
            name=name, shape=tuple(buffer.shape), dtype=str(buffer.dtype).removeprefix("torch.")
        )
        for name, buffer in persistent_buffers(engine.module).items()
    )


def _as_plain(choice: Any) -> dict[str, Any]:
    plain: dict[str, Any] = plain_data(attrs.asdict(choice), "optimizer")
    return plain
