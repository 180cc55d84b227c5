"""What people give to ``Trainer`` and ``prepare``, taken or answered before anything starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from zerotune.backend.trained_parts import TrainedParts
from zerotune.diffusion.models.family import Unconditional
from zerotune.errors import InvalidValueError
from zerotune.optim import OptimizerResolver
from zerotune.plan.advise import Advice
from zerotune.plan.model import DeepSpeedPlan, ResolvedPlan


def as_plan(plan: Any) -> DeepSpeedPlan | ResolvedPlan:
    """A plan, read first where it is a file or a configuration.

    Args:
        plan: A plan, resolved or not; an ``Advice``; the path of a JSON or YAML file; a dict.

    Raises:
        PlanError: It cannot be read.
        InvalidValueError: It is none of these.
    """
    if isinstance(plan, DeepSpeedPlan | ResolvedPlan):
        return plan
    if isinstance(plan, Advice):
        return plan.plan
    if isinstance(plan, str | os.PathLike):
        return DeepSpeedPlan.load(plan)
    if isinstance(plan, Mapping):
        return DeepSpeedPlan.from_dict(plan)
    raise InvalidValueError(
        "is no plan",
        key="plan",
        value=plan,
        fix="give a DeepSpeedPlan, a DeepSpeed configuration as a dict, or the path of its file",
    )


def check_model(model: Any) -> None:
    """Whether this is a module that can be trained.

    Raises:
        InvalidValueError: A path, a whole pipeline, or something else.
    """
    if isinstance(model, torch.nn.Module):
        return
    value: Any = model if isinstance(model, str | os.PathLike) else type(model).__name__
    if isinstance(model, str | os.PathLike):
        why = "is where a model lies, not a model"
        fix = f"load it: loaded = zerotune.load_pretrained({os.fspath(model)!r}), then loaded.model"
    elif hasattr(model, "components") or hasattr(model, "save_pretrained"):
        why = "is a whole pipeline; one of its models is trained"
        fix = "zerotune.load_pretrained(FOLDER) gives model and objective, or give pipeline.unet "
        fix += "(or pipeline.transformer)"
    else:
        why, fix = "is no torch.nn.Module", "give the module that is to be trained"
    raise InvalidValueError(why, key="model", value=value, fix=fix)


def check_objective(objective: Any, model: torch.nn.Module) -> None:
    """Whether an objective without conditioning meets a model that can do without it.

    Args:
        objective: ``None`` is the default, which has none.
        model: What it will call.

    Raises:
        InvalidValueError: The model takes texts or labels.
    """
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
        + " gives it noisy images alone",
        key="objective",
        value=None if objective is None else type(objective).__name__,
        fix="FlowMatchingObjective(family=ClassConditional())"
        if labels
        else "loaded = zerotune.load_pretrained(FOLDER), then objective=loaded.objective()",
    )


def _conditioning_of(model: torch.nn.Module) -> str | None:
    """What a model needs to be called with besides noisy images and their times."""
    if getattr(model, "class_embedding", None) is not None:
        return "class_labels"
    taken = list(inspect.signature(model.forward).parameters.values())
    # Transformers of SD3 and Flux take texts in the place of times.
    if [each.name for each in taken[1:2]] == ["encoder_hidden_states"]:
        return "encoder_hidden_states"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [
        each.name
        for each in taken[2:]
        if each.kind in named and each.default is inspect.Parameter.empty
    ]
    return ", ".join(required) or None


def check_resolver(optimizer: Any) -> None:
    """Whether this settles optimizers, rather than being one.

    Raises:
        InvalidValueError: It is not; the message says where the optimizer is named.
    """
    if optimizer is None or isinstance(optimizer, OptimizerResolver):
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, torch.optim.Optimizer):
        name = kind.__name__
        why = "the engine builds the optimizer itself, over the weights that ZeRO has partitioned"
    else:
        name = optimizer if isinstance(optimizer, str) else "AdamW"
        why = "is no OptimizerResolver"
    raise InvalidValueError(
        why,
        key="optimizer",
        value=optimizer if isinstance(optimizer, str) else kind.__name__,
        fix=f'name it in the plan, optimizer={{"type": "{name}", "params": {{"lr": …}}}}, or here: '
        f'OptimizerResolver(overrides={{"optimizer.type": "{name}", "lr": …}})',
    )
