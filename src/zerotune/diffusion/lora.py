"""LoRA: a few trained matrices beside a frozen model.

The adapters are peft's and sit in the model itself, so that a model with adapters is to every
engine what any model is: most of its parameters do not require a gradient.
"""

from __future__ import annotations

import re
from typing import Any, Final

import attrs
import torch

from zerotune.backend.adapters import AdapterFacts, adapter_layers, remember, starting_points
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.trained_parts import TrainedParts
from zerotune.decisions import Decision, announce
from zerotune.diffusion.lora_targets import (
    default_targets,
    peft,
    regular_expression,
    require_matches,
)
from zerotune.errors import InvalidValueError

_INITIALIZATIONS: Final = (True, False, "gaussian", "orthogonal")
"""Those of peft that leave the base weights alone; the others train against a changed base, and
their file would not fit the published one."""


def _as_targets(targets: Any) -> Any:
    return targets if targets is None or isinstance(targets, str) else tuple(targets)


def _positive(_instance: object, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not value > 0):
        raise InvalidValueError(
            "must be more than 0", key=f"LoRA.{attribute.name}", value=value, fix="such as 16"
        )


def _probability(_instance: object, attribute: Any, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidValueError(
            "is a probability below 1", key=f"LoRA.{attribute.name}", value=value
        )


def _initialization(_instance: object, attribute: Any, value: Any) -> None:
    if value not in _INITIALIZATIONS or (not isinstance(value, (bool, str))):
        raise InvalidValueError(
            "changes the base weights, or needs data before training",
            key=f"LoRA.{attribute.name}",
            value=value,
            fix=f"one of {list(_INITIALIZATIONS)}",
        )


def _name(_instance: object, attribute: Any, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise InvalidValueError(
            "may hold letters, digits, - and _", key=f"LoRA.{attribute.name}", value=value
        )


@attrs.frozen(kw_only=True)
class LoRA:
    """What kind of adapters, and where."""

    rank: int = attrs.field(default=16, validator=_positive)
    """Inner size of the two factors."""
    alpha: float | None = attrs.field(default=None, validator=_positive)
    """The product of the factors is scaled by ``alpha / rank``; the rank when not given, which
    is a scale of 1."""
    dropout: float = attrs.field(default=0.0, validator=_probability)
    """Share of an adapter's inputs set to zero in training."""
    targets: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to adapt: ends of their dotted names (``"to_q"``, ``"to_out.0"``), or one regular
    expression for whole names; the attention projections when not given. A family's
    ``lora_targets`` go here."""
    exclude: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to leave out, written like ``targets``."""
    dora: bool = False
    """Weight-decomposed adapters (Liu et al. 2024): a trained magnitude per output."""
    rank_pattern: dict[str, int] = attrs.field(factory=dict)
    """Other ranks for some layers, by the end of their name or a regular expression."""
    alpha_pattern: dict[str, float] = attrs.field(factory=dict)
    """Other alphas for some layers, likewise."""
    init: bool | str = attrs.field(default=True, validator=_initialization)
    """peft's ``init_lora_weights``: ``True``, ``False``, ``"gaussian"`` or ``"orthogonal"``.
    Drawn from torch's global generator."""
    name: str = attrs.field(default="default", validator=_name)
    """What the adapter is called in the model; files do not hold it."""


def add_lora(
    model: torch.nn.Module, lora: LoRA | None = None, *, base_dtype: str | torch.dtype | None = None
) -> AdapterFacts:
    """Freeze a model and give it trained adapters, in place.

    Call it before ``zerotune.prepare`` or ``Trainer``. The adapters are fp32, as every engine
    wants what it trains; under a bf16 plan DeepSpeed computes with them in bf16 and keeps the
    fp32 master weights. It also casts the base to the plan's precision, and at stage 3 partitions
    it, so ``base_dtype`` matters before that, and for the plain engine.

    Args:
        model: A diffusers model, a transformers text encoder, or any module peft can adapt.
        lora: Which adapters; ``LoRA()`` when not given.
        base_dtype: Cast what is frozen to ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch dtype;
            left as it is when not given.

    Returns:
        What was added; also kept on the model, where exports compare against it.

    Raises:
        InvalidValueError: A target matches nothing, or the model has adapters already.
        MissingDependencyError: peft is not installed.
    """
    wanted = lora or LoRA()
    if isinstance(model, TrainedParts):
        raise InvalidValueError(
            "adapters belong to one of the parts",
            key="model",
            value=type(model).__name__,
            fix='add_lora(parts["unet"], ...) for each part',
        )
    require_no_adapters(model)
    config = lora_config(model, wanted)
    model.requires_grad_(False)
    add = getattr(model, "add_adapter", None)
    if add is not None:
        add(config, adapter_name=wanted.name)
    else:
        peft().inject_adapter_in_model(config, model, adapter_name=wanted.name)
    targets = () if wanted.targets else (_default_decision(config.target_modules),)
    return settle(model, wanted.name, base_dtype=base_dtype, decisions=targets)


def require_no_adapters(model: torch.nn.Module) -> None:
    """Refuse a model that has adapters: only those added last would be active.

    Raises:
        InvalidValueError: It has some.
    """
    there = list(getattr(model, "peft_config", None) or ())
    if there:
        raise InvalidValueError(
            "the model has adapters already, which new ones would switch off",
            key="model",
            value=there,
            fix="fold them in (merge_adapters), or load the model anew",
        )


def lora_config(model: torch.nn.Module, lora: LoRA) -> Any:
    """Peft's configuration for these adapters in this model.

    Raises:
        InvalidValueError: A target, exclusion or pattern matches no layer.
        MissingDependencyError: peft is not installed.
    """
    package = peft()
    targets = lora.targets or default_targets(model)
    require_matches(model, targets, key="LoRA.targets")
    if lora.exclude:
        require_matches(model, lora.exclude, key="LoRA.exclude")
    for key, pattern in (("rank", lora.rank_pattern), ("alpha", lora.alpha_pattern)):
        for expression in pattern:
            inside = regular_expression(rf"(.*\.)?({expression})", key=f"LoRA.{key}_pattern")
            require_matches(model, inside, key=f"LoRA.{key}_pattern", written=expression)
    return package.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        lora_dropout=lora.dropout,
        target_modules=_for_peft(targets),
        exclude_modules=_for_peft(lora.exclude),
        use_dora=lora.dora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        init_lora_weights=lora.init,
    )


def settle(
    model: torch.nn.Module,
    adapter: str,
    *,
    base_dtype: str | torch.dtype | None,
    decisions: tuple[Decision, ...] = (),
) -> AdapterFacts:
    """Have a model train one adapter in fp32 and nothing else; record what that is."""
    trained = {}
    for name, parameter in model.named_parameters():
        owned = f".{adapter}." in f"{name}." and ".lora_" in name
        parameter.requires_grad_(owned)
        if owned:
            parameter.data = parameter.data.float()
            trained[name] = parameter
    if base_dtype is not None:
        decisions += _cast_base(model, checked_dtype(base_dtype, key="base_dtype"))
    facts = AdapterFacts(
        name=adapter,
        layers=tuple(name for name, layer in adapter_layers(model) if adapter in layer.scaling),
        tensors=len(trained),
        trained=sum(_numel(parameter) for parameter in trained.values()),
        total=sum(_numel(parameter) for parameter in model.parameters()),
        decisions=decisions,
        initial={name: starting_points(parameter) for name, parameter in trained.items()},
    )
    remember(model, facts)
    announce(decisions)
    return facts


def _cast_base(model: torch.nn.Module, dtype: torch.dtype) -> tuple[Decision, ...]:
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    before = sorted({str(p.dtype).removeprefix("torch.") for p in frozen if p.dtype != dtype})
    for parameter in frozen:
        # What stage 3 has partitioned keeps its dtype in the partition too.
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
    if not before:
        return ()
    return (
        Decision(
            key="model.base.dtype",
            before=", ".join(before),
            after=str(dtype).removeprefix("torch."),
            reason="frozen weights need no more precision than the forward pass",
        ),
    )


def _default_decision(targets: Any) -> Decision:
    return Decision(
        key="LoRA.targets",
        before=None,
        after=sorted(targets),
        reason="the attention projections this model has",
    )


def _for_peft(targets: tuple[str, ...] | str | None) -> list[str] | str | None:
    return list(targets) if isinstance(targets, tuple) else targets


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
