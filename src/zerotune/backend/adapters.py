"""Adapter tensors of a model: their names in the model and in files.

Adapters follow peft: a layer ``X`` becomes ``X.base_layer``, with factors ``X.lora_A.<adapter>``,
``X.lokr_w1.<adapter>`` and so on. This module parses these names without importing peft. diffusers
and peft use the model's own layer names. ComfyUI and kohya use the layer names of the original
release, where one layer may combine three projections. zerotune uses diffusers' ``lora_state_dict``
to read such files.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import torch

from zerotune._util.text import counted, json_of
from zerotune.decisions import Decision
from zerotune.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

_PARAMETER: Final = re.compile(
    r"(?P<layer>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|lokr_w[12](?:_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12]"
    r"|oft_R|oft_embedding_R)\.(?P<adapter>[^.]+)(?P<rest>\.weight|\.bias|)"
)
_EMPTYING: Final = re.compile(r"lora_B|lora_embedding_A|lokr_\w+|hada_\w+|oft_R|oft_embedding_R")
"""Factors that disable the whole adapter while they are zero."""


@attrs.frozen(kw_only=True)
class AdapterParameter:
    """Parsed name of an adapter parameter."""

    layer: str
    """Dotted name of the adapted layer in the model."""
    kind: str
    """Type of the factor, such as ``lora_A``, ``lora_magnitude_vector``, ``lokr_w1``, ``hada_w1_a``
    or ``oft_R``."""
    adapter: str
    """Name of the adapter."""
    rest: str
    """``.weight``, ``.bias`` or nothing."""

    @classmethod
    def parse(cls, name: str) -> AdapterParameter | None:
        """Parse a parameter's name; ``None`` if the parameter belongs to no adapter.

        Args:
            name: Dotted name of the parameter.
        """
        match = _PARAMETER.fullmatch(name)
        return None if match is None else cls(**match.groupdict())

    @property
    def key(self) -> str:
        """The parameter's name in a peft file, without the adapter's name."""
        rest = "" if self.kind == "lora_magnitude_vector" else self.rest
        return f"{self.layer}.{self.kind}{rest}"

    @property
    def empties(self) -> bool:
        """Whether the adapter has no effect while this factor is zero."""
        return _EMPTYING.fullmatch(self.kind) is not None and self.rest != ".bias"


@attrs.frozen(kw_only=True)
class AdapterFacts:
    """Name, layers and sizes of an adapter that zerotune has added to a model."""

    name: str
    """The adapter's name in the model."""
    layers: tuple[str, ...]
    """Dotted names of the adapted layers."""
    tensors: int
    """Number of trained tensors."""
    trained: int
    """Number of elements of the trained tensors."""
    total: int
    """Number of elements of the whole model, including adapters."""
    decisions: tuple[Decision, ...] = ()
    """Automatic choices."""

    @property
    def share(self) -> float:
        """Trained fraction of the model's elements, 0 to 1."""
        return self.trained / self.total

    def __str__(self) -> str:
        return (
            f"adapter {self.name!r}: {counted(len(self.layers), 'layer')}, "
            f"{counted(self.tensors, 'tensor')}, "
            f"{self.trained:,} of {self.total:,} elements trained ({self.share:.2%})"
        )


def peft_config(model: Any, adapter: str) -> Any:
    """Return peft's configuration object for an adapter."""
    return model.peft_config[adapter]


def trained_adapter(names: Iterable[str], *, prefix: str = "") -> str | None:
    """Return the name of the adapter that an engine trains; ``None`` if the engine trains none.

    Args:
        names: Names of all parameters of the engine's optimizer, including ones frozen later.
        prefix: Prefix of the model's parameter names in ``names``.
    """
    found = {
        parsed.adapter
        for name in names
        if name.startswith(prefix) and (parsed := AdapterParameter.parse(name))
    }
    if len(found) > 1:
        raise CheckpointMismatchError(
            "several adapters are trained at once, but only one can be exported",
            "train one adapter, and freeze all others",
            "adapter",
            sorted(found),
        )
    return next(iter(found), None)


