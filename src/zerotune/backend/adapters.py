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
Form = Literal["comfyui", "kohya"]
"""Format of files with the layer names of a model's original release."""

LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""File name that diffusers expects in a LoRA folder."""
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CONFIG: Final = "adapter_config.json"
"""Name of the configuration file that peft expects in an adapter folder."""
SETTINGS: Final = "lora_adapter_metadata"
"""Header key under which diffusers stores the rank, alpha and other settings."""

COMFYUI_PREFIX: Final = "diffusion_model."
KOHYA_PREFIX: Final = "lora_unet_"
ENCODER_PREFIXES: Final = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
_TENSOR: Final = re.compile(r"\.(?:lora_|lokr_|hada_|alpha$|dora_scale$|diff)")
"""The suffix after a layer's name in a key."""


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


# -- Names of layers.


@attrs.frozen
class Published:
    """Layer names of a model's original release, which ComfyUI and kohya use."""

    pipeline: str
    """Name of the diffusers pipeline whose ``lora_state_dict`` reads files with these names."""
    layouts: tuple[Form, ...]
    """File formats that the pipeline reads."""
    layers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Maps each original name to diffusers' names, with ``#`` for a block's number. If a name maps
    to several diffusers layers, the original layer concatenates their outputs. Empty if diffusers
    uses the original names."""
    reader: Form | None = attrs.field(default=None, kw_only=True)
    """Format to which files are converted before diffusers reads them; ``None`` for no
    conversion."""

    def theirs(self, layer: str) -> tuple[str, tuple[str, ...]]:
        """Return the name of the original layer, and all diffusers layers that it combines.

        Args:
            layer: Name of the layer in diffusers.
        """
        if not self.layers:
            return layer, (layer,)
        pattern, numbers = numbered(layer)
        for name, ours in self.layers.items():
            if pattern in ours:
                return with_number(name, numbers), tuple(
                    with_number(each, numbers) for each in ours
                )
        raise CheckpointMismatchError(
            "diffusers cannot read this layer from a file in this format",
            'remove the layer from the targets, or export with layout="diffusers"',
            layer,
        )

    def respelled(self, state: Mapping[str, torch.Tensor], to: Form) -> dict[str, torch.Tensor]:
        """Convert tensor names from ComfyUI's to kohya's or back; ``{}`` if any name is unknown.

        Args:
            state: The file's tensors, by name.
            to: ``"comfyui"`` or ``"kohya"``.
        """
        flat = {name.replace(".", "_"): name for name in self.layers}
        respelled = {}
        for key, tensor in state.items():
            layer, kind = layer_and_kind(key)
            if layer.startswith(KOHYA_PREFIX):
                pattern, numbers = numbered(layer.removeprefix(KOHYA_PREFIX), separator="_")
                name = flat.get(pattern)
            else:
                pattern, numbers = numbered(layer.removeprefix(COMFYUI_PREFIX))
                name = pattern if pattern in self.layers else None
            if name is None:
                return {}
            name = with_number(name, numbers)
            if to == "kohya":
                name = f"{KOHYA_PREFIX}{name.replace('.', '_')}.{_TO_KOHYA.get(kind, kind)}"
            else:
                name = f"{COMFYUI_PREFIX}{name}.{_TO_COMFYUI.get(kind, kind)}"
            respelled[name] = tensor
        return respelled

    def _their_names(self, model: torch.nn.Module, separator: str) -> dict[str, str]:
        """Map original names to diffusers' names, for layers with a one-to-one mapping."""
        found = {}
        for name, module in model.named_modules():
            if name and getattr(module, "weight", None) is not None:
                try:
                    theirs, ours = self.theirs(name)
                except CheckpointMismatchError:
                    continue
                if len(ours) == 1:
                    found[theirs.replace(".", separator)] = name
        return found


