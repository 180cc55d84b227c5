"""Modules that stage 3 fetches as a whole."""

from __future__ import annotations

from typing import Any, Final

import torch

from zerotune.decisions import Decision
from zerotune.plan.api import ResolvedPlan
from zerotune.plan.fill import LEAF_CLASSES, LEAF_MODULE

KEY: Final = f"zero_optimization.{LEAF_MODULE}"


def leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that DeepSpeed has marked."""
    return [module for module in model.modules() if getattr(module, "_z3_leaf", False) is True]


def named_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of the classes that the plan names; none below stage 3."""
    classes = _classes(plan)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in classes
        or f"{type(module).__module__}.{type(module).__qualname__}" in classes
    ]


def doubtful_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> tuple[Decision, ...]:
    """What DeepSpeed says nothing of.

    A leaf module's gradients are reduced once those of its positional inputs are there, and what
    is missing then is filled with zeros (``reduce_leaf_module_grads``). Called with keywords, its
    weights are gone before the backward pass needs them; where its input needs no gradient, since
    all before it is frozen, its own may come too late.
    """
    classes = _classes(plan)
    found = {type(module).__name__ for module in named_leaf_modules(plan, model)}
    if classes and not found:
        return (_warning(classes, "the model has no such modules"),)
    if found - LEAF_CLASSES:
        why = "DeepSpeed cannot train leaf modules that are called with keywords"
        return (_warning(sorted(found - LEAF_CLASSES), why),)
    if found and not all(parameter.requires_grad for parameter in model.parameters()):
        why = "DeepSpeed fills in zeros for gradients of leaf modules whose input needs none"
        return (_warning(sorted(found), why),)
    return ()


def _classes(plan: ResolvedPlan) -> list[str]:
    zero = plan.plan.zero_optimization
    written: Any = zero.extra.get(LEAF_MODULE) if zero is not None and plan.stage == 3 else None
    classes = written.get("classes", ()) if isinstance(written, dict) else ()
    return [classes] if isinstance(classes, str) else [str(name) for name in classes]


def _warning(value: Any, why: str) -> Decision:
    return Decision(key=KEY, before=value, after=value, reason=why, severity="warning")
