"""LoRA and related adapters: small trainable matrices added to a frozen model.

The adapters come from peft and become part of the model. Engines need no special support, because
the model's frozen parameters simply do not require gradients.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import torch

from zerotune._util.text import did_you_mean, positive, validated
from zerotune.backend.adapters import (
    PEFT_CONFIG,
    PEFT_FILE,
    AdapterFacts,
    AdapterParameter,
    Read,
    adapter_settings,
    baked_lokr,
    find_adapters,
    read_others,
    remember,
    starting_points,
)
from zerotune.backend.checks import checked_dtype, is_torchao
from zerotune.backend.stored import bring_weights, standing_in
from zerotune.backend.trained_parts import TrainedParts, components
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointMismatchError, InvalidValueError, MissingDependencyError
from zerotune.plan.facts import ATTENTION_PROJECTIONS, ModelFacts

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

# -- Kinds of adapters, and the layers they adapt.


_POSITIVE: Final = validated(positive, fix="such as 16")


def _as_targets(targets: Any) -> Any:
    return targets if targets is None or isinstance(targets, str) else tuple(targets)


@attrs.frozen(kw_only=True)
class Adapters:
    """Settings shared by all kinds of adapters."""

    targets: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to adapt: either suffixes of dotted names (``"to_q"``, ``"to_out.0"``), such as a
    family's ``lora_targets``, or one regular expression that matches whole names. Default: the
    attention projections."""
    exclude: tuple[str, ...] | str | None = attrs.field(default=None, converter=_as_targets)
    """Layers to exclude, in the format of ``targets``."""
    name: str = attrs.field(default="default")
    """Name of the adapter in the model; adapter files do not contain this name."""

    peft_names: ClassVar[Mapping[str, str]]
    """Name of each setting in peft's configuration, except ``targets`` and ``exclude``."""

    @name.validator
    def _check_name(self, _attribute: Any, value: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
            raise InvalidValueError(
                "may contain only letters, digits, - and _",
                key=f"{type(self).__name__}.name",
                value=value,
            )

    @property
    def kind(self) -> str:
        """Return the name of peft's configuration class."""
        return f"{type(self).__name__}Config"

    def settings(self) -> dict[str, Any]:
        """Return the arguments for peft's configuration, except for targets and excluded layers."""
        found = {theirs: getattr(self, name) for name, theirs in self.peft_names.items()}
        return {name: dict(v) if isinstance(v, dict) else v for name, v in found.items()}

    def config_in(self, model: torch.nn.Module) -> Any:
        """Check that ``model`` contains the target layers, and return peft's configuration."""
        layers, kind = _Layers.of(model), type(self).__name__
        targets = self.targets or layers.projections()
        layers.require(targets, key=f"{kind}.targets")
        if self.exclude:
            layers.require(self.exclude, key=f"{kind}.exclude")
        settings = self.settings()
        for key in ("rank_pattern", "alpha_pattern"):
            for expression in settings.get(key, ()):
                inside = _regular_expression(rf"(.*\.)?({expression})", key=f"{kind}.{key}")
                layers.require(inside, key=f"{kind}.{key}", written=expression)
        return self.config(targets)

    def config(self, targets: tuple[str, ...] | str | None) -> Any:
        """Return the adapters' peft configuration for the target layers ``targets``."""
        target, exclude = (
            list(layers) if isinstance(layers, tuple) else layers
            for layers in (targets, self.exclude)
        )
        kind = getattr(_peft(), self.kind)
        return kind(target_modules=target, exclude_modules=exclude, **self.settings())


@attrs.frozen(kw_only=True)
class _Ranked(Adapters):
    """Adapters that have a rank."""

    rank: int = attrs.field(default=16, validator=_POSITIVE)
    """Inner dimension of the factors."""
    alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(_POSITIVE))
    """Numerator of the scale ``alpha / rank`` of the factors' product; default ``rank``, which
    gives a scale of 1."""
    rank_pattern: dict[str, int] = attrs.field(factory=dict)
    """Ranks of single layers, by a suffix of the layer's name or a regular expression."""
    alpha_pattern: dict[str, float] = attrs.field(factory=dict)
    """Alphas of single layers, by a suffix of the layer's name or a regular expression."""

    peft_names: ClassVar[Mapping[str, str]] = {
        "rank": "r",
        "alpha": "alpha",
        "rank_pattern": "rank_pattern",
        "alpha_pattern": "alpha_pattern",
    }

    def settings(self) -> dict[str, Any]:
        """Return the arguments of peft's configuration, with ``alpha`` filled in."""
        return super().settings() | {self.peft_names["alpha"]: self.alpha or self.rank}


