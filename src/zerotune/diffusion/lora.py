"""LoRA and related adapters: small trainable matrices added to a frozen model.

The adapters come from peft and become part of the model. Engines need no special support, because
the model's frozen parameters simply do not require gradients.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.text import did_you_mean, positive, validated
from zerotune.backend.adapters import (
    PEFT_CONFIG,
    PEFT_FILE,
    AdapterFacts,
    AdapterParameter,
    adapter_settings,
    find_adapters,
    read_others,
)
from zerotune.backend.checks import checked_dtype
from zerotune.backend.stored import bring_weights, standing_in
from zerotune.backend.trained_parts import TrainedParts, components
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointMismatchError, InvalidValueError, MissingDependencyError
from zerotune.plan.facts import ATTENTION_PROJECTIONS, ModelFacts, is_wrapper

if TYPE_CHECKING:
    from peft import PeftConfig

_ADAPTABLE: Final = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.Embedding,
)

_INITIALIZATIONS: Final = (True, False, "gaussian", "orthogonal")
"""Initialisations of peft that do not change base weights. Adapters with a different initialisation
would not fit the published base model."""

_CLOSE: Final = 3

# -- Settings of adapters.


_POSITIVE: Final = validated(positive, fix="such as 16")


def _as_targets(targets: Any) -> Any:
    return targets if targets is None or isinstance(targets, str) else tuple(targets)


@attrs.frozen(kw_only=True)
class LoRA:
    """The common settings of peft's ``LoraConfig``, with the rank as default of ``alpha``."""

    rank: int = attrs.field(default=16, validator=_POSITIVE)
    """Inner dimension of the factors."""
    alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(_POSITIVE))
    """Numerator of the scale ``alpha / rank`` of the factors' product; default ``rank``, which
    gives a scale of 1."""
    targets: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to adapt: either suffixes of dotted names (``"to_q"``, ``"to_out.0"``), such as a
    family's ``lora_targets``, or one regular expression that matches whole names. Default: the
    attention projections."""
    exclude: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to exclude, in the format of ``targets``."""
    rank_pattern: dict[str, int] = attrs.field(factory=dict)
    """Ranks of single layers, by a suffix of the layer's name or a regular expression."""
    alpha_pattern: dict[str, float] = attrs.field(factory=dict)
    """Alphas of single layers, by a suffix of the layer's name or a regular expression."""
    dropout: float = 0.0
    """Dropout probability of an adapter's inputs, below 1."""
    dora: bool = False
    """Train weight-decomposed adapters (Liu et al., 2024) with a magnitude per output."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (Kalajdzievski, 2023), which suits high ranks."""
    init: bool | str = True
    """Initialisation, peft's ``init_lora_weights``: ``True``, ``False``, ``"gaussian"`` or
    ``"orthogonal"``. Random values come from torch's global generator."""

    def config(self) -> Any:
        """Return peft's configuration."""
        return _peft().LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha or self.rank,
            target_modules=self.targets,
            exclude_modules=self.exclude,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            lora_dropout=self.dropout,
            use_dora=self.dora,
            use_rslora=self.rslora,
            init_lora_weights=self.init,
        )


_RANKED: Final = frozenset(
    {"target_modules", "exclude_modules", "r", "rank_pattern", "alpha_pattern"}
)
_SUPPORTED: Final[Mapping[str, frozenset[str]]] = {
    "LoraConfig": _RANKED
    | {"lora_alpha", "lora_dropout", "use_dora", "use_rslora", "init_lora_weights"},
    "LoKrConfig": _RANKED | {"alpha", "decompose_factor", "decompose_both"},
    "LoHaConfig": _RANKED | {"alpha"},
    "OFTConfig": frozenset({"target_modules", "exclude_modules", "oft_block_size"}),
}
"""Settings of peft's configurations that training, checkpoints and exports support."""
_NOT_TRAINED: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"}
)
"""Fields of peft's configurations that do not affect training."""


