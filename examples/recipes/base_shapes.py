"""Maximal-update parametrisation: base shapes from a narrow model of the same class.

``MuAdam``, ``MuAdamW`` and ``MuSGD`` (Yang et al. 2022, https://arxiv.org/abs/2203.03466) need them
before the engine starts. Copy the file, and install ``zerotune[mup]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mup
import torch

from zerotune.errors import EngineError


@attrs.frozen(kw_only=True)
class BaseShapes:
    """Result of ``set_base_shapes``."""

    width_multipliers: Mapping[str, float]
    """Ratio of each parameter's width to the base model's; 1 if no dimension is a width."""
    readouts: tuple[str, ...]
    """Names of output layers whose input is divided by their width multiplier."""


def set_base_shapes(
    model: torch.nn.Module,
    *,
    base: Mapping[str, Any] | torch.nn.Module,
    delta: Mapping[str, Any] | torch.nn.Module,
    rescale: bool = True,
) -> BaseShapes:
    """Record on every parameter which dimensions are widths, and their sizes in the base model.

    Call ``set_base_shapes`` directly after building the model, before creating an engine. An output
    layer maps a width to a fixed size. The input of every output layer is divided by the width
    multiplier, because diffusers' models lack mup's ``MuReadout`` layers.

    Args:
        model: The model to train.
        base: The base model as a module, which may be on the meta device. For a diffusers model, a
            mapping of overrides of ``model.config`` suffices, such as ``{"block_out_channels": (32,
            64)}``.
        delta: A model whose widths differ from the base model's, in the same form as ``base``.
            Dimensions that differ between ``base`` and ``delta`` are widths.
        rescale: Whether to scale the initial weights according to mup. Pass ``False`` for weights
            loaded from a checkpoint.

    Returns:
        The width multipliers and the names of output layers.

    Raises:
        EngineError: The models have different parameters, or base shapes are already set.
    """
    if any(hasattr(parameter, "infshape") for parameter in model.parameters()):
        raise EngineError(
            "base shapes are already set, and weights must not be scaled twice",
            key="model",
            value=type(model).__name__,
            fix="build the model again, and call set_base_shapes once",
        )
    narrow, wider = (_of_other_width(model, changes) for changes in (base, delta))
    _check_same(model, narrow, wider)
    # mup's check requires MuReadout, which the hooks below replace.
    mup.set_base_shapes(model, narrow, delta=wider, rescale_params=False, do_assert=False)
    for name, parameter in model.named_parameters():
        if parameter.infshape.ninf() > 2:  # type: ignore[attr-defined]
            raise EngineError(
                "more than two dimensions of this parameter grow with the width",
                key=name,
                value=tuple(parameter.shape),
                fix="choose base and delta so that they differ only in channels",
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
            "configuration changes are possible only for a diffusers model",
            key="model",
            value=type(model).__name__,
            fix="pass modules as base and delta",
        )
    with torch.device("meta"):
        narrow: torch.nn.Module = type(model).from_config({**model.config, **changes})
    return narrow


def _check_same(model: torch.nn.Module, narrow: torch.nn.Module, wider: torch.nn.Module) -> None:
    names = [{name for name, _ in module.named_parameters()} for module in (model, narrow, wider)]
    odd = (names[0] ^ names[1]) | (names[1] ^ names[2])
    if odd:
        raise EngineError(
            "model, base and delta must have the same parameters, but one of them lacks this "
            "parameter",
            key=sorted(odd)[0],
            fix="use the same number of blocks and layers in all three models",
        )
    shapes = [
        {n: tuple(p.shape) for n, p in module.named_parameters()} for module in (narrow, wider)
    ]
    if shapes[0] == shapes[1]:
        raise EngineError(
            "base and delta have the same shapes, so no dimension can be recognised as a width",
            key="delta",
            fix="make delta wider than base",
        )


def _width(parameter: Any) -> float:
    return float(parameter.infshape.width_mult())


def _is_readout(module: torch.nn.Module) -> bool:
    """Whether a layer maps a width (second dimension) to a fixed size (first dimension)."""
    weight = getattr(module, "weight", None)
    if weight is None or not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
        return False
    out_dim, in_dim, *_ = weight.infshape
    return in_dim.isinf() and not out_dim.isinf()


def _divide_input(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] / _width(module.weight), *inputs[1:])


def _rescale(model: torch.nn.Module) -> None:
    """Scale torch's initial weights to the variance in mup's table 8.

    Hidden layers have variance 1/fan_in in both torch and the table. A readout has variance
    1/width, and its input is divided by the width, so it is scaled up by the square root of the
    multiplier. A bias has variance 1/fan_in in torch, but must not depend on the width.
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
