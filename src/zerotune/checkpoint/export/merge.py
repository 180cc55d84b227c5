"""Merge adapters into the weights they adapt."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune._util.files import system_errors
from zerotune.backend.adapters import (
    BASE,
    AdapterParameter,
    adapter_layers,
    adapter_settings,
    find_adapters,
    peft_config,
    trained_adapter,
)
from zerotune.backend.checks import checked_dtype
from zerotune.backend.trained_parts import components
from zerotune.backend.upstream import whole_parameter
from zerotune.checkpoint.contents import model_config, persistent_buffers
from zerotune.checkpoint.export.driver import (
    SHARD_SIZE,
    ExportWriter,
    Gatherable,
    Named,
    export_together,
    meet,
)
from zerotune.checkpoint.export.model import ModelFolderReader, model_writer
from zerotune.checkpoint.folders import check_apart
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
    """The adapter of one layer; calling the object merges the adapter into a weight."""

    layer: str
    """Dotted name of the adapted layer."""
    scaling: float = 1.0
    """Multiplier for the product of the factors."""
    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """The adapter's factors in fp32 on the CPU, by name: ``lora_A``, ``lora_B``, ``lokr_w1``,
    ``oft_R``, …"""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """peft's configuration of the adapter, shared by all layers."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight in fp32.

        Args:
            weight: The layer's weight in any dtype.
        """
        plain = weight.detach().to("cpu", torch.float32)
        try:
            wrapped = self._wrapped(plain)
            wrapped.merge(safe_merge=True)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointMismatchError(
                f"the adapter does not fit this layer ({error})",
                key=self.layer,
                value=tuple(weight.shape),
            ) from error
        merged: torch.Tensor = wrapped.get_base_layer().weight.detach()
        return merged

    @property
    def rank(self) -> int:
        """Rank of the adapter: the inner dimension of the factors."""
        for kind in ("lora_A", "lora_embedding_A", "hada_w1_b"):
            if kind in self.tensors:
                return int(self.tensors[kind].shape[0])
        # LoKr factors that are not decomposed do not show the rank.
        return int(self._setting("r", "rank_pattern", 0))

    def scaled_by_settings(self, strength: float) -> Fold:
        """Return a copy with the scale from the adapter's settings; alpha defaults to the rank.

        Args:
            strength: Multiplier for the scale; 1 is the trained strength.
        """
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
        try:
            peft = importlib.import_module("peft")
        except ImportError as error:
            raise MissingDependencyError(
                f"is required to merge adapters and could not be imported ({error})",
                key="peft",
                fix="pip install 'zerotune[lora]'",
            ) from error
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
        shaping = {key: self.settings[key] for key in _SHAPING if key in self.settings}
        return getattr(peft, _CONFIGS[first])(**shaping, **scale)


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
"""Settings, other than rank and alpha, that affect how the factors are applied."""


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


_PARAMETER_ITSELF: Final = re.compile(
    r"\.(lora_magnitude_vector|lora_embedding_[AB]|lokr_\w+|hada_\w+)$"
)
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
    """Write an engine's model with merged adapters as a diffusers model folder. Collective.

    The merge needs additional memory only for the adapters and one parameter, even at stage 3 and
    with NVMe offload. Weights are merged in fp32 and then cast to ``dtype``, which is more accurate
    than merging in 16 bits.

    Args:
        path: Path of the folder, as in ``export_model``.
        engine: Engine of a model with adapters.
        weights: As in ``export_model``.
        dtype: Dtype of floating-point tensors in the file.
        component: Name of the part to write; required for ``TrainedParts``.
        shard_size: Maximum bytes of tensor data per file.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: The model trains no adapters.
        InvalidValueError: ``component`` is missing for ``TrainedParts``.
        CheckpointError: The path exists and is not an export, or writing fails.
        MissingDependencyError: peft is not installed.
        CollectiveError: A rank did not call ``export_merged``, or the arguments differ.
    """
    chosen = checked_dtype(dtype)
    exported = meet(
        engine,
        path,
        "export_merged",
        chosen,
        component,
        weights=weights,
        timeout_s=timeout_s,
        purpose="merging into",
    )
    merged = _Merged.of(engine, component)
    return export_together(
        engine,
        "the merge",
        begin=lambda: _MergeDraft(
            merged,
            model_writer(
                path,
                config=model_config(merged.module),
                specs=merged.specs(chosen),
                shard_size=shard_size,
            ),
        ),
        weights=exported,
        others=merged.tensors(),
    )


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
    """Merge a LoRA file into a model folder, without an engine. Not collective.

    Args:
        adapters: The LoRA file, or a folder that contains ``pytorch_lora_weights.safetensors``.
        path: Path of the folder to write, as in ``export_model``.
        base: Folder of the model that the adapters were trained on, such as ``<pipeline>/unet``.
        component: Name of the model in the LoRA file.
        scale: Strength of the adapters; 1 is the trained strength. DoRA requires 1.
        dtype: Dtype of floating-point tensors in the file.
        shard_size: Maximum bytes of tensor data per file.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: The file has no adapters for this component, or an adapter does not
            fit its layer.
        CheckpointError: A file is missing, or the path exists and is not an export.
        MissingDependencyError: peft is not installed.
    """
    purpose = f"cannot be written from {os.fspath(adapters)}"
    with system_errors(CheckpointError, path, purpose), ExitStack() as opened:
        file, chosen = find_adapters(adapters), checked_dtype(dtype)
        check_apart(Path(path), Path(base))
        stored = opened.enter_context(ModelFolderReader(file))
        origin = opened.enter_context(ModelFolderReader(Path(base)))
        folds = _folds(stored, component, scale=scale)
        if origin.config is not None and "_class_name" not in origin.config:
            raise CheckpointMismatchError(
                "is not a diffusers model",
                key="base",
                value=str(origin.path),
                fix="for a text encoder, load the pipeline and the adapters, call "
                "pipeline.fuse_lora(), and save the pipeline",
            )
        weights = {f"{layer}.weight": fold for layer, fold in folds.items()}
        if missing := sorted(weights.keys() - origin.tensors.keys()):
            raise CheckpointMismatchError(
                f"has an adapter, but is not in {base} ({len(missing)} such layers)",
                key=missing[0],
            )
        specs = [
            TensorSpec(key=key, dtype=each.dtype, shape=each.shape).cast(chosen)
            for key, each in origin.tensors.items()
        ]
        writer = model_writer(path, config=origin.config, specs=specs, shard_size=shard_size)
        tensors = ((key, origin.tensor(key)) for key in origin.tensors)
        return writer.write((k, weights[k](t) if k in weights else t) for k, t in tensors)


@attrs.frozen(kw_only=True, eq=False)
class _Merged:
    """A model's base parameters and buffers, and the scales and settings of its adapter."""

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
        # A single model's name does not matter here, so its class need not define one.
        unnamed = None if hasattr(engine.module, "names") else "model"
        named = components(engine.module, component or unnamed)
        if len(named) > 1:
            raise InvalidValueError(
                "must name one model, because export_merged writes only one",
                key="component",
                value=component,
                fix=f"write one of {list(named)}",
            )
        ((prefix, module),) = named.values()
        adapter = trained_adapter(engine.master_weights.parameters, prefix=prefix)
        if adapter is None:
            raise CheckpointMismatchError(
                "trains no adapters", key="component", value=type(module).__name__
            )
        return cls(
            prefix=prefix,
            module=module,
            adapter=adapter,
            sources={
                _plain_layers(name): parameter
                for name, parameter in module.named_parameters(remove_duplicate=False)
                if AdapterParameter.parse(name) is None
            },
            buffers={_plain_layers(n): buffer for n, buffer in persistent_buffers(module).items()},
            scales={
                name: float(getattr(m, "scaling", {}).get(adapter, 1.0))
                for name, m in adapter_layers(module)
            },
            settings=peft_config(module, adapter).to_dict(),
        )

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Describe all tensors in the order in which they are written."""
        return [
            TensorSpec(
                key=name, dtype=each.dtype, shape=tuple(getattr(each, "ds_shape", each.shape))
            ).cast(dtype)
            for name, each in {**self.sources, **self.buffers}.items()
        ]

    def tensors(self) -> Named:
        """Yield base parameters one at a time, then buffers. Collective at stage 3."""
        for name, source in self.sources.items():
            yield name, whole_parameter(source)
        yield from self.buffers.items()


class _MergeDraft:
    """Writes the model on rank 0; keeps trained tensors until their layers are written."""

    def __init__(self, merged: _Merged, writer: ExportWriter) -> None:
        self._merged, self._writer = merged, writer
        self.publish, self.abandon = writer.publish, writer.abandon
        self._folds: dict[str, Fold] = {}
        self._trained: dict[str, torch.Tensor] = {}

    def append(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        """Store a trained tensor, or write a base tensor with its adapter merged."""
        merged = self._merged
        if not trained:
            layer, _, kind = name.rpartition(".")
            fold = self._folds.get(layer) if kind == "weight" else None
            current = self._trained.get(name, tensor)
            self._writer.append(name, current if fold is None else fold(current))
        elif name.startswith(merged.prefix):
            inner = name.removeprefix(merged.prefix)
            parsed = AdapterParameter.parse(inner)
            if parsed is None:
                self._trained[_plain_layers(inner)] = tensor.clone()
                return
            empty = Fold(
                layer=parsed.layer, scaling=merged.scales[parsed.layer], settings=merged.settings
            )
            self._folds.setdefault(parsed.layer, empty).tensors[parsed.kind] = tensor.clone()


def _folds(stored: ModelFolderReader, component: str, *, scale: float) -> dict[str, Fold]:
    settings = adapter_settings(stored.metadata[0], component) or {}
    folds: dict[str, Fold] = {}
    for key in stored.tensors:
        # Parameter names contain an adapter name; keys of the file do not, so insert one.
        name = re.sub(r"\.(lora_[AB])\.(weight|bias)$", r".\1.file.\2", key)
        if _PARAMETER_ITSELF.search(key):
            name = f"{key}.file"
        parsed = AdapterParameter.parse(name.removeprefix(f"{component}."))
        if not key.startswith(f"{component}.") or parsed is None:
            continue
        empty = Fold(layer=parsed.layer, settings=settings)
        folds.setdefault(parsed.layer, empty).tensors[parsed.kind] = stored.tensor(key).float()
    if not folds:
        raise CheckpointMismatchError(
            f"has no adapters for {component!r}",
            key=str(stored.path),
            fix="set component= to the name of the model in the file",
        )
    if scale != 1 and any("lora_magnitude_vector" in fold.tensors for fold in folds.values()):
        raise InvalidValueError(
            "must be 1, because DoRA's magnitudes are valid only at full strength",
            key="scale",
            value=scale,
            fix="write scale=1",
        )
    return {layer: fold.scaled_by_settings(scale) for layer, fold in folds.items()}


def _plain_layers(name: str) -> str:
    match = _WRAPPED.fullmatch(name)
    return name if match is None else f"{match[1]}.{match[2]}"