@attrs.frozen(kw_only=True)
class LoRA(_Ranked):
    """Low-rank adapters, which add a product of two small matrices to each adapted weight."""

    dropout: float = attrs.field(default=0.0)
    """Dropout probability of an adapter's inputs."""
    dora: bool = False
    """Train weight-decomposed adapters (Liu et al., 2024) with a magnitude per output."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (Kalajdzievski, 2023), which suits high ranks."""
    init: bool | str = attrs.field(default=True)
    """Initialisation, peft's ``init_lora_weights``: ``True``, ``False``, ``"gaussian"`` or
    ``"orthogonal"``. Random values come from torch's global generator."""

    peft_names: ClassVar[Mapping[str, str]] = {
        **_Ranked.peft_names,
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "dora": "use_dora",
        "rslora": "use_rslora",
        "init": "init_lora_weights",
    }

    @dropout.validator
    def _check_dropout(self, _attribute: Any, value: float) -> None:
        if not 0.0 <= value < 1.0:
            raise InvalidValueError("is not a probability below 1", key="LoRA.dropout", value=value)

    @init.validator
    def _check_init(self, _attribute: Any, value: Any) -> None:
        if value not in _INITIALIZATIONS or (not isinstance(value, (bool, str))):
            raise InvalidValueError(
                "is not supported, because this initialisation changes base weights or needs data",
                key="LoRA.init",
                value=value,
                fix=f"write one of {list(_INITIALIZATIONS)}",
            )

    @property
    def kind(self) -> str:
        """Return the name of peft's configuration class."""
        return "LoraConfig"


@attrs.frozen(kw_only=True)
class LoKr(_Ranked):
    """Adapters that add a Kronecker product to each adapted weight (Yeh et al., 2024).

    LoKr files are small. The second factor of the product is itself a product of two low-rank
    matrices if ``rank`` is less than half the factor's size.
    """

    factor: int = -1
    """Size of the first factor, used if it divides the layer's size. -1 chooses a size near the
    square root of the layer's size."""
    decompose_both: bool = False
    """Whether a sufficiently large first factor is also a product of two low-rank matrices."""

    peft_names: ClassVar[Mapping[str, str]] = {
        **_Ranked.peft_names,
        "factor": "decompose_factor",
        "decompose_both": "decompose_both",
    }


@attrs.frozen(kw_only=True)
class LoHa(_Ranked):
    """Adapters that add an elementwise product of low-rank matrices (Hyeon-Woo et al., 2022)."""


@attrs.frozen(kw_only=True)
class OFT(Adapters):
    """Adapters that rotate blocks of the inputs of each adapted weight (Qiu et al., 2023)."""

    block_size: int = attrs.field(default=32, validator=_POSITIVE)
    """Number of inputs per block; peft uses the nearest divisor of the layer's input size."""

    peft_names: ClassVar[Mapping[str, str]] = {"block_size": "oft_block_size"}

    def settings(self) -> dict[str, Any]:
        """Return the arguments for peft's configuration, with the rank derived from block_size."""
        return super().settings() | {"r": 0}


_ADAPTER_KINDS: Final = {kind().kind: kind for kind in (LoRA, LoKr, LoHa, OFT)}
"""Adapter classes by the name of peft's configuration."""

