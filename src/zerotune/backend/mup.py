"""Maximal-update parametrisation: base shapes from a narrow model of the same class.

For ``MuAdam``, ``MuAdamW`` and ``MuSGD`` (Yang et al. 2022, https://arxiv.org/abs/2203.03466).
Needs the extra ``zerotune[mup]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from zerotune.backend.upstream import require
from zerotune.errors import EngineError


@attrs.frozen(kw_only=True)
class BaseShapes:
    """What ``set_base_shapes`` found and changed."""

    width_multipliers: Mapping[str, float]
    """How much wider each parameter is than in the base model; 1 where width does not reach."""
    readouts: tuple[str, ...]
    """Output layers whose input is divided by their width multiplier."""


def set_base_shapes(
    model: torch.nn.Module,
    *,
    base: Mapping[str, Any] | torch.nn.Module,
    delta: Mapping[str, Any] | torch.nn.Module,
    rescale: bool = True,
) -> BaseShapes:
    """Tell every parameter of ``model`` which of its dimensions are widths, and of what base.

    Call it right after the model has been built, before an engine takes it over. Output layers,
    from a width to a fixed size, get their input divided by the width multiplier: mup asks for
    its own ``MuReadout`` there, which diffusers' models do not have.

    Args:
        model: The model to train.
        base: The base model: of a diffusers model, what differs from ``model.config``, such as
            ``{"block_out_channels": (32, 64)}``; else a module (on the meta device if you like).
        delta: The same for a model of another width than the base. Dimensions in which these
            two differ are widths.
        rescale: Whether the initial weights are scaled from their width's to the base's. Not for
            weights loaded from a checkpoint.

    Returns:
        The multipliers, and which layers are outputs.

    Raises:
        MissingDependencyError: mup is not installed.
        EngineError: The models do not have the same parameters, or the base shapes were set
            before.
    """
    mup = require("mup", key="optimizer.type", fix="pip install 'zerotune[mup]'")
    if any(hasattr(parameter, "infshape") for parameter in model.parameters()):
        raise EngineError(
            "base shapes were set before, and scaling weights twice would be wrong",
            key="model",
            value=type(model).__name__,
            fix="build the model anew",
        )
    narrow, wider = (_of_other_width(model, changes) for changes in (base, delta))
    _check_same(model, narrow, wider)
    # Its own check asks for MuReadout, in whose place the hooks below stand.
    mup.set_base_shapes(model, narrow, delta=wider, rescale_params=False, do_assert=False)
    for name, parameter in model.named_parameters():
        if parameter.infshape.ninf() > 2:  # type: ignore[attr-defined]
            raise EngineError(
                "more than two of its dimensions grow with the width",
                key=name,
                value=tuple(parameter.shape),
                fix="choose base and delta that differ in channels only",
            )
    if rescale:
        _rescale(model)
    names = {id(p): name for name, p in model.named_parameters()}
    readouts = [module for module in model.modules() if _is_readout(module)]
    for module in readouts:
        module.register_forward_pre_hook(_divide_input)
    return BaseShapes(
        width_multipliers={name: _width(p) for name, p in model.named_parameters()},
        readouts=tuple(names[id(module.weight)].rpartition(".")[0] for module in readouts),
    )


def _of_other_width(model: Any, changes: Mapping[str, Any] | torch.nn.Module) -> torch.nn.Module:
    if isinstance(changes, torch.nn.Module):
        return changes
    if not hasattr(model, "from_config") or not hasattr(model, "config"):
        raise EngineError(
            "only a diffusers model knows its own configuration",
            key="model",
            value=type(model).__name__,
            fix="give modules as base and delta",
        )
    with torch.device("meta"):
        narrow: torch.nn.Module = type(model).from_config({**model.config, **changes})
    return narrow


def _check_same(model: torch.nn.Module, narrow: torch.nn.Module, wider: torch.nn.Module) -> None:
    names = [{name for name, _ in module.named_parameters()} for module in (model, narrow, wider)]
    odd = (names[0] ^ names[1]) | (names[1] ^ names[2])
    if odd:
        raise EngineError(
            "base and delta may differ in widths only, and here one has parameters the other lacks",
            key=sorted(odd)[0],
            fix="keep the number of blocks and layers",
        )
    shapes = [
        {n: tuple(p.shape) for n, p in module.named_parameters()} for module in (narrow, wider)
    ]
    if shapes[0] == shapes[1]:
        raise EngineError(
            "base and delta have the same shapes, so nothing tells which dimensions are widths",
            key="delta",
            fix="make one of them wider",
        )


def _width(parameter: Any) -> float:
    return float(parameter.infshape.width_mult())


def _is_readout(module: torch.nn.Module) -> bool:
    """From a width (the second dimension) to a size that does not grow (the first)."""
    weight = getattr(module, "weight", None)
    if weight is None or not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
        return False
    out_dim, in_dim, *_ = weight.infshape
    return in_dim.isinf() and not out_dim.isinf()


def _divide_input(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] / _width(module.weight), *inputs[1:])


def _rescale(model: torch.nn.Module) -> None:
    """From the variance torch's layers start with to that of mup's table 8.

    Hidden layers start with 1/fan_in in both. A readout starts with 1/width and is divided by
    the width once more in its forward pass, so it is scaled up by the root of the multiplier. A
    bias starts with 1/fan_in in torch, but its size must not depend on the width.
    """
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
                continue
            fan_in = float(module.weight.infshape[1].width_mult())  # type: ignore[attr-defined]
            if _is_readout(module):
                module.weight.mul_(fan_in**0.5)
            if module.bias is not None:
                module.bias.mul_(fan_in**0.5)
