"""Adapters folded into the weights they adapt: a model that needs no adapters any more."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from typing_extensions import override

from zerotune._util.files import system_errors
from zerotune.backend.adapter_layouts import adapter_settings, find_adapters
from zerotune.backend.adapters import (
    BASE,
    AdapterParameter,
    adapter_config,
    adapter_layers,
    trained_adapter,
)
from zerotune.backend.dtypes import checked_dtype
from zerotune.backend.stored import read_header
from zerotune.backend.trained_parts import components
from zerotune.backend.unpartitioned import whole_parameter
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.contents import persistent_buffers
from zerotune.checkpoint.export import (
    SHARD_SIZE,
    Gatherable,
    ModelFolderReader,
    ModelFolderWriter,
    ModelOutput,
    label_of,
    weights_of,
)
from zerotune.checkpoint.exported import check_apart
from zerotune.checkpoint.records import model_config
from zerotune.checkpoint.tensors import TensorSpec
from zerotune.errors import (
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


# -- One layer's adapter folded into its weight, by peft's own arithmetic.


_CONVOLUTIONS: Final = {3: torch.nn.Conv1d, 4: torch.nn.Conv2d, 5: torch.nn.Conv3d}


@attrs.frozen(kw_only=True, eq=False)
class Fold:
    """The adapter of one layer.

    Called with the layer's weight, in any precision, it gives the folded weight in fp32.
    """

    layer: str
    """Dotted name of the adapted layer."""
    scaling: float = 1.0
    """What the product of the factors is multiplied by."""
    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """fp32 on the CPU, by kind: ``lora_A``, ``lora_B``, ``lokr_w1``, ``oft_R``, …"""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Peft's configuration of the whole adapter."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Fold.

        Raises:
            CheckpointMismatchError: The shapes do not fit, or the result is not finite.
            MissingDependencyError: peft is not installed.
        """
        plain = weight.detach().to("cpu", torch.float32)
        try:
            wrapped = self._wrapped(plain)
            wrapped.merge(safe_merge=True)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointMismatchError(
                f"its adapter does not fit ({error})", key=self.layer, value=tuple(weight.shape)
            ) from error
        merged: torch.Tensor = wrapped.get_base_layer().weight.detach()
        return merged

    @property
    def rank(self) -> int:
        """Inner size of the factors."""
        for kind in ("lora_A", "lora_embedding_A", "hada_w1_b"):
            if kind in self.tensors:
                return int(self.tensors[kind].shape[0])
        # Whole factors of LoKr tell no rank.
        return int(self._setting("r", "rank_pattern", 0))

    def scaled_as_told(self, strength: float) -> Fold:
        """With the scale that the settings mean for this layer; alpha is the rank without any."""
        named = "alpha" if "alpha" in self.settings else "lora_alpha"
        alpha = float(self._setting(named, "alpha_pattern", self.rank))
        root = self.settings.get("use_rslora", False)
        scaling = alpha / (math.sqrt(self.rank) if root else self.rank)
        return attrs.evolve(self, scaling=scaling * strength)

    def _setting(self, name: str, patterns: str, usual: float) -> float:
        for pattern, value in self.settings.get(patterns, {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", self.layer):
                return float(value)
        return float(self.settings.get(name, usual))

    def _wrapped(self, weight: torch.Tensor) -> Any:
        peft = _peft()
        holder = torch.nn.Sequential(
            _layer_like(weight, embedding="lora_embedding_A" in self.tensors)
        )
        config = self._config(peft)
        peft.inject_adapter_in_model(config, holder, adapter_name="fold")
        parameters = dict(holder.named_parameters())
        for kind, tensor in self.tensors.items():
            names = [name for name in parameters if f".{kind}.fold" in name]
            if len(names) != 1:
                raise KeyError(kind)
            with torch.no_grad():
                parameters[names[0]].copy_(tensor.reshape(parameters[names[0]].shape))
        return holder[0]

    def _config(self, peft: Any) -> Any:
        # peft divides by the rank.
        scale = {"r": self.rank, "alpha": self.scaling * self.rank, "target_modules": ["0"]}
        first = next(iter(self.tensors)).split("_")[0]
        if first == "lora":
            return peft.LoraConfig(
                lora_alpha=scale.pop("alpha"),
                use_dora="lora_magnitude_vector" in self.tensors,
                lora_bias=False,
                **scale,
            )
        if first == "oft":
            scale = {"r": self.rank, "target_modules": ["0"]}
        config = getattr(peft, _CONFIGS[first])
        known = {key: self.settings[key] for key in _SHAPING if key in self.settings}
        return config(**known, **scale)


_CONFIGS: Final = {"lokr": "LoKrConfig", "hada": "LoHaConfig", "oft": "OFTConfig"}
_SHAPING: Final = (
    "decompose_factor",
    "decompose_both",
    "use_effective_conv2d",
    "oft_block_size",
    "block_share",
    "coft",
    "eps",
    "use_cayley_neumann",
    "num_cayley_neumann_terms",
)
"""Settings besides rank and alpha that say what the factors mean."""


def _layer_like(weight: torch.Tensor, *, embedding: bool) -> torch.nn.Module:
    layer: torch.nn.Module
    if embedding:
        layer = torch.nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    elif weight.ndim == 2:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    else:
        kind: Any = _CONVOLUTIONS[weight.ndim]
        layer = kind(weight.shape[1], weight.shape[0], weight.shape[2:], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError(
            f"is needed to fold adapters and could not be imported ({error})",
            key="peft",
            fix="pip install 'zerotune[lora]'",
        ) from error


_WRAPPED: Final = re.compile(rf"(.+)\.{BASE}\.([^.]+)")


def export_merged(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    weights: Gatherable | str | None = None,
    dtype: str | torch.dtype = "fp32",
    component: str | None = None,
    shard_size: int = SHARD_SIZE,
    timeout_s: float | None = None,
) -> Path:
    """Write an engine's model with its adapters folded in, as a diffusers model folder. Collective.

    In memory are the adapters and one parameter at a time, at stage 3 and with NVMe too. Weights
    are folded in fp32 and cast to ``dtype`` last, which loses less than folding in 16 bits.

    Args:
        path: The folder, as for ``export_model``.
        engine: What trains a model with adapters.
        weights: As in ``export_model``.
        dtype: Of the floating-point tensors in the file.
        component: Which of ``TrainedParts``.
        shard_size: Most bytes of tensors in a file.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: The model trains no adapters.
        InvalidValueError: ``TrainedParts`` needs a component.
        CheckpointError: The path is taken by something else, or writing fails.
        MissingDependencyError: peft is not installed.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, chosen = engine.group, checked_dtype(dtype)
    group.barrier(f"merging into {os.fspath(path)}", timeout_s=timeout_s)
    group.agree((os.fspath(path), str(chosen), label_of(weights), component), "export_merged")
    exported = weights_of(engine, weights)
    merged = _Merged.of(engine, component)
    output = _Output()
    if group.is_main:
        output.attempt(
            lambda: output.open(
                path,
                config=model_config(merged.module),
                specs=merged.specs(chosen),
                shard_size=shard_size,
            )
        )
    together(group, "begin the merge", output.reraise)
    try:
        for name, tensor in exported.gather():
            output.attempt(partial(output.keep, merged, name, tensor))
        for name, source in merged.sources.items():
            output.attempt(partial(output.append, name, whole_parameter(source)))
        for name, buffer in merged.buffers.items():
            output.attempt(partial(output.append, name, buffer))
        paths = together(group, "finish the merge", output.publish)
    finally:
        output.abandon()
    return paths[0]


def merge_adapters(
    adapters: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    component: str = "unet",
    scale: float = 1.0,
    dtype: str | torch.dtype = "fp32",
    shard_size: int = SHARD_SIZE,
) -> Path:
    """Fold a LoRA file into a model folder. Needs no engine; not collective.

    Args:
        adapters: The file, or a folder that holds it under its usual name.
        path: The folder to write, as for ``export_model``.
        base: The model folder the adapters were trained on, such as ``<pipeline>/unet``.
        component: What the file calls the model.
        scale: Strength of the adapters; 1 is as trained. Must be 1 with DoRA.
        dtype: Of the floating-point tensors in the file.
        shard_size: Most bytes of tensors in a file.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: The file has nothing for this component, or not all of it fits.
        CheckpointError: A file is missing, or the path is taken by something else.
        MissingDependencyError: peft is not installed.
    """
    with system_errors(CheckpointError, path, f"cannot be merged into from {os.fspath(adapters)}"):
        return _merge_file(
            adapters,
            path,
            base=base,
            component=component,
            scale=scale,
            dtype=dtype,
            shard_size=shard_size,
        )


def _merge_file(
    adapters: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    component: str,
    scale: float,
    dtype: str | torch.dtype,
    shard_size: int,
) -> Path:
    file, chosen = find_adapters(adapters), checked_dtype(dtype)
    check_apart(Path(path), Path(base))
    with ModelFolderReader(file) as stored, ModelFolderReader(Path(base)) as origin:
        folds = _folds(stored, component, scale=scale)
        _check_base(origin)
        missing = sorted(
            f"{layer}.weight" for layer in folds if f"{layer}.weight" not in origin.tensors
        )
        if missing:
            raise CheckpointMismatchError(
                f"is adapted and not in {base} ({len(missing)} such layers)", key=missing[0]
            )
        specs = [
            TensorSpec(
                key=key, dtype=chosen if t.dtype.is_floating_point else t.dtype, shape=t.shape
            )
            for key, t in origin.tensors.items()
        ]
        writer = ModelFolderWriter(path, config=origin.config, specs=specs, shard_size=shard_size)
        try:
            for key in origin.tensors:
                fold = folds.get(key.removesuffix(".weight"))
                tensor = origin.tensor(key)
                writer.append(key, tensor if fold is None or key == fold.layer else fold(tensor))
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise


@attrs.frozen(kw_only=True, eq=False)
class _Merged:
    """What a model is without its adapters, and where each of them goes."""

    prefix: str
    module: torch.nn.Module
    adapter: str
    sources: Mapping[str, torch.nn.Parameter]
    """Parameters of the base by their name without adapters; aliases after what they alias."""
    buffers: Mapping[str, torch.Tensor]
    scales: Mapping[str, float]
    """Scale of each adapted layer."""
    settings: Mapping[str, Any]
    """Peft's configuration of the adapter."""

    @classmethod
    def of(cls, engine: Engine, component: str | None) -> _Merged:
        named = components(engine.module, component or _unnamed(engine.module))
        if len(named) > 1:
            raise InvalidValueError(
                "one model is written at a time",
                key="component",
                value=component,
                fix=f"one of {list(named)}",
            )
        ((prefix, module),) = named.values()
        adapter = trained_adapter(module)
        if adapter is None:
            raise CheckpointMismatchError(
                "trains no adapters", key="component", value=type(module).__name__
            )
        return cls(
            prefix=prefix,
            module=module,
            adapter=adapter,
            sources={
                _plain(name): parameter
                for name, parameter in module.named_parameters(remove_duplicate=False)
                if AdapterParameter.parse(name) is None
            },
            buffers={_plain(n): buffer for n, buffer in persistent_buffers(module).items()},
            scales={
                name: float(getattr(m, "scaling", {}).get(adapter, 1.0))
                for name, m in adapter_layers(module)
            },
            settings=adapter_config(module, adapter),
        )

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Everything in the order it is written."""
        shapes = {
            n: (tuple(getattr(p, "ds_shape", p.shape)), p.dtype) for n, p in self.sources.items()
        }
        shapes |= {n: (tuple(b.shape), b.dtype) for n, b in self.buffers.items()}
        return [
            TensorSpec(key=name, dtype=dtype if own.is_floating_point else own, shape=shape)
            for name, (shape, own) in shapes.items()
        ]


class _Output(ModelOutput):
    """What rank 0 writes; on other ranks nothing happens."""

    def __init__(self) -> None:
        super().__init__()
        self._folds: dict[str, Fold] = {}
        self._trained: dict[str, torch.Tensor] = {}

    def keep(self, merged: _Merged, name: str, tensor: torch.Tensor) -> None:
        """Keep a trained tensor until its layer comes."""
        own = name.removeprefix(merged.prefix)
        parsed = AdapterParameter.parse(own)
        if self._writer is None or not name.startswith(merged.prefix):
            return
        if parsed is None:
            self._trained[_plain(own)] = tensor.clone()
            return
        empty = Fold(
            layer=parsed.layer, scaling=merged.scales[parsed.layer], settings=merged.settings
        )
        self._folds.setdefault(parsed.layer, empty).tensors[parsed.kind] = tensor.clone()

    @override
    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of the base, with its adapter folded in."""
        if self._writer is None:
            return
        layer, _, kind = name.rpartition(".")
        fold = self._folds.get(layer) if kind == "weight" else None
        current = self._trained.get(name, tensor)
        self._writer.append(name, current if fold is None else fold(current))


def _folds(stored: ModelFolderReader, component: str, *, scale: float) -> dict[str, Fold]:
    settings = adapter_settings(read_header(stored.path)[1], component) or {}
    folds: dict[str, Fold] = {}
    for key in stored.tensors:
        # With an adapter's name in it, a file's key is a parameter's name.
        parsed = AdapterParameter.parse(_named(key.removeprefix(f"{component}.")))
        if not key.startswith(f"{component}.") or parsed is None:
            continue
        empty = Fold(layer=parsed.layer, settings=settings)
        folds.setdefault(parsed.layer, empty).tensors[parsed.kind] = stored.tensor(key).float()
    if not folds:
        raise CheckpointMismatchError(
            f"has no adapters for {component!r}", key=str(stored.path), fix="name the component"
        )
    if scale != 1 and any("lora_magnitude_vector" in fold.tensors for fold in folds.values()):
        raise InvalidValueError(
            "DoRA's magnitudes were trained for full strength", key="scale", value=scale, fix="1"
        )
    return {layer: fold.scaled_as_told(scale) for layer, fold in folds.items()}


def _check_base(origin: ModelFolderReader) -> None:
    if origin.config is not None and "_class_name" not in origin.config:
        raise CheckpointMismatchError(
            "is no model of diffusers",
            key="base",
            value=str(origin.path),
            fix="for a text encoder: load pipeline and adapters, pipeline.fuse_lora(), save that",
        )


def _named(key: str) -> str:
    if re.search(r"\.(lora_magnitude_vector|lora_embedding_[AB]|lokr_\w+|hada_\w+)$", key):
        return f"{key}.file"
    return re.sub(r"\.(lora_[AB])\.(weight|bias)$", r".\1.file.\2", key)


def _plain(name: str) -> str:
    match = _WRAPPED.fullmatch(name)
    return name if match is None else f"{match[1]}.{match[2]}"


def _unnamed(module: torch.nn.Module) -> str | None:
    # A single model's name does not matter here, so its class need not tell one.
    return None if hasattr(module, "names") else "model"