_NOT_TRAINED: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"}
)
"""Fields of peft's configurations that do not affect training."""


def as_adapters(lora: Any) -> Adapters:
    """Convert ``lora`` to an ``Adapters`` object.

    Args:
        lora: Adapters, peft's ``LoraConfig``, ``LoKrConfig``, ``LoHaConfig`` or ``OFTConfig``, or
            ``None`` for ``LoRA()``. Every setting of a peft configuration must be supported.
    """
    if lora is None:
        return LoRA()
    if isinstance(lora, Adapters):
        return lora
    theirs = type(lora).__name__
    if theirs not in _ADAPTER_KINDS:
        raise InvalidValueError(
            "is not a supported kind of adapter",
            key="lora",
            value=theirs,
            fix="pass adapters such as LoRA(rank=16), or one of these peft configurations: "
            f"{', '.join(_ADAPTER_KINDS)}",
        )
    kind = _ADAPTER_KINDS[theirs]
    adapters = kind(
        targets=_as_written(lora.target_modules),
        exclude=_as_written(lora.exclude_modules),
        **{name: getattr(lora, field) for name, field in kind.peft_names.items()},
    )
    kept = adapters.config(adapters.targets)
    for field in dataclasses.fields(kept):
        value, default = getattr(lora, field.name), getattr(kept, field.name)
        if field.name not in _NOT_TRAINED and value != default:
            raise InvalidValueError(
                f"is not supported by zerotune's {kind.__name__}",
                key=f"{theirs}.{field.name}",
                value=value,
                fix=f"leave {field.name} at {default!r}",
            )
    return adapters


def _as_written(layers: Any) -> Any:
    # peft stores a set, whose order differs between processes.
    return tuple(sorted(layers)) if isinstance(layers, set) else layers


# -- New adapters.


def add_lora(
    model: torch.nn.Module,
    lora: Adapters | PeftConfig | None = None,
    *,
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
        lora: ``LoRA``, ``LoKr``, ``LoHa`` or ``OFT``, or a peft configuration of one of these
            kinds, such as ``LoraConfig``; by default ``LoRA()``.
        base_dtype: Dtype of the frozen weights: ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch
            dtype; by default unchanged.

    Returns:
        Facts about the adapters; the model stores a copy for exports.

    Raises:
        InvalidValueError: A target matches no layer, the model already has adapters, or a setting
            of a peft configuration is not supported.
        MissingDependencyError: peft is not installed.
    """
    wanted = as_adapters(lora)
    if isinstance(model, TrainedParts):
        raise InvalidValueError(
            "adapters can be added only to a single model",
            key="model",
            value=type(model).__name__,
            fix='call add_lora(parts["unet"], ...) for each part',
        )
    _require_no_adapters(model)
    config = wanted.config_in(model)
    model.requires_grad_(False)
    decisions = _read_for_magnitudes(model) if isinstance(wanted, LoRA) and wanted.dora else ()
    add = getattr(model, "add_adapter", None)
    with standing_in(model):
        if add is not None:
            add(config, adapter_name=wanted.name)
        else:
            _peft().inject_adapter_in_model(config, model, adapter_name=wanted.name)
    if not wanted.targets:
        decisions += (
            Decision(
                key="LoRA.targets",
                before=None,
                after=sorted(config.target_modules),
                reason="targets default to the model's attention projections",
            ),
        )
    return _train_only(model, wanted.name, base_dtype=base_dtype, decisions=decisions)


def _read_for_magnitudes(model: torch.nn.Module) -> tuple[Decision, ...]:
    """Read unread base weights, because DoRA's magnitudes are initialised to their norms."""
    if not bring_weights(model):
        return ()
    return (
        Decision(
            key="model.weights",
            before="read from their files by the engine",
            after="read whole on every rank",
            reason="DoRA's magnitudes are initialised to the norms of the base weights",
            severity="warning",
        ),
    )


def _require_no_adapters(model: torch.nn.Module) -> None:
    """Reject a model that has adapters, because new adapters would disable them."""
    there = list(getattr(model, "peft_config", None) or ())
    if there:
        raise InvalidValueError(
            "the model already has adapters, which new adapters would disable",
            key="model",
            value=there,
            fix="fuse the existing adapters (fuse_lora), or load the model again",
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
        initial={name: starting_points(parameter) for name, parameter in trained.items()},
    )
    remember(model, facts)
    announce(decisions)
    return facts


def _cast_base(model: torch.nn.Module, dtype: torch.dtype) -> tuple[Decision, ...]:
    frozen = [
        p
        for p in model.parameters()
        if not p.requires_grad and p.is_floating_point() and not is_torchao(p)
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
            key="model.base.dtype",
            before=", ".join(before),
            after=str(dtype).removeprefix("torch."),
            reason="frozen weights need only the precision of the forward pass",
        ),
    )


