"""LoRA: a few trained matrices beside a frozen model.

The adapters are peft's and sit in the model itself, so that a model with adapters is to every
engine what any model is: most of its parameters do not require a gradient.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import torch

from zerotune._util.numbers import positive, validated
from zerotune._util.text import did_you_mean
from zerotune.backend.adapters import AdapterFacts, adapter_layers, remember, starting_points
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.stored import bring_weights, standing_in
from zerotune.backend.trained_parts import TrainedParts, components
from zerotune.decisions import Decision, announce
from zerotune.errors import (
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
    MissingDependencyError,
)
from zerotune.plan.model import ATTENTION_PROJECTIONS

_ADAPTABLE: Final = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.Embedding,
)

_INITIALIZATIONS: Final = (True, False, "gaussian", "orthogonal")
"""Those of peft that leave the base weights alone; the others train against a changed base, and
their file would not fit the published one."""

_CLOSE: Final = 3

_FILE: Final = "pytorch_lora_weights.safetensors"

# -- What kind of adapters, and where.


_POSITIVE: Final = validated(positive, fix="such as 16")


def _as_targets(targets: Any) -> Any:
    return targets if targets is None or isinstance(targets, str) else tuple(targets)


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

    rank: int = attrs.field(default=16, validator=_POSITIVE)
    """Inner size of the two factors."""
    alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(_POSITIVE))
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


# -- New adapters.


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
    _require_no_adapters(model)
    config = _config(model, wanted)
    model.requires_grad_(False)
    decisions = _read_for_magnitudes(model) if wanted.dora else ()
    add = getattr(model, "add_adapter", None)
    with standing_in(model):
        if add is not None:
            add(config, adapter_name=wanted.name)
        else:
            _peft().inject_adapter_in_model(config, model, adapter_name=wanted.name)
    if not wanted.targets:
        decisions += (_default_decision(config.target_modules),)
    return _train_only(model, wanted.name, base_dtype=base_dtype, decisions=decisions)


def _read_for_magnitudes(model: torch.nn.Module) -> tuple[Decision, ...]:
    """DoRA begins with the norms of the base weights: read those that wait in their files."""
    if not bring_weights(model):
        return ()
    return (
        Decision(
            key="model.weights",
            before="in their files",
            after="read whole on every rank",
            reason="DoRA's magnitudes begin as norms of the base weights",
            severity="warning",
        ),
    )


def _require_no_adapters(model: torch.nn.Module) -> None:
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


def _config(model: torch.nn.Module, lora: LoRA) -> Any:
    """Peft's configuration for these adapters in this model.

    Raises:
        InvalidValueError: A target, exclusion or pattern matches no layer.
        MissingDependencyError: peft is not installed.
    """
    package = _peft()
    targets = lora.targets or _default_targets(model)
    _require_matches(model, targets, key="LoRA.targets")
    if lora.exclude:
        _require_matches(model, lora.exclude, key="LoRA.exclude")
    for key, pattern in (("rank", lora.rank_pattern), ("alpha", lora.alpha_pattern)):
        for expression in pattern:
            inside = _regular_expression(rf"(.*\.)?({expression})", key=f"LoRA.{key}_pattern")
            _require_matches(model, inside, key=f"LoRA.{key}_pattern", written=expression)
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


def _for_peft(targets: tuple[str, ...] | str | None) -> list[str] | str | None:
    return list(targets) if isinstance(targets, tuple) else targets


def _default_decision(targets: Any) -> Decision:
    return Decision(
        key="LoRA.targets",
        before=None,
        after=sorted(targets),
        reason="the attention projections this model has",
    )


def _train_only(
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


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _peft() -> ModuleType:
    """The package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is needed for LoRA and could not be imported ({error})",
            key="peft",
            fix="pip install 'zerotune[lora]'",
        ) from error


# -- Adapters from a file as the first values of a training.


