"""Why the host engine does not train a model."""

from __future__ import annotations

import torch

from zerotune.backend.checks import DTYPES
from zerotune.backend.host.units import find_units
from zerotune.backend.optimizers.classes import AdamW8BitStates, AdamWBF16States
from zerotune.backend.optimizers.client import chosen_optimizer
from zerotune.backend.proof import why_unproven
from zerotune.backend.step.adams import torch_rounds_alike
from zerotune.backend.step.kernel import load_host_step
from zerotune.errors import OptimizerError, PlatformError
from zerotune.plan.context import Streaming
from zerotune.plan.facts import is_wrapper
from zerotune.plan.plan import ResolvedPlan
from zerotune.plan.resolved import host_obstacle

_ROUNDS_OTHERWISE = "this build of torch rounds differently from the op host_step"


def _why_not_by_default(plan: ResolvedPlan) -> str | None:
    """Why the host engine does not run a plan that does not ask for it; ``None`` if it does."""
    if plan.platform.accelerator == "cpu" or not plan.uses_deepspeed:
        return None
    unproven = why_unproven("host engine", accelerator=plan.platform.accelerator)
    asks = 'plan.resolve(engine="host") selects the host engine nevertheless'
    return unproven and f"{unproven}; {asks}"


def why_not_hosted(plan: ResolvedPlan, model: torch.nn.Module) -> str | None:
    """Return why the host engine does not train a model; ``None`` if it does.

    Args:
        plan: The resolved plan, which must contain an optimizer.
        model: The model to train.
    """
    if (obstacle := host_obstacle(plan)) is not None:
        return obstacle
    asked = plan.streamed or plan.engine == "host"
    if not asked and (obstacle := _why_not_by_default(plan)) is not None:
        return obstacle
    choice = chosen_optimizer(plan)
    if not plan.uses_deepspeed and (obstacle := _strided_weight(model)) is not None:
        return obstacle
    if not plan.is_resident and (obstacle := _why_not_streamed(plan, model)) is not None:
        return obstacle
    try:
        op = load_host_step()
    except PlatformError as error:
        return f"the op host_step cannot be built: {error.reason}"
    if plan.uses_deepspeed and not op.knows(DTYPES[plan.precision]):
        return f"the compiler of the op host_step does not support {plan.precision}"
    if choice.implementation == AdamWBF16States.__name__ and not torch_rounds_alike(op):
        return _ROUNDS_OTHERWISE
    return None


def _strided_weight(model: torch.nn.Module) -> str | None:
    """The obstacle of weights in another memory order, which units would make contiguous."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_contiguous():
            return (
                f"{name} is not contiguous; call model.to(memory_format=torch.contiguous_format) "
                "before building the engine"
            )
    return None


def _why_not_streamed(plan: ResolvedPlan, model: torch.nn.Module) -> str | None:
    """Why a model's weights cannot be streamed; ``None`` if they can."""
    for name, parameter in model.named_parameters():
        if _is_opaque(parameter):
            return (
                f"the values of {name} are hidden in a {type(parameter).__name__}, which has no "
                "__tensor_flatten__, so they cannot be copied unit by unit; quantize with "
                "bitsandbytes, torchao or optimum-quanto, or leave the base model on the device"
            )
    if not find_units(model, (plan.streaming or Streaming()).units):
        return "the model has no repeated blocks; set Streaming(units=...) to the modules to stream"
    return None


def _is_opaque(parameter: torch.Tensor) -> bool:
    """Whether a weight's values are neither its own nor those of tensors that can be listed."""
    kind = type(parameter)
    if is_wrapper(kind):
        return parameter.requires_grad
    is_plain = kind.__torch_function__ == torch.nn.Parameter.__torch_function__
    return not is_plain and kind.__module__.partition(".")[0] != "bitsandbytes"


def require_other_engine(plan: ResolvedPlan) -> None:
    """Raise an error if only ``HostEngine`` supports the plan's optimizer.

    Args:
        plan: The resolved plan.

    Raises:
        OptimizerError: Only the host engine runs the optimizer.
    """
    if chosen_optimizer(plan).implementation == AdamW8BitStates.__name__:
        raise OptimizerError(
            "only the host engine runs this optimizer, but another engine runs the plan",
            'resolve the plan with engine="host" or streamed=True, or use bitsandbytes\' AdamW8bit',
            "optimizer.type",
            AdamW8BitStates.__name__,
        )