def _checked_config(given: Any) -> Any:
    """Return a copy of a peft configuration whose settings are all supported."""
    kind = type(given).__name__
    if kind not in _SUPPORTED:
        raise InvalidValueError(
            "is not a supported kind of adapter",
            f"pass LoRA(rank=16), or one of these peft configurations: {', '.join(_SUPPORTED)}",
            "lora",
            kind,
        )
    config, usual = copy.deepcopy(given), type(given)()
    for field in dataclasses.fields(config):
        value, default = getattr(given, field.name), getattr(usual, field.name)
        if field.name not in _SUPPORTED[kind] | _NOT_TRAINED and value != default:
            raise InvalidValueError(
                "is not supported",
                f"leave {field.name} at {default!r}",
                f"{kind}.{field.name}",
                value,
            )
    for name in ("r", "lora_alpha", "alpha", "oft_block_size"):
        if name in _SUPPORTED[kind]:
            positive(getattr(config, name), key=f"{kind}.{name}", fix="such as 16")
    _check_start(config, kind)
    return config


def _check_start(config: Any, kind: str) -> None:
    init, dropout = getattr(config, "init_lora_weights", True), getattr(config, "lora_dropout", 0)
    if init not in _INITIALIZATIONS or not isinstance(init, (bool, str)):
        raise InvalidValueError(
            "is not supported, because this initialisation changes base weights or needs data",
            f"write one of {list(_INITIALIZATIONS)}",
            f"{kind}.init_lora_weights",
            init,
        )
    if not 0.0 <= dropout < 1.0:
        raise InvalidValueError(
            "is not a probability below 1", key=f"{kind}.lora_dropout", value=dropout
        )


def _config_in(model: torch.nn.Module, lora: LoRA | PeftConfig | None) -> tuple[Any, bool]:
    """Return a configuration whose targets exist, and whether they are the default ones."""
    given = LoRA() if lora is None else lora
    config = _checked_config(given.config() if isinstance(given, LoRA) else given)
    layers, kind = _Layers.of(model), type(config).__name__
    usual = not config.target_modules
    if usual:
        config.target_modules = set(layers.projections())
    layers.require(config.target_modules, key=f"{kind}.target_modules")
    if config.exclude_modules:
        layers.require(config.exclude_modules, key=f"{kind}.exclude_modules")
    for name in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(config, name, None) or ():
            inside = _regular_expression(rf"(.*\.)?({expression})", key=f"{kind}.{name}")
            layers.require(inside, key=f"{kind}.{name}", written=expression)
    return config, usual


# -- New adapters.


def add_lora(
    model: torch.nn.Module,
    lora: LoRA | PeftConfig | None = None,
    *,
    name: str = "default",
    base_dtype: str | torch.dtype | None = None,
) -> AdapterFacts:
    """Freeze a model and add trainable adapters to it, in place.

    Call ``add_lora`` before ``zerotune.prepare`` or ``Trainer``. The adapters are in fp32, because
    all engines require trained weights in fp32. With a bf16 plan, DeepSpeed computes with bf16
    copies of the adapters. DeepSpeed also casts the frozen weights to the plan's precision, and
    partitions them at stage 3. With DeepSpeed, ``base_dtype`` therefore applies only until the
    engine starts.

    Args:
        model: A diffusers model, a transformers text encoder, or any module that peft can adapt.
        lora: ``LoRA``, or peft's ``LoraConfig``, ``LoKrConfig``, ``LoHaConfig`` or ``OFTConfig``;
            by default ``LoRA()``.
        name: Name of the adapter in the model; adapter files do not contain this name.
        base_dtype: Dtype of the frozen weights: ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch
            dtype; by default unchanged.

    Returns:
        Facts about the adapters.

    Raises:
        InvalidValueError: A target matches no layer, the model already has adapters, or a setting
            of a peft configuration is not supported.
        MissingDependencyError: peft is not installed.
    """
    if isinstance(model, TrainedParts):
        raise InvalidValueError(
            "adapters can be added only to a single model",
            'call add_lora(parts["unet"], ...) for each part',
            "model",
            type(model).__name__,
        )
    _require_no_adapters(model)
    config, usual = _config_in(model, lora)
    model.requires_grad_(False)
    decisions = _read_for_magnitudes(model) if getattr(config, "use_dora", False) else ()
    add = getattr(model, "add_adapter", None)
    with standing_in(model):
        if add is not None:
            add(config, adapter_name=name)
        else:
            _peft().inject_adapter_in_model(config, model, adapter_name=name)
    if usual:
        decisions += (
            Decision(
                "LoRA.targets",
                None,
                sorted(config.target_modules),
                "targets default to the model's attention projections",
            ),
        )
    return _train_only(model, name, base_dtype=base_dtype, decisions=decisions)


