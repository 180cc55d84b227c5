"""Modules that stage 3 fetches as a whole."""

from __future__ import annotations

from typing import Any, Final

import torch

from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.model import ResolvedPlan
from zerotune.plan.resolve import LEAF_CLASSES, LEAF_MODULE

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


def reduce_by_parameter(engine: Any) -> tuple[Decision, ...]:
    """Let the gradients of leaf modules be reduced as everybody else's: each once it is whole.

    DeepSpeed reduces all of a leaf module's gradients after each of its backward passes. Called
    twice before one backward pass, the first reduction finds gradients that are not there yet,
    fills in zeros, and the second fails on ``assert len(set(…)) == len(params_in_bucket)``. That
    waiting is meant for experts that may go without a gradient; the blocks zerotune fetches as a
    whole have one each time, so their weights need it for fetching alone. Other leaf modules stay
    as they are. Collective.

    Args:
        engine: DeepSpeed's engine, of any stage.
    """
    optimizer = engine.optimizer
    leaves = getattr(optimizer, "leaf_parameters", {})
    changed = [leaf for leaf in leaves if type(leaf).__name__ in LEAF_CLASSES]
    if not changed:
        return ()
    for leaf in changed:
        for parameter in leaves[leaf]:
            del parameter.ds_z3_leaf_module
    for hooks in (optimizer._grad_acc_hooks, optimizer._leaf_module_hooks):
        while hooks:
            hooks.pop().remove()
    optimizer.create_reduce_and_remove_grad_hooks()
    names = sorted({type(leaf).__name__ for leaf in changed})
    return (
        Decision(
            key=f"{KEY}.gradients",
            before="by module",
            after="by parameter",
            reason=f"{', '.join(names)}: fetched as a whole, but reduced one by one, since "
            "DeepSpeed's way fails where a model is called twice before one backward pass",
        ),
    )


def called_twice(engine: Any) -> EngineError | None:
    """What to say of DeepSpeed's bare ``AssertionError`` in a backward pass.

    Args:
        engine: DeepSpeed's engine.

    Returns:
        The error, or ``None`` where no leaf modules can have caused it.
    """
    leaves = getattr(engine.optimizer, "leaf_parameters", None)
    if not leaves:
        return None
    names = sorted({type(leaf).__name__ for leaf in leaves})
    return EngineError(
        "DeepSpeed reduces the gradients of leaf modules after each of their forward passes, and "
        "cannot where there were several before one backward pass",
        key=f"{KEY}.classes",
        value=names,
        fix="take out those that are called more than once (an empty list: no leaf modules), or "
        "call the model once, with both batches joined",
    )


def doubtful_leaf_modules(plan: ResolvedPlan, model: torch.nn.Module) -> tuple[Decision, ...]:
    """What DeepSpeed says nothing of.

    Called with keywords, a leaf module's weights are gone before the backward pass needs them.
    """
    classes = _classes(plan)
    found = {type(module).__name__ for module in named_leaf_modules(plan, model)}
    if classes and not found:
        return (_warning(classes, "the model has no such modules"),)
    if found - LEAF_CLASSES:
        why = "DeepSpeed cannot train leaf modules that are called with keywords"
        return (_warning(sorted(found - LEAF_CLASSES), why),)
    return ()


def _classes(plan: ResolvedPlan) -> list[str]:
    zero = plan.plan.zero_optimization
    written: Any = zero.extra.get(LEAF_MODULE) if zero is not None and plan.stage == 3 else None
    classes = written.get("classes", ()) if isinstance(written, dict) else ()
    return [classes] if isinstance(classes, str) else [str(name) for name in classes]


def _warning(value: Any, why: str) -> Decision:
    return Decision(key=KEY, before=value, after=value, reason=why, severity="warning")
