"""From a resolved plan to the engine it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.backend.deepspeed.engine import DeepSpeedEngine
from zerotune.backend.plain import PlainEngine
from zerotune.backend.stream.engine import StreamEngine, require_other_engine, why_not_streamed
from zerotune.backend.stream.ranks import SharedStreamEngine, why_not_together
from zerotune.decisions import announce

if TYPE_CHECKING:
    import torch

    from zerotune.backend.engine import Engine
    from zerotune.plan.model import ResolvedPlan


def build_engine(*, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0) -> Engine:
    """Start training's engine and verify that it is what the plan says.

    Args:
        model: The model, in fp32.
        plan: A resolved plan with its optimizer chosen.
        timeout_s: Seconds after which a collective gives up.

    Returns:
        A ``DeepSpeedEngine``; a ``StreamEngine`` where weights are streamed, on several ranks a
        ``SharedStreamEngine``; or a ``PlainEngine`` when the plan was resolved without DeepSpeed.

    Raises:
        EngineError: The plan cannot be run.
        VerificationError: What runs is not what was asked for.
    """
    kind: type[DeepSpeedEngine | StreamEngine | PlainEngine]
    kind = DeepSpeedEngine if plan.uses_deepspeed else PlainEngine
    if plan.uses_deepspeed and plan.streamed is not False:
        obstacle = why_not_streamed(plan, model)
        # A device that waits for steps that a host keeps.
        might = plan.platform.accelerator != "cpu" and plan.offload_optimizer == "cpu"
        if plan.streamed and plan.world_size > 1:
            obstacle = why_not_together(plan, model, obstacle=obstacle, timeout_s=timeout_s)
        if obstacle is None:
            kind = StreamEngine if plan.world_size == 1 else SharedStreamEngine
        elif plan.streamed or might:
            plan = plan.without_streaming(obstacle)
            announce(plan.decisions[-1:])
    if kind not in (StreamEngine, SharedStreamEngine):
        require_other_engine(plan)
    return kind(model=model, plan=plan, timeout_s=timeout_s)