def _read_for_magnitudes(model: torch.nn.Module) -> tuple[Decision, ...]:
    """Read unread base weights, because DoRA's magnitudes are initialised to their norms."""
    if not bring_weights(model):
        return ()
    return (
        Decision(
            "model.weights",
            "read from their files by the engine",
            "read whole on every rank",
            "DoRA's magnitudes are initialised to the norms of the base weights",
            "warning",
        ),
    )


def _require_no_adapters(model: torch.nn.Module) -> None:
    """Reject a model that has adapters, because new adapters would disable them."""
    there = list(getattr(model, "peft_config", None) or ())
    if there:
        raise InvalidValueError(
            "the model already has adapters, which new adapters would disable",
            "fuse the existing adapters (fuse_lora), or load the model again",
            "model",
            there,
        )


def _train_only(
    model: torch.nn.Module,
    adapter: str,
    *,
    base_dtype: str | torch.dtype | None,
    decisions: tuple[Decision, ...] = (),
) -> AdapterFacts:
    """Make one adapter, in fp32, the only trained part of a model; record facts about it."""
    trained, layers = {}, dict[str, None]()
    for name, parameter in model.named_parameters():
        parsed = AdapterParameter.parse(name)
        owned = parsed is not None and parsed.adapter == adapter
        parameter.requires_grad_(owned)
        if parsed is not None and owned:
            layers[parsed.layer] = None
            parameter.data = parameter.data.float()
            trained[name] = parameter
    if base_dtype is not None:
        decisions += _cast_base(model, checked_dtype(base_dtype, key="base_dtype"))
    facts = AdapterFacts(
        name=adapter,
        layers=tuple(layers),
        tensors=len(trained),
        trained=sum(int(getattr(each, "ds_numel", each.numel())) for each in trained.values()),
        total=ModelFacts.from_module(model).numel,
        decisions=decisions,
    )
    announce(decisions)
    return facts


def _cast_base(model: torch.nn.Module, dtype: torch.dtype) -> tuple[Decision, ...]:
    frozen = [
        p
        for p in model.parameters()
        if not p.requires_grad and p.is_floating_point() and not is_wrapper(p)
    ]
    before = sorted({str(p.dtype).removeprefix("torch.") for p in frozen if p.dtype != dtype})
    for parameter in frozen:
        # Parameters that stage 3 has partitioned keep their dtype.
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
    if not before:
        return ()
    return (
        Decision(
            "model.base.dtype",
            ", ".join(before),
            str(dtype).removeprefix("torch."),
            "frozen weights need only the precision of the forward pass",
        ),
    )


def _peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is required for LoRA and cannot be imported ({error})",
            "pip install 'zerotune[lora]'",
            "peft",
        ) from error


# -- Adapters from a file as initial weights.