def load_adapters(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    component: str | None = None,
    name: str = "default",
    base_dtype: str | torch.dtype | None = None,
) -> AdapterFacts:
    """Freeze a model and give it the adapters of a LoRA file, to train on from there, in place.

    ``add_lora`` with a file in place of an initialization; rank, alpha and targets are the
    file's. Its dropout is not kept in files and is none.

    Args:
        model: A diffusers model or a transformers text encoder, without adapters.
        path: A file in diffusers' format, or a folder that holds one under its usual name.
        component: What the file calls the model (``"unet"``, ``"text_encoder_2"``); told from
            its class when not given.
        name: What the adapter will be called in the model.
        base_dtype: As in ``add_lora``.

    Returns:
        What was added.

    Raises:
        CheckpointError: There is no such file.
        CheckpointMismatchError: It has no adapters for the model, or not all of them fit.
        InvalidValueError: The class does not tell the component, or the model has adapters.
        MissingDependencyError: peft is not installed.
    """
    _peft()
    _require_no_adapters(model)
    file = Path(path) / _FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise CheckpointError("there is no LoRA file", key=str(file))
    ((part, (_, module)),) = components(model, component).items()
    expected = _tensors_in(file, part)
    try:
        with standing_in(module):
            _load(module, file, part, name)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointMismatchError(
            f"does not fit {type(model).__name__} ({error})", key=str(file)
        ) from error
    facts = _train_only(model, name, base_dtype=base_dtype)
    if facts.tensors != expected:
        raise CheckpointMismatchError(
            f"has {expected} tensors for {part!r}, of which the model took {facts.tensors}",
            key=str(file),
            fix="load it onto the model it was trained with",
        )
    return facts


def _tensors_in(file: Path, component: str) -> int:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        keys: list[str] = list(opened.keys())
    count = sum(key.startswith(f"{component}.") and ".lora_" in key for key in keys)
    if count == 0:
        raise CheckpointMismatchError(
            f"has nothing for {component!r}, only for {sorted({k.split('.')[0] for k in keys})}",
            key=str(file),
            fix="name the component=, or let the pipeline's lora_state_dict convert a file of "
            "another trainer, and save that",
        )
    return count


def _load(module: Any, file: Path, component: str, name: str) -> None:
    if hasattr(module, "load_lora_adapter"):
        module.load_lora_adapter(
            str(file.parent),
            weight_name=file.name,
            prefix=component,
            adapter_name=name,
            use_safetensors=True,
            local_files_only=True,
        )
        return
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    state, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
        str(file.parent), weight_name=file.name, local_files_only=True, return_lora_metadata=True
    )
    StableDiffusionLoraLoaderMixin.load_lora_into_text_encoder(
        state,
        alphas,
        module,
        prefix=component,
        adapter_name=name,
        metadata=metadata,
    )


# -- Layers that adapters can go to, and what was meant when a name matches none.


def _default_targets(model: torch.nn.Module) -> tuple[str, ...]:
    """The attention projections a model has.

    Raises:
        InvalidValueError: It has none.
    """
    names = list(_layers(model))
    found = tuple(target for target in ATTENTION_PROJECTIONS if _matches(target, names))
    if not found:
        raise InvalidValueError(
            f"{type(model).__name__} has no attention projections that are known",
            key="LoRA.targets",
            value=None,
            fix=f"name the layers to adapt, such as {_endings(names)[:_CLOSE]}",
        )
    return found


def _require_matches(
    model: torch.nn.Module,
    targets: tuple[str, ...] | str,
    *,
    key: str,
    written: str | None = None,
) -> None:
    """Check that each of some targets matches a layer that can be adapted.

    Args:
        model: The model.
        targets: Ends of names, or one regular expression for whole names.
        key: What they are, for messages.
        written: How the user wrote the expression.

    Raises:
        InvalidValueError: One matches nothing.
    """
    names = list(_layers(model))
    if isinstance(targets, str):
        pattern = _regular_expression(targets, key=key)
        if not any(re.fullmatch(pattern, name) for name in names):
            raise _no_match(key, written or targets, names)
        return
    for target in targets:
        if not _matches(target, names):
            raise _no_match(key, target, names)


def _regular_expression(text: str, *, key: str) -> str:
    """A regular expression that compiles.

    Raises:
        InvalidValueError: It does not.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidValueError(
            f"is no regular expression ({error})", key=key, value=text
        ) from error
    return text


def _layers(model: torch.nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE))


def _matches(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _endings(names: list[str]) -> list[str]:
    """Ends of names that mean a kind of layer: the last part, or two where that is a number."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found[".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])] = None
    return list(found)


def _no_match(key: str, target: str, names: list[str]) -> InvalidValueError:
    endings = _endings(names)
    close = did_you_mean(target, endings, count=_CLOSE, cutoff=0.5, by=str)
    known = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {endings}"
    return InvalidValueError(
        "matches no layer that can be adapted", key=key, value=target, fix=known
    )