def numbered(layer: str, separator: str = ".") -> tuple[str, str | None]:
    """Replace the first number in a dotted name with ``#``; return the pattern and the number.

    Args:
        layer: Name of a layer.
        separator: Character between the parts of the name.
    """
    mark = re.escape(separator)
    match = re.search(rf"(?<={mark})\d+(?={mark})", layer)
    if match is None:
        return layer, None
    return f"{layer[: match.start()]}#{layer[match.end() :]}", match[0]


def with_number(pattern: str, number: str | None) -> str:
    """Replace ``#`` in a pattern with a number."""
    return pattern if number is None else pattern.replace("#", number, 1)


def layer_and_kind(key: str) -> tuple[str, str]:
    """Split the name of a file's tensor into the layer's name and the suffix after it.

    Args:
        key: Name of the tensor.
    """
    match = _TENSOR.search(key)
    return (key, "") if match is None else (key[: match.start()], key[match.start() + 1 :])


_TO_KOHYA: Final = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
_TO_COMFYUI: Final = {there: here for here, there in _TO_KOHYA.items()}


# -- Known models.


def _one_by_one(*pairs: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    """Map original names to diffusers' names, one to one."""
    return {theirs: (ours,) for theirs, ours in pairs}


def _parts(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.#.{name}" for name in names)


def _double(between: str) -> dict[str, tuple[str, ...]]:
    """Attention layers of two-stream blocks; ``between`` separates stream and projection."""
    there, block = "double_blocks.#", "transformer_blocks"
    return {
        f"{there}.img_attn{between}qkv": _parts(block, "attn.to_q", "attn.to_k", "attn.to_v"),
        f"{there}.txt_attn{between}qkv": _parts(
            block, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
        ),
        f"{there}.img_attn{between}proj": _parts(block, "attn.to_out.0"),
        f"{there}.txt_attn{between}proj": _parts(block, "attn.to_add_out"),
    }


def _feed_forward(first: str, second: str, modulation: str) -> dict[str, tuple[str, ...]]:
    """Feed-forward layers and modulations of Flux blocks and similar blocks."""
    return {
        f"double_blocks.#.{stream}_{theirs}": _parts("transformer_blocks", ours)
        for stream, ff, norm in (("img", "ff", "norm1"), ("txt", "ff_context", "norm1_context"))
        for theirs, ours in (
            (f"mlp.{first}", f"{ff}.net.0.proj"),
            (f"mlp.{second}", f"{ff}.net.2"),
            (f"mod.{modulation}", f"{norm}.linear"),
        )
    }


_SINGLE: Final = {
    "single_blocks.#.linear1": _parts(
        "single_transformer_blocks", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"
    ),
    "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
}
_FLUX: Final = {
    **_double("."),
    **_feed_forward("0", "2", "lin"),
    **_SINGLE,
    "single_blocks.#.modulation.lin": ("single_transformer_blocks.#.norm.linear",),
}
_FLUX_2: Final = {
    **_double("."),
    **_one_by_one(
        ("double_blocks.#.img_mlp.0", "transformer_blocks.#.ff.linear_in"),
        ("double_blocks.#.img_mlp.2", "transformer_blocks.#.ff.linear_out"),
        ("double_blocks.#.txt_mlp.0", "transformer_blocks.#.ff_context.linear_in"),
        ("double_blocks.#.txt_mlp.2", "transformer_blocks.#.ff_context.linear_out"),
        ("single_blocks.#.linear1", "single_transformer_blocks.#.attn.to_qkv_mlp_proj"),
        ("single_blocks.#.linear2", "single_transformer_blocks.#.attn.to_out"),
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
        ("final_layer.linear", "proj_out"),
    ),
}
_HUNYUAN: Final = {
    **_double("_"),
    **_feed_forward("fc1", "fc2", "linear"),
    **_SINGLE,
    "single_blocks.#.modulation.linear": ("single_transformer_blocks.#.norm.linear",),
}
_WAN: Final = _one_by_one(
    *(
        (f"blocks.#.{theirs}.{short}", f"blocks.#.{ours}.{name}")
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for short, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("blocks.#.cross_attn.k_img", "blocks.#.attn2.add_k_proj"),
    ("blocks.#.cross_attn.v_img", "blocks.#.attn2.add_v_proj"),
    ("blocks.#.ffn.0", "blocks.#.ffn.net.0.proj"),
    ("blocks.#.ffn.2", "blocks.#.ffn.net.2"),
)
_KREA_2: Final = _one_by_one(
    *(
        (f"{theirs}.#.{kind}.{short}", f"{ours}.#.{name}")
        for theirs, ours in (
            ("blocks", "transformer_blocks"),
            ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
            ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        )
        for kind, short, name in (
            ("attn", "wq", "attn.to_q"),
            ("attn", "wk", "attn.to_k"),
            ("attn", "wv", "attn.to_v"),
            ("attn", "wo", "attn.to_out.0"),
            ("attn", "gate", "attn.to_gate"),
            ("mlp", "gate", "ff.gate"),
            ("mlp", "up", "ff.up"),
            ("mlp", "down", "ff.down"),
        )
    )
)

_BOTH: Final[tuple[Form, ...]] = ("comfyui", "kohya")
_COMFYUI_ALONE: Final[tuple[Form, ...]] = ("comfyui",)
PUBLISHED: Final[Mapping[str, Published]] = {
    "UNet2DConditionModel": Published("StableDiffusionXLPipeline", ("kohya",)),
    "FluxTransformer2DModel": Published("FluxPipeline", _BOTH, _FLUX, reader="kohya"),
    "ChromaTransformer2DModel": Published("ChromaPipeline", _BOTH, _FLUX, reader="kohya"),
    "Flux2Transformer2DModel": Published("Flux2Pipeline", _BOTH, _FLUX_2, reader="kohya"),
    "QwenImageTransformer2DModel": Published("QwenImagePipeline", _BOTH),
    "ZImageTransformer2DModel": Published("ZImagePipeline", _BOTH),
    "WanTransformer3DModel": Published("WanPipeline", _BOTH, _WAN, reader="comfyui"),
    "HunyuanVideoTransformer3DModel": Published(
        "HunyuanVideoPipeline", _BOTH, _HUNYUAN, reader="comfyui"
    ),
    "LTXVideoTransformer3DModel": Published("LTXPipeline", _COMFYUI_ALONE),
    "HiDreamImageTransformer2DModel": Published("HiDreamImagePipeline", _COMFYUI_ALONE),
    "Krea2Transformer2DModel": Published("Krea2Pipeline", _COMFYUI_ALONE, _KREA_2),
}
"""Original layer names, by the model's class name."""

_TEXT_ENCODERS: Final = Published("StableDiffusionXLPipeline", ("kohya",))


def publication_of(model: torch.nn.Module, component: str) -> Published | None:
    """Return the layer names of a model's original release; ``None`` if they are unknown.

    Args:
        model: The model.
        component: Name of the model in its pipeline, such as ``"transformer"``.
    """
    known = PUBLISHED.get(type(model).__name__)
    return _TEXT_ENCODERS if component in ENCODER_PREFIXES else known


def baked_lokr(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply LoKr's alphas into the first factors, as ``load_lora_adapter`` expects.

    Args:
        state: The file's tensors, by name.
    """
    found = dict(state)
    for key in [each for each in state if each.endswith(".alpha")]:
        stem = key.removesuffix(".alpha")
        own = {k.removeprefix(f"{stem}."): t for k, t in state.items() if k.startswith(f"{stem}.")}
        first = next((kind for kind in ("lokr_w1", "lokr_w1_a") if kind in own), None)
        if first is None:
            continue
        rank, alpha = lycoris_rank(own), float(found.pop(key))
        if rank is not None:
            found[f"{stem}.{first}"] = own[first] * (alpha / rank)
    return found


def lycoris_rank(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Return the rank of a factorised matrix; ``None`` if both matrices are unfactorised.

    Args:
        tensors: A layer's tensors, by kind.
    """
    for name in ("lokr_w2_b", "lokr_w1_b", "hada_w1_b"):
        if name in tensors:
            return int(tensors[name].shape[0])
    return None


# -- Reading.


@attrs.frozen(kw_only=True)
class Read:
    """A LoRA file from another trainer, converted to diffusers' names."""

    tensors: dict[str, torch.Tensor]
    """Tensors by diffusers' names, such as ``<component>.<layer>.lora_A.weight``."""
    alphas: dict[str, Any] | None
    """Alphas for ``load_lora_adapter``; ``None`` if the tensors include the scale."""
    reader: str
    """Name of the converter."""


def read_others(
    state: Mapping[str, torch.Tensor],
    *,
    model: torch.nn.Module,
    component: str,
    pipeline: Any = None,
) -> Read:
    """Convert a LoRA file to diffusers' names with diffusers' ``lora_state_dict``.

    Args:
        state: The file's tensors, by their names in the file.
        model: The model that the LoRA is for.
        component: Name of the model in its pipeline, such as ``"transformer"``.
        pipeline: A pipeline or its class; default: the one that zerotune knows for the model's
            class.
    """
    kind, known = type(model).__name__, publication_of(model, component)
    if known is None and pipeline is None:
        raise CheckpointMismatchError(
            "the file does not use diffusers' names, and zerotune knows no other format for "
            f"{kind}",
            "set pipeline= to a pipeline whose load_lora_weights reads the file",
            "adapters",
            next(iter(state), None),
        )
    plain = None if known is None else _plain_lycoris(state, known, model, component)
    if plain is not None:
        return Read(tensors=plain, alphas=None, reader="the layers' names")
    if pipeline is None and known is not None:
        pipeline = getattr(importlib.import_module("diffusers"), known.pipeline)
    cls = pipeline if isinstance(pipeline, type) else type(pipeline)
    tensors = dict(state)
    if known is not None and known.reader is not None:
        tensors = known.respelled(tensors, known.reader) or tensors
    if not any(key.startswith("lora_") for key in tensors):
        tensors = _unscaled(tensors)
    return _read_by(cls, tensors, model)


def _read_by(cls: Any, state: dict[str, torch.Tensor], model: torch.nn.Module) -> Read:
    settings: dict[str, Any] = {}
    if "unet_name" in dir(cls) and type(model).__name__.startswith("UNet"):
        settings["unet_config"] = model.config
    if "return_alphas" in inspect.signature(cls.lora_state_dict).parameters:
        settings["return_alphas"] = True
    try:
        found = cls.lora_state_dict(state, **settings)
    except (ValueError, KeyError, RuntimeError, AssertionError, IndexError, TypeError) as error:
        raise CheckpointMismatchError(
            f"{cls.__name__} cannot read the file ({type(error).__name__}: {error})",
            "check which model and trainer the file is from",
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


def _plain_lycoris(
    state: Mapping[str, torch.Tensor], known: Published, model: torch.nn.Module, component: str
) -> dict[str, torch.Tensor] | None:
    """LoKr or LoHa tensors in diffusers' names; ``None`` for LoRA, or if a layer is joined."""
    kinds = {layer_and_kind(key)[1].split("_")[0] for key in state}
    if not kinds & {"lokr", "hada"}:
        return None
    names = {**known._their_names(model, "."), **known._their_names(model, "_")}
    found = {}
    for key, tensor in state.items():
        layer, kind = layer_and_kind(key)
        prefix = next((p for p in _LAYER_PREFIXES if layer.startswith(p)), "")
        name = names.get(layer.removeprefix(prefix))
        if name is None:
            return None
        found[f"{component}.{name}.{kind}"] = tensor
    return found


_LAYER_PREFIXES: Final = (
    COMFYUI_PREFIX,
    KOHYA_PREFIX,
    "lycoris_",
    *ENCODER_PREFIXES.values(),
    "lora_te_",
)