def load_adapters(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    component: str | None = None,
    name: str = "default",
    base_dtype: str | torch.dtype | None = None,
    pipeline: Any = None,
) -> AdapterFacts:
    """Freeze a model in place, and load adapters from a file to continue their training.

    Weights, rank, alpha and targets come from the file. Dropout is 0, because adapter files do not
    contain it. A diffusers pipeline's ``lora_state_dict`` converts files from ComfyUI, kohya's
    trainers and other programs; for files that it does not read, the recipe ``convert_lora.py``
    knows more names. The conversion may fold ``alpha / rank`` into the factors. The returned
    ``AdapterFacts.decisions`` record which pipeline was used.

    Args:
        model: A diffusers model or a transformers text encoder, without adapters.
        path: A file, a folder that contains a file with diffusers' default name, or a folder
            written by peft.
        component: Name of the model in the file (``"unet"``, ``"text_encoder_2"``); by default
            derived from the model's class.
        name: Name of the adapter in the model.
        base_dtype: Dtype of the frozen weights, as in ``add_lora``.
        pipeline: Pipeline, or pipeline class, whose ``lora_state_dict`` converts files from other
            programs; by default chosen according to the model's class.

    Returns:
        Facts about the adapters.

    Raises:
        CheckpointError: The file does not exist.
        CheckpointMismatchError: The file has no adapters for the model, or adapters that do not
            fit the model.
        InvalidValueError: ``component`` is required for the model's class, or the model already has
            adapters.
        MissingDependencyError: peft is not installed.
    """
    _peft()
    _require_no_adapters(model)
    ((part, (_, module)),) = components(model, component).items()
    try:
        with standing_in(module):
            file = _AdapterFile(module=module, path=Path(path), component=part, name=name)
            expected, decisions = file.load(pipeline)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointMismatchError(
            f"the adapters do not fit {type(model).__name__} ({error})", key=os.fspath(path)
        ) from error
    facts = _train_only(model, name, base_dtype=base_dtype, decisions=decisions)
    if facts.tensors != expected:
        raise CheckpointMismatchError(
            f"the file has {expected} tensors for {part!r}, but only {facts.tensors} of them fit "
            "the model",
            "load the file into the model on which its adapters were trained",
            os.fspath(path),
        )
    return facts


@attrs.frozen(kw_only=True)
class _AdapterFile:
    """A file with adapters, and the model that receives the adapters."""

    module: Any
    path: Path
    component: str
    """Name of the model in the file."""
    name: str
    """Name of the adapter in the model."""

    def load(self, pipeline: Any) -> tuple[int, tuple[Decision, ...]]:
        """Load the file's adapters into the model.

        Returns:
            Number of tensors for the model, and the decision to convert the file, if any.
        """
        if (self.path / PEFT_CONFIG).is_file():
            return self._load_peft(), ()
        file = find_adapters(self.path)
        state, metadata = _read_tensors(file)
        own = [
            key for key in state if key.startswith(f"{self.component}.") and _IN_FILES.search(key)
        ]
        if own:
            settings = adapter_settings(metadata, self.component)
            header = settings and {
                f"{self.component}.{key}": value for key, value in settings.items()
            }
            self._load_named({key: state[key] for key in own}, metadata=header)
            return len(own), ()
        parts = {key.split(".")[0] for key in state if _IN_FILES.search(key)}
        if parts and parts <= _COMPONENTS:
            raise CheckpointMismatchError(
                f"the file has no adapters for {self.component!r}, only for {sorted(parts)}",
                "pass one of these names as component=",
                str(file),
            )
        read = read_others(state, model=self.module, pipeline=pipeline)
        known = {k: t for k, t in read.tensors.items() if k.startswith(f"{self.component}.")}
        self._load_named(known, network_alphas=read.alphas)
        return sum(".alpha" not in key for key in known), (
            Decision(
                "adapters.format",
                f"unknown tensor names ({next(iter(state), None)}, …)",
                "diffusers",
                f"converted by {read.reader}",
            ),
        )

    def _load_named(self, state: dict[str, torch.Tensor], **settings: Any) -> None:
        """Load a component's tensors, which have diffusers' names."""
        if hasattr(self.module, "load_lora_adapter"):
            self.module.load_lora_adapter(
                state, prefix=self.component, adapter_name=self.name, **settings
            )
            return
        from diffusers.loaders import StableDiffusionLoraLoaderMixin

        StableDiffusionLoraLoaderMixin.load_lora_into_text_encoder(
            state,
            settings.pop("network_alphas", None),
            self.module,
            prefix=self.component,
            adapter_name=self.name,
            **settings,
        )

    def _load_peft(self) -> int:
        """Load a folder written by peft."""
        config = _peft().PeftConfig.from_pretrained(str(self.path))
        state, _ = _read_tensors(self.path / PEFT_FILE)
        own = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
        self._inject(config, own)
        return len(own)

    def _inject(self, config: Any, state: dict[str, torch.Tensor]) -> None:
        add = getattr(self.module, "add_adapter", None)
        if add is not None:
            add(config, adapter_name=self.name)
        else:
            _peft().inject_adapter_in_model(config, self.module, adapter_name=self.name)
        result = _peft().set_peft_model_state_dict(self.module, state, adapter_name=self.name)
        if result.unexpected_keys:
            raise CheckpointMismatchError(
                f"the file has {len(result.unexpected_keys)} tensors that the model does not have",
                "load the file into the model on which its adapters were trained",
                result.unexpected_keys[0],
            )