def _peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is required for LoRA and cannot be imported ({error})",
            key="peft",
            fix="pip install 'zerotune[lora]'",
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
    trainers and other programs. The conversion may fold ``alpha / rank`` into the factors. The
    returned ``AdapterFacts.decisions`` record which pipeline was used.

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
            key=os.fspath(path),
            fix="load the file into the model on which its adapters were trained",
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
                key=str(file),
                fix="pass one of these names as component=",
            )
        read = read_others(state, model=self.module, component=self.component, pipeline=pipeline)
        count = self._load_read(read)
        return count, (
            Decision(
                key="adapters.format",
                before=f"unknown tensor names ({next(iter(state), None)}, …)",
                after="diffusers",
                reason=f"converted by {read.reader}",
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

    def _load_read(self, read: Read) -> int:
        """Load tensors from diffusers' converters, or LoKr and LoHa tensors with layers' names."""
        state = {key: t for key, t in read.tensors.items() if key.startswith(f"{self.component}.")}
        if any(".hada_" in key for key in state):
            return self._load_loha(state)
        state = baked_lokr(state)
        self._load_named(state, network_alphas=read.alphas)
        return sum(".alpha" not in key for key in state)

    def _load_loha(self, state: dict[str, torch.Tensor]) -> int:
        own = {key.removeprefix(f"{self.component}."): tensor for key, tensor in state.items()}
        ranks = {
            key.removesuffix(".hada_w1_b"): int(t.shape[0])
            for key, t in own.items()
            if key.endswith(".hada_w1_b")
        }
        alphas = {
            layer: float(own.pop(f"{layer}.alpha", torch.tensor(rank)))
            for layer, rank in ranks.items()
        }
        config = _peft().LoHaConfig(
            target_modules=list(ranks),
            rank_pattern={f"^{layer}": rank for layer, rank in ranks.items()},
            alpha_pattern={f"^{layer}": alpha for layer, alpha in alphas.items()},
            use_effective_conv2d=any("hada_t1" in key for key in own),
        )
        self._inject(config, own)
        return len(own)

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
                key=result.unexpected_keys[0],
                fix="load the file into the model on which its adapters were trained",
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
                key="LoRA.targets",
                value=None,
                fix=f"set targets to the layers to adapt, such as {self.endings[:_CLOSE]}",
            )
        return found

    def require(
        self, targets: tuple[str, ...] | str, *, key: str, written: str | None = None
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
        for target in targets:
            if not self._has(target):
                raise self._no_match(key, target)

    def _has(self, target: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for name in self.names)

    def _no_match(self, key: str, target: str) -> InvalidValueError:
        endings = self.endings
        close = did_you_mean(target, endings, count=_CLOSE, cutoff=0.5, by=str)
        fix = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {endings}"
        return InvalidValueError("matches no adaptable layer", key=key, value=target, fix=fix)


def _regular_expression(text: str, *, key: str) -> str:
    """Check that a regular expression compiles, and return it."""
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidValueError(
            f"is not a valid regular expression ({error})", key=key, value=text
        ) from error
    return text
