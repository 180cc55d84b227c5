"""Leaf modules of stage 3, whose weights DeepSpeed gathers as a whole."""

from __future__ import annotations

from typing import Any, Final

import torch

from zerotune.decisions import Decision
from zerotune.plan.plan import ResolvedPlan
from zerotune.plan.resolve.sizes import LEAF_CLASSES
from zerotune.plan.resolved import LEAF_MODULE

LEAF_KEY: Final = f"zero_optimization.{LEAF_MODULE}"


def leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that DeepSpeed has marked as leaf modules."""
    return [module for module in model.modules() if getattr(module, "_z3_leaf", False) is True]


def named_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of the leaf classes that the plan names.

    Args:
        plan: The resolved plan.
        model: The model.
    """
    classes = _leaf_classes(plan)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in classes
        or f"{type(module).__module__}.{type(module).__qualname__}" in classes
    ]


def doubtful_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> tuple[Decision, ...]:
    """Return warnings about leaf modules that do not exist or cannot be trained.

    If a leaf module is called with keyword arguments, DeepSpeed releases the module's weights
    before the backward pass needs them.

    Args:
        plan: The resolved plan.
        model: The model.
    """
    named, classes = (
        _leaf_classes(plan),
        {type(m).__name__ for m in named_leaf_modules(plan, model)},
    )
    value, why = named, "the model has no modules of these classes"
    if classes:
        value = sorted(classes - LEAF_CLASSES)
        why = "DeepSpeed cannot train leaf modules that are called with keyword arguments"
    if not value:
        return ()
    return (Decision(LEAF_KEY, value, value, why, "warning"),)


def _leaf_classes(plan: ResolvedPlan) -> list[str]:
    zero = plan.plan.zero_optimization
    written: Any = None if zero is None else zero.extra.get(LEAF_MODULE)
    classes = written.get("classes", ()) if isinstance(written, dict) else ()
    return [classes] if isinstance(classes, str) else [str(name) for name in classes]