Layout = Literal["diffusers", "peft"]
LAYOUTS: Final[tuple[Layout, ...]] = ("diffusers", "peft")
LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""File name that diffusers expects in a LoRA folder."""
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CONFIG: Final = "adapter_config.json"
"""Name of the configuration file that peft expects in an adapter folder."""
SETTINGS: Final = "lora_adapter_metadata"
"""Header key under which diffusers stores the rank, alpha and other settings."""


def find_adapters(path: str | os.PathLike[str]) -> Path:
    """Return the path to a LoRA file; raise an error if the file does not exist.

    Args:
        path: A LoRA file, or a folder that contains ``pytorch_lora_weights.safetensors``.
    """
    given = Path(path)
    file = given / LORA_FILE if given.is_dir() else given
    if not file.is_file():
        raise CheckpointError(
            "this LoRA file does not exist",
            f"pass the path of a LoRA file, or of a folder with {LORA_FILE}",
            str(file),
        )
    return file


def adapter_settings(metadata: Mapping[str, str], component: str) -> dict[str, Any] | None:
    """Return a component's adapter settings from a file's header; ``None`` if there are none.

    Args:
        metadata: Metadata of the file's header.
        component: Name of the model in its pipeline, such as ``"transformer"``.
    """
    try:
        every = json_of(metadata.get(SETTINGS, "{}"))
    except ValueError as error:
        raise CheckpointCorruptError(f"is not JSON ({error})", key=SETTINGS) from error
    prefix = f"{component}."
    return {
        key.removeprefix(prefix): value for key, value in every.items() if key.startswith(prefix)
    } or None


# -- Files of other programs, which a diffusers pipeline reads.


_READERS: Final[Mapping[str, str]] = {
    "UNet2DConditionModel": "StableDiffusionXLPipeline",
    "CLIPTextModel": "StableDiffusionXLPipeline",
    "CLIPTextModelWithProjection": "StableDiffusionXLPipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "ChromaTransformer2DModel": "ChromaPipeline",
    "Flux2Transformer2DModel": "Flux2Pipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
    "WanTransformer3DModel": "WanPipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoPipeline",
    "LTXVideoTransformer3DModel": "LTXPipeline",
    "HiDreamImageTransformer2DModel": "HiDreamImagePipeline",
    "Krea2Transformer2DModel": "Krea2Pipeline",
}
"""Pipelines whose ``lora_state_dict`` reads a model's adapters, by the model's class name."""


@attrs.frozen(kw_only=True)
class Read:
    """A LoRA file from another trainer, converted to diffusers' names."""

    tensors: dict[str, torch.Tensor]
    """Tensors by diffusers' names, such as ``<component>.<layer>.lora_A.weight``."""
    alphas: dict[str, Any] | None
    """Alphas for ``load_lora_adapter``; ``None`` if the tensors include the scale."""
    reader: str
    """Name of the converter."""


def read_others(state: Mapping[str, torch.Tensor], *, model: Any, pipeline: Any = None) -> Read:
    """Convert a LoRA file to diffusers' names with diffusers' ``lora_state_dict``.

    Args:
        state: The file's tensors, by their names in the file.
        model: The model that the LoRA is for.
        pipeline: A pipeline or its class; default: the one that zerotune knows for the model's
            class.
    """
    kind = type(model).__name__
    if pipeline is None and kind not in _READERS:
        raise CheckpointMismatchError(
            "the file does not use diffusers' names, and zerotune knows no other format for "
            f"{kind}",
            "set pipeline= to a pipeline whose load_lora_weights reads the file",
            "adapters",
            next(iter(state), None),
        )
    pipeline = pipeline or getattr(importlib.import_module("diffusers"), _READERS[kind])
    cls: Any = pipeline if isinstance(pipeline, type) else type(pipeline)
    tensors = dict(state)
    if not any(key.startswith("lora_") for key in tensors):
        tensors = _unscaled(tensors)
    settings: dict[str, Any] = {}
    if "unet_name" in dir(cls) and kind.startswith("UNet"):
        settings["unet_config"] = model.config
    if "return_alphas" in inspect.signature(cls.lora_state_dict).parameters:
        settings["return_alphas"] = True
    try:
        found = cls.lora_state_dict(tensors, **settings)
    except (ValueError, KeyError, RuntimeError, AssertionError, IndexError, TypeError) as error:
        raise CheckpointMismatchError(
            f"{cls.__name__} cannot read the file ({type(error).__name__}: {error})",
            "check which model and trainer the file is from; the recipe convert_lora.py converts "
            "more files to diffusers' names",
            "adapters",
        ) from error
    tensors, alphas = found if isinstance(found, tuple) else (found, None)
    return Read(tensors=tensors, alphas=alphas or None, reader=f"{cls.__name__}.lora_state_dict")


def _unscaled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply alphas into the second factors; some diffusers converters do not handle alphas."""
    found = dict(state)
    for key in [each for each in state if each.endswith(".alpha")]:
        stem = key.removesuffix(".alpha")
        for down, up in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            if f"{stem}.{down}.weight" in found:
                scale = float(found.pop(key)) / found[f"{stem}.{down}.weight"].shape[0]
                found[f"{stem}.{up}.weight"] = found[f"{stem}.{up}.weight"] * scale
    return found