_IN_FILES: Final = re.compile(r"\.(lora_|lokr_|hada_|oft_|lora\.|[a-z_]+_lora\.)")
_COMPONENTS: Final = frozenset(
    {"unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3"}
)


def _read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        keys: list[str] = list(opened.keys())
        return {key: opened.get_tensor(key) for key in keys}, opened.metadata() or {}


# -- Layers that can be adapted, and suggestions for names that match none.


@attrs.frozen
class _Layers:
    """Dotted names of the layers that can be adapted."""

    names: list[str]
    model: str
    """Class name of the model."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> _Layers:
        """Return the adaptable layers of a model."""
        every = model.named_modules()
        found = [name for name, module in every if isinstance(module, _ADAPTABLE)]
        return cls(found, type(model).__name__)

    @property
    def endings(self) -> list[str]:
        """Return the distinct suffixes of layer names, such as ``to_q`` and ``to_out.0``."""
        found: dict[str, None] = {}
        for name in self.names:
            parts = name.split(".")
            found[".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])] = None
        return list(found)

    def projections(self) -> tuple[str, ...]:
        """Return the suffixes of the attention projections."""
        found = tuple(target for target in ATTENTION_PROJECTIONS if self._has(target))
        if not found:
            raise InvalidValueError(
                f"{self.model} has no known attention projections",
                f"set targets to the layers to adapt, such as {self.endings[:_CLOSE]}",
                "targets",
                None,
            )
        return found

    def require(
        self, targets: Collection[str] | str, *, key: str, written: str | None = None
    ) -> None:
        """Check that every target matches a layer.

        Args:
            targets: Suffixes of names, or one regular expression for whole names.
            key: Key of the targets, for messages.
            written: The regular expression as the user wrote it.
        """
        if isinstance(targets, str):
            pattern = _regular_expression(targets, key=key)
            if not any(re.fullmatch(pattern, name) for name in self.names):
                raise self._no_match(key, written or targets)
            return
        for target in sorted(targets):
            if not self._has(target):
                raise self._no_match(key, target)

    def _has(self, target: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for name in self.names)

    def _no_match(self, key: str, target: str) -> InvalidValueError:
        endings = self.endings
        close = did_you_mean(target, endings, count=_CLOSE, cutoff=0.5, by=str)
        fix = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {endings}"
        return InvalidValueError("matches no adaptable layer", fix, key, target)


def _regular_expression(text: str, *, key: str) -> str:
    """Check that a regular expression compiles, and return it."""
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidValueError(
            f"is not a valid regular expression ({error})", key=key, value=text
        ) from error
    return text
