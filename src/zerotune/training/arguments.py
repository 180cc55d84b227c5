"""Check and convert the arguments of ``Trainer`` and ``prepare`` before anything starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from zerotune.backend.trained_parts import TrainedParts
from zerotune.diffusion.models.family import Unconditional
from zerotune.errors import InvalidValueError
from zerotune.optim import OptimizerResolver
from zerotune.plan.plan import Advice, DeepSpeedPlan, ResolvedPlan


def as_plan(plan: Any) -> DeepSpeedPlan | ResolvedPlan | Advice:
    """Convert a configuration, or the path to a configuration file, into a plan."""
    if isinstance(plan, DeepSpeedPlan | ResolvedPlan | Advice):
        return plan
    if isinstance(plan, str | os.PathLike):
        return DeepSpeedPlan.load(plan)
    if isinstance(plan, Mapping):
        return DeepSpeedPlan.from_dict(plan)
    raise InvalidValueError(
        "is not a plan",
        "pass a DeepSpeedPlan, a DeepSpeed configuration as a dict, or the path of a "
        "configuration file",
        "plan",
        plan,
    )


def check_model(model: Any) -> None:
    """Check that the model is a module that can be trained."""
    if isinstance(model, torch.nn.Module):
        _check_whole(model)
        return
    name = getattr(model, "__name__", type(model).__name__)
    of_class = isinstance(model, type)
    raise InvalidValueError(
        "is a class, not a model" if of_class else "is not a torch.nn.Module",
        f"create the model: {name}(…) or {name}.from_pretrained(FOLDER)"
        if of_class
        else "write loaded = zerotune.load_pretrained(FOLDER), which returns model and objective, "
        "or pass the module to train, such as pipeline.unet or pipeline.transformer",
        "model",
        model if isinstance(model, str | os.PathLike) else name,
    )


def _check_whole(model: torch.nn.Module) -> None:
    """Check that no module is compiled, lazy, sparse, or wrapped by peft's modules_to_save."""
    for name, module in model.named_modules():
        key, value = f"model.{name}" if name else "model", type(module).__name__
        if "_orig_mod" in vars(module)["_modules"]:
            raise InvalidValueError(
                "torch.compile returned this module, which adds _orig_mod to the names of weights "
                "in checkpoints and exports",
                "pass the original module and compile=True, or write "
                "module.forward = torch.compile(module.forward)",
                key,
                value,
            )
        if any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise InvalidValueError(
                "is a lazy module, whose weights have no shape yet",
                "call the model once before you pass it",
                key,
                value,
            )
        if type(module).__name__ == "ModulesToSaveWrapper":
            raise InvalidValueError(
                "peft wraps this module, which would rename its weights in checkpoints and exports",
                "omit modules_to_save, and target the module with adapters as well",
                f"{key} (modules_to_save)",
                value,
            )
        if getattr(module, "sparse", None) is True and module.weight.requires_grad:
            raise InvalidValueError(
                "has sparse gradients, which no engine supports",
                "write sparse=False",
                f"{key}.sparse",
                True,
            )


def check_objective(objective: Any, model: torch.nn.Module) -> None:
    """Check that the objective passes the conditioning that the model requires.

    Args:
        objective: The objective; ``None`` means the default objective, which is unconditional.
        model: The model that the objective calls.
    """
    if objective is not None:
        _check_callable(objective)
    if objective is not None and not isinstance(getattr(objective, "family", None), Unconditional):
        return
    called = model.primary if isinstance(model, TrainedParts) else model
    needed = _conditioning_of(called)
    if needed is None:
        return
    labels = needed == "class_labels"
    raise InvalidValueError(
        f"{type(called).__name__} is conditioned on {needed}, and "
        + ("the default objective" if objective is None else "the objective's family")
        + " passes only noisy images",
        "write objective=FlowMatchingObjective(family=ClassConditional())"
        if labels
        else "write loaded = zerotune.load_pretrained(FOLDER), then objective=loaded.objective()",
        "objective",
        None if objective is None else type(objective).__name__,
    )


_LOSSES: Final = "torch.nn.modules.loss"


def _check_callable(objective: Any) -> None:
    of_torch = getattr(objective, "__module__", "") in ("torch.nn.functional", _LOSSES)
    if callable(objective) and not isinstance(objective, type) and not of_torch:
        try:
            inspect.signature(objective).bind("model", "batch", "generator")
        except TypeError as error:
            raise InvalidValueError(
                f"must accept model, batch and generator ({error})",
                "write def objective(model, batch, generator): … return loss",
                "objective",
                getattr(objective, "__name__", type(objective).__name__),
            ) from error
        except ValueError:  # Some C callables have no signature.
            pass
        return
    why = "is not callable; an objective computes the loss"
    if of_torch:
        why = "compares two tensors, but an objective computes the loss of a batch"
    elif isinstance(objective, type):
        why = "is a class"
    raise InvalidValueError(
        why,
        "pass FlowMatchingObjective(family=…), DenoisingObjective(family=…), "
        "zerotune.load_pretrained(FOLDER).objective(), or a function of model, batch and generator",
        "objective",
        objective
        if isinstance(objective, str)
        else getattr(objective, "__name__", type(objective).__name__),
    )


def _conditioning_of(model: torch.nn.Module) -> str | None:
    """Return the arguments a model requires besides noisy images and time steps."""
    if getattr(model, "class_embedding", None) is not None:
        return "class_labels"
    taken = list(inspect.signature(model.forward).parameters.values())
    # The second argument of SD3's and Flux's transformers is the text, not the time step.
    if [each.name for each in taken[1:2]] == ["encoder_hidden_states"]:
        return "encoder_hidden_states"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [
        each.name
        for each in taken[2:]
        if each.kind in named and each.default is inspect.Parameter.empty
    ]
    return ", ".join(required) or None


def check_resolver(resolver: Any, *, key: str = "resolver") -> None:
    """Check that the argument is an optimizer resolver, not an optimizer."""
    if resolver is None or isinstance(resolver, OptimizerResolver):
        return
    kind = resolver if isinstance(resolver, type) else type(resolver)
    name = kind.__name__ if issubclass(kind, torch.optim.Optimizer) else "AdamW"
    raise InvalidValueError(
        "is not an OptimizerResolver; the engine builds the optimizer for the weights that ZeRO "
        "partitions",
        f'set the optimizer with DeepSpeedPlan.build(optimizer="{name}", lr=…)',
        key,
        resolver if isinstance(resolver, str) else kind.__name__,
    )


def refuse_unknown(arguments: Mapping[str, Any], call: str) -> None:
    """Reject unknown keyword arguments.

    Raises:
        InvalidValueError: An argument is named ``optimizer``; the optimizer belongs in the plan.
        TypeError: An argument with any other name is given.
    """
    check_resolver(arguments.get("optimizer"), key="optimizer")
    if arguments:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(arguments)!r}")


def check_kind(value: Any, kind: type, *, key: str, write: str) -> None:
    """Check the class of an optional argument.

    Args:
        value: The argument's value; ``None`` if omitted.
        kind: The required class or runtime-checkable protocol.
        key: Name of the argument.
        write: Expression that the error's fix recommends.
    """
    if value is None or (isinstance(value, kind) and not isinstance(value, type)):
        return
    raise InvalidValueError(
        "is a class" if isinstance(value, type) else f"is not a valid {kind.__name__}",
        f"write {key}={write}",
        key,
        value.__name__ if isinstance(value, type) else value,
    )
