"""What becomes of the activations: as the advice says, or as somebody asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from zerotune.decisions import Decision
from zerotune.diffusion.activations import ActivationOffload
from zerotune.plan.advising.values import Advice

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

PlanT = TypeVar("PlanT")


def plan_of(plan: PlanT | Advice) -> Any:
    """The plan itself, of advice too: it is resolved anew for the machine that runs it."""
    return plan.plan if isinstance(plan, Advice) else plan


def keep_activations(
    engine: Engine, *, plan: object, activations: ActivationOffload | None
) -> tuple[Decision, ...]:
    """Switch on what is to be recomputed and offloaded, until the engine is closed.

    Args:
        engine: What trains.
        plan: As the trainer got it; advice brings its own wishes.
        activations: What was asked for besides.

    Returns:
        What the advice decided.

    Raises:
        InvalidValueError: The model has no gradient checkpointing.
    """
    decisions: tuple[Decision, ...] = ()
    model: Any = engine.module
    if isinstance(plan, Advice):
        decisions = plan.decisions
        if activations is None and plan.activation_offload:
            activations = ActivationOffload()
        elif plan.gradient_checkpointing and activations is None:
            model.enable_gradient_checkpointing()
    if activations is not None:
        if not activations.attached:
            activations.attach(model)
        engine.resources.callback(activations.detach)
    return decisions
