"""A model's adapters: what they are called in it and in files, and what they were before training.

Adapters are peft's: a layer ``X`` becomes ``X.base_layer`` beside ``X.lora_A.<adapter>``,
``X.lokr_w1.<adapter>`` and the like; only names are read here, and peft itself is not needed.
diffusers and peft name a layer as the model does. ComfyUI and kohya name it as the model's first
publication did, where three projections may be one. Files are read by diffusers' own
``lora_state_dict``; what is written here is read back by it before it gets its name.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import torch

from zerotune._util.text import counted, json_of
from zerotune.decisions import Decision
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
)

_RECORD: Final = "_zerotune_adapters"
_PARAMETER: Final = re.compile(
    r"(?P<layer>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|lokr_w[12](?:_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12]"
    r"|oft_R|oft_embedding_R)\.(?P<adapter>[^.]+)(?P<rest>\.weight|\.bias|)"
)
_EMPTYING: Final = re.compile(r"lora_B|lora_embedding_A|lokr_\w+|hada_\w+|oft_R|oft_embedding_R")
"""Factors of which one that is zero leaves the base as it is."""
BASE: Final = "base_layer"
"""What peft calls the layer that an adapter wraps."""


@attrs.frozen(kw_only=True)
class AdapterParameter:
    """A parameter that belongs to an adapter, told by its name."""

    layer: str
    """Dotted name of the adapted layer, without any prefix of its own."""
    kind: str
    """``lora_A``, ``lora_magnitude_vector``, ``lokr_w1``, ``hada_w1_a``, ``oft_R``, …"""
    adapter: str
    """Name of the adapter."""
    rest: str
    """``.weight``, ``.bias`` or nothing."""

    @classmethod
    def parse(cls, name: str) -> AdapterParameter | None:
        """Read a parameter's name; ``None`` when it belongs to no adapter."""
        match = _PARAMETER.fullmatch(name)
        return None if match is None else cls(**match.groupdict())

    @property
    def key(self) -> str:
        """Its name in a file, as peft writes it: without the adapter's."""
        rest = "" if self.kind == "lora_magnitude_vector" else self.rest
        return f"{self.layer}.{self.kind}{rest}"

    @property
    def empties(self) -> bool:
        """Whether the adapter does nothing while this factor is zero; some begin so."""
        return _EMPTYING.fullmatch(self.kind) is not None and self.rest != ".bias"


@attrs.frozen(kw_only=True)
class AdapterFacts:
    """What was added to a model."""

    name: str
    """The adapter's name in the model."""
    layers: tuple[str, ...]
    """Dotted names of the adapted layers."""
    tensors: int
    """Trained tensors."""
    trained: int
    """Elements of the trained tensors."""
    total: int
    """Elements of the whole model, adapters included."""
    decisions: tuple[Decision, ...] = ()
    """Automatic choices."""
    initial: Mapping[str, frozenset[str]] = attrs.field(factory=dict, repr=False)
    """Fingerprints of each trained tensor before training, also after rounding to 16 bits."""

    @property
    def share(self) -> float:
        """Part of the model that is trained."""
        return self.trained / self.total

    def __str__(self) -> str:
        return (
            f"adapter {self.name!r}: {counted(len(self.layers), 'layer')}, "
            f"{counted(self.tensors, 'tensor')}, "
            f"{self.trained:,} of {self.total:,} elements trained ({self.share:.2%})"
        )


def remember(model: torch.nn.Module, facts: AdapterFacts) -> None:
    """Keep on a model what was added to it."""
    setattr(model, _RECORD, {**getattr(model, _RECORD, {}), facts.name: facts})


def recall(model: torch.nn.Module, adapter: str) -> AdapterFacts | None:
    """What was added to a model; ``None`` when somebody else added the adapter."""
    record: AdapterFacts | None = getattr(model, _RECORD, {}).get(adapter)
    return record


def peft_config(model: Any, adapter: str) -> Any:
    """Peft's configuration object of an adapter."""
    return model.peft_config[adapter]


def trained_adapter(names: Iterable[str], *, prefix: str = "") -> str | None:
    """The adapter of a model that an engine trains; ``None`` when it trains none.

    Args:
        names: All parameters that the engine trains, those included that are frozen by now.
        prefix: What those of the model begin with.
    """
    found = {
        parsed.adapter
        for name in names
        if name.startswith(prefix) and (parsed := AdapterParameter.parse(name))
    }
    if len(found) > 1:
        raise CheckpointMismatchError(
            "several adapters are trained at once",
            key="adapter",
            value=sorted(found),
            fix="train one; freeze the others",
        )
    return next(iter(found), None)


def starting_points(tensor: torch.Tensor) -> frozenset[str]:
    """Fingerprints of a tensor as it is, and as engines of lower precision round it."""
    rounded = (tensor, tensor.to(torch.bfloat16), tensor.to(torch.float16))
    return frozenset(fingerprint(each) for each in rounded)


def fingerprint(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a tensor's elements in fp32."""
    flat = tensor.detach().float().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of the layers that an adapter wraps."""
    for name, module in model.named_modules():
        if hasattr(module, BASE) and hasattr(module, "adapter_layer_names"):
            yield name, module


Layout = Literal["diffusers", "peft", "comfyui", "kohya"]
LAYOUTS: Final[tuple[Layout, ...]] = ("diffusers", "peft", "comfyui", "kohya")

LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""What diffusers looks for in a folder."""
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CONFIG: Final = "adapter_config.json"
"""What peft looks for in a folder."""
SETTINGS: Final = "lora_adapter_metadata"
"""Where diffusers keeps rank, alpha and the like in the header."""

_COMFYUI: Final = "diffusion_model."
_KOHYA: Final = "lora_unet_"
_ENCODERS: Final = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
_TENSOR: Final = re.compile(r"\.(?:lora_|lokr_|hada_|alpha$|dora_scale$|diff)")
"""Where a layer's name ends in a key."""
_CLOSE_STEPS: Final = 4
"""Rounding steps that a scale may have cost in reading."""


def find_adapters(path: str | os.PathLike[str]) -> Path:
    """The LoRA file that a path means."""
    given = Path(path)
    file = given / LORA_FILE if given.is_dir() else given
    if not file.is_file():
        raise CheckpointError(
            "there is no LoRA file",
            key=str(file),
            fix=f"give the file, or a folder with {LORA_FILE}",
        )
    return file


def adapter_settings(metadata: Mapping[str, str], component: str) -> dict[str, Any] | None:
    """What a file's header says of a component's adapters; ``None`` when it says nothing."""
    try:
        every = json_of(metadata.get(SETTINGS, "{}"))
    except ValueError as error:
        raise CheckpointCorruptError(f"is not JSON ({error})", key=SETTINGS) from error
    prefix = f"{component}."
    return {
        key.removeprefix(prefix): value for key, value in every.items() if key.startswith(prefix)
    } or None


# -- What a layer is called.


@attrs.frozen(kw_only=True)
class Factors:
    """A layer's LoRA: what is added to its weight is ``scale * up @ down``."""

    down: torch.Tensor
    """(rank, inputs, …)."""
    up: torch.Tensor
    """(outputs, rank, …)."""
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Inner size."""
        return int(self.down.shape[0])

    def scaled(self) -> Factors:
        """The same with a scale of 1."""
        return attrs.evolve(self, up=self.up * self.scale, scale=1.0)

    def _same_product(self, trained: Factors, dtype: torch.dtype) -> bool | None:
        """Whether two products are the same to the last bit; ``None``: they are not even close.

        Readers may move a part of the scale from one factor to the other.
        """
        if self.down.shape != trained.down.shape or self.up.shape != trained.up.shape:
            return None
        moved = 1.0
        if trained.down.numel():
            largest = int(trained.down.abs().argmax())
            moved = float(self.down.flatten()[largest] / trained.down.flatten()[largest])
        scale = trained.scale / (moved * self.scale) if moved else 0.0
        pairs = ((self.down, trained.down * moved), (self.up, trained.up * scale))
        if all(torch.equal(each, other) for each, other in pairs):
            return True
        close = _CLOSE_STEPS * torch.finfo(dtype).eps
        near = all((each - other).abs().max() <= close * other.abs().max() for each, other in pairs)
        return False if near else None

    def _dense(self, dtype: torch.dtype) -> Factors:
        """Both factors as the file holds them, without ranks that do nothing."""
        down, up = self.down.to(dtype).float(), self.up.to(dtype).float()
        used = up.transpose(0, 1).flatten(1).any(dim=1)
        return attrs.evolve(self, down=down[used], up=up[:, used])


@attrs.frozen
class Published:
    """What a model's layers are called in its first publication."""

    pipeline: str
    """The diffusers pipeline whose ``lora_state_dict`` reads such files."""
    layouts: tuple[Layout, ...]
    """Those that it reads."""
    layers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Ours by theirs, ``#`` for a block's number; several of ours are one of theirs, joined along
    the outputs. Without any, names are the same."""
    reader: Layout | None = attrs.field(default=None, kw_only=True)
    """The spelling that is handed to diffusers, where it does not read both alike."""

    def theirs(self, layer: str) -> tuple[str, tuple[str, ...]]:
        """Their name of a layer, and all of our layers in it."""
        if not self.layers:
            return layer, (layer,)
        pattern, numbers = numbered(layer)
        for name, ours in self.layers.items():
            if pattern in ours:
                return with_number(name, numbers), tuple(
                    with_number(each, numbers) for each in ours
                )
        raise CheckpointMismatchError(
            "has no name in this format that diffusers reads",
            key=layer,
            fix='leave it out of the targets, or export with layout="diffusers"',
        )

    def respelled(self, state: Mapping[str, torch.Tensor], to: Layout) -> dict[str, torch.Tensor]:
        """The same file in the other of the two spellings; empty where a name is not known."""
        flat = {name.replace(".", "_"): name for name in self.layers}
        respelled = {}
        for key, tensor in state.items():
            layer, kind = _layer_and_kind(key)
            if layer.startswith(_KOHYA):
                pattern, numbers = numbered(layer.removeprefix(_KOHYA), separator="_")
                name = flat.get(pattern)
            else:
                pattern, numbers = numbered(layer.removeprefix(_COMFYUI))
                name = pattern if pattern in self.layers else None
            if name is None:
                return {}
            name = with_number(name, numbers)
            if to == "kohya":
                name = f"{_KOHYA}{name.replace('.', '_')}.{_TO_KOHYA.get(kind, kind)}"
            else:
                name = f"{_COMFYUI}{name}.{_TO_COMFYUI.get(kind, kind)}"
            respelled[name] = tensor
        return respelled

    def _their_names(self, model: torch.nn.Module, separator: str) -> dict[str, str]:
        """Our name of each layer that is one of theirs, by their name."""
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
    """A name with its block's number taken out: the first one."""
    mark = re.escape(separator)
    match = re.search(rf"(?<={mark})\d+(?={mark})", layer)
    if match is None:
        return layer, None
    return f"{layer[: match.start()]}#{layer[match.end() :]}", match[0]


def with_number(pattern: str, number: str | None) -> str:
    """A name with its block's number put back."""
    return pattern if number is None else pattern.replace("#", number, 1)


def _layer_and_kind(key: str) -> tuple[str, str]:
    match = _TENSOR.search(key)
    return (key, "") if match is None else (key[: match.start()], key[match.start() + 1 :])


_TO_KOHYA: Final = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
_TO_COMFYUI: Final = {there: here for here, there in _TO_KOHYA.items()}


# -- The models that are known.


def _one_by_one(*pairs: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    """By their name, ours."""
    return {theirs: (ours,) for theirs, ours in pairs}


def _parts(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.#.{name}" for name in names)


def _double(between: str) -> dict[str, tuple[str, ...]]:
    """Attention of blocks with two streams; ``between`` stands between stream and projection."""
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
    """Feed-forward layers and modulations of Flux's blocks and those like them."""
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

_BOTH: Final[tuple[Layout, ...]] = ("comfyui", "kohya")
_COMFYUI_ALONE: Final[tuple[Layout, ...]] = ("comfyui",)
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
"""By the class of the model."""

_TEXT_ENCODERS: Final = Published("StableDiffusionXLPipeline", ("kohya",))


def _publication(model: torch.nn.Module, component: str) -> Published | None:
    return _TEXT_ENCODERS if component in _ENCODERS else PUBLISHED.get(type(model).__name__)


def published(model: torch.nn.Module, form: Layout, component: str) -> Published:
    """What is known of a model's names in a format."""
    kind, known = type(model).__name__, _publication(model, component)
    if known is not None and form in known.layouts:
        return known
    others = [] if known is None else [repr(each) for each in known.layouts]
    raise InvalidValueError(
        f"diffusers reads no such files of {kind}, so it could not be compared with what was "
        "trained",
        key="layout",
        value=form,
        fix=f"one of {', '.join([repr('diffusers'), repr('peft'), *others])}",
    )


# -- Writing.


def write_lora(
    layers: Mapping[str, Factors],
    *,
    model: torch.nn.Module,
    form: Layout,
    component: str,
    outputs: Callable[[str], int],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The tensors of a file in ComfyUI's or kohya's format.

    kohya's holds the factors as they are beside an ``alpha`` in fp32; ComfyUI's has no scale, so
    it goes into the second factor before that is cast to ``dtype``.

    Args:
        layers: Trained factors in fp32 by the layer's name.
        model: Whose layers they are.
        form: ``"comfyui"`` or ``"kohya"``.
        component: What a pipeline calls the model.
        outputs: Outputs of a layer by its name, where it is not trained and is one of theirs
            together with others that are.
        dtype: Of the tensors.
    """
    known = published(model, form, component)
    tensors: dict[str, torch.Tensor] = {}
    for theirs, ours in {known.theirs(layer): None for layer in layers}:
        factors = _joined_factors([layers.get(each) for each in ours], ours, outputs)
        if form == "comfyui":
            factors = factors.scaled()
        stem = _their_stem(theirs, form, component)
        down, up = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
        tensors[f"{stem}.{down}.weight"] = factors.down.to(dtype)
        tensors[f"{stem}.{up}.weight"] = factors.up.to(dtype)
        if form == "kohya":
            tensors[f"{stem}.alpha"] = torch.tensor(factors.scale * factors.rank)
    return tensors


def write_lycoris(
    layers: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    model: torch.nn.Module,
    form: Layout,
    component: str,
    scales: Mapping[str, float],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The same for LoKr and LoHa, whose factors LyCORIS and ComfyUI call as peft does.

    LyCORIS scales a product of factors by ``alpha / rank``, and a LoKr of two whole factors not
    at all: there the scale goes into the first one.
    """
    known = published(model, form, component)
    written: dict[str, torch.Tensor] = {}
    for layer, tensors in layers.items():
        theirs, ours = known.theirs(layer)
        if len(ours) > 1:
            raise CheckpointMismatchError(
                f"is a part of {theirs} there, of which its product is none",
                key=layer,
                fix='train LoRA, or export with layout="peft"',
            )
        stem, rank, scale = (
            _their_stem(theirs, form, component),
            _lycoris_rank(tensors),
            scales[layer],
        )
        for kind, tensor in tensors.items():
            whole = rank is None and kind == "lokr_w1"
            written[f"{stem}.{kind}"] = (tensor * scale if whole else tensor).to(dtype)
        if rank is not None:
            written[f"{stem}.alpha"] = torch.tensor(scale * rank)
    return written


def _their_stem(theirs: str, form: Layout, component: str) -> str:
    if form == "comfyui":
        return f"{_COMFYUI}{theirs}"
    return f"{_ENCODERS.get(component, _KOHYA)}{theirs.replace('.', '_')}"


def baked_lokr(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the alphas of LoKr in its first factors, as ``load_lora_adapter`` wants it."""
    found = dict(state)
    for key in [each for each in state if each.endswith(".alpha")]:
        stem = key.removesuffix(".alpha")
        own = {k.removeprefix(f"{stem}."): t for k, t in state.items() if k.startswith(f"{stem}.")}
        first = next((kind for kind in ("lokr_w1", "lokr_w1_a") if kind in own), None)
        if first is None:
            continue
        rank, alpha = _lycoris_rank(own), float(found.pop(key))
        if rank is not None:
            found[f"{stem}.{first}"] = own[first] * (alpha / rank)
    return found


def _lycoris_rank(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Inner size of factors that are products; ``None``: both are whole."""
    for name in ("lokr_w2_b", "lokr_w1_b", "hada_w1_b"):
        if name in tensors:
            return int(tensors[name].shape[0])
    return None


def _joined_factors(
    parts: list[Factors | None], names: tuple[str, ...], outputs: Callable[[str], int]
) -> Factors:
    """Adapters of several layers with one input as that of all of them joined."""
    there = [part for part in parts if part is not None]
    if len(parts) == 1:
        return there[0]
    if len({part.scale for part in there}) > 1:
        parts = [None if part is None else part.scaled() for part in parts]
        there = [part for part in parts if part is not None]
    # Ranks are made alike and layers that are not trained get zeros, so that whoever splits the
    # factors finds the blocks again.
    rank = max(part.rank for part in there)
    down = there[0].down.new_zeros(rank * len(parts), there[0].down.shape[1])
    rows = [
        outputs(name) if part is None else int(part.up.shape[0])
        for part, name in zip(parts, names, strict=True)
    ]
    up = down.new_zeros(sum(rows), rank * len(parts))
    for index, part in enumerate(parts):
        if part is not None:
            first, top = index * rank, sum(rows[:index])
            down[first : first + part.rank] = part.down
            up[top : top + rows[index], first : first + part.rank] = part.up
    return Factors(down=down, up=up, scale=there[0].scale)


# -- Reading.


@attrs.frozen(kw_only=True)
class Read:
    """A file of others in diffusers' names."""

    tensors: dict[str, torch.Tensor]
    """By ``<component>.<layer>.lora_A.weight`` and the like, as diffusers' converters spell it."""
    alphas: dict[str, Any] | None
    """What diffusers hands on to ``load_lora_adapter``; ``None``: it is in the tensors."""
    reader: str
    """Who converted it."""

    def _factors(self, component: str) -> dict[str, Factors]:
        """What a converter gave, by the layers of a component."""
        utils = importlib.import_module("diffusers.utils.state_dict_utils")
        state = {
            key.removeprefix(f"{component}."): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(f"{component}.")
        }
        if component in _ENCODERS:
            state = utils.convert_state_dict_to_peft(utils.convert_state_dict_to_diffusers(state))
        elif not any("lora_A" in key for key in state):
            state = utils.convert_unet_state_dict_to_peft(state)
        alphas = self._alphas(component)
        found = {}
        for key, down in state.items():
            layer, kind = _layer_and_kind(key)
            if kind == "lora_A.weight":
                alpha = alphas.get(layer, down.shape[0])
                up = state[f"{layer}.lora_B.weight"]
                found[layer] = Factors(down=down, up=up, scale=alpha / down.shape[0])
        return found

    def _alphas(self, component: str) -> dict[str, float]:
        """Alphas by layer: diffusers names them by the first factor's older name."""
        encoder = component in _ENCODERS
        found = {}
        for key, alpha in (self.alphas or {}).items():
            if key.startswith(f"{component}."):
                name = key.removeprefix(f"{component}.").removesuffix(".alpha")
                name = re.split(r"[._]lora(?:_linear_layer)?\.", name.replace(".processor", ""))[0]
                head, _, tail = name.rpartition(".")
                if encoder and tail.startswith("to_"):
                    name = f"{head}.{tail.removeprefix('to_')}_proj"
                found[f"{name}.0" if tail == "to_out" and not encoder else name] = float(alpha)
        return found


def read_others(
    state: Mapping[str, torch.Tensor],
    *,
    model: torch.nn.Module,
    component: str,
    pipeline: Any = None,
) -> Read:
    """Convert a file by diffusers' own ``lora_state_dict``.

    Args:
        state: The file's tensors by their names in it.
        model: What it is for.
        component: What a pipeline calls the model.
        pipeline: The pipeline or its class; that of the model's class when not given.
    """
    kind, known = type(model).__name__, _publication(model, component)
    if known is None and pipeline is None:
        raise CheckpointMismatchError(
            f"is not in diffusers' names, and no other names of {kind} are known",
            key="adapters",
            value=next(iter(state), None),
            fix="give the pipeline= whose load_lora_weights reads it",
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
            f"{cls.__name__} does not read it ({type(error).__name__}: {error})",
            key="adapters",
            fix="look at which model and trainer it is from",
        ) from error
    tensors, alphas = found if isinstance(found, tuple) else (found, None)
    return Read(tensors=tensors, alphas=alphas or None, reader=f"{cls.__name__}.lora_state_dict")


def _unscaled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With alphas in the second factors: some of diffusers' converters do not know them."""
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
    """LoKr and LoHa in our names; ``None``: it is neither, or names layers that are joined."""
    kinds = {_layer_and_kind(key)[1].split("_")[0] for key in state}
    if not kinds & {"lokr", "hada"}:
        return None
    names = {**known._their_names(model, "."), **known._their_names(model, "_")}
    found = {}
    for key, tensor in state.items():
        layer, kind = _layer_and_kind(key)
        prefix = next((p for p in _LAYER_PREFIXES if layer.startswith(p)), "")
        name = names.get(layer.removeprefix(prefix))
        if name is None:
            return None
        found[f"{component}.{name}.{kind}"] = tensor
    return found


_LAYER_PREFIXES: Final = (_COMFYUI, _KOHYA, "lycoris_", *_ENCODERS.values(), "lora_te_")


def compare(
    read: Read, layers: Mapping[str, Factors], *, component: str, dtype: torch.dtype
) -> bool:
    """Check that what was read is what was trained; whether it is so bit for bit.

    Columns of zeros, which joined layers have, do nothing and are left out.
    """
    there = read._factors(component)
    exact = True
    for name, factors in layers.items():
        found = there.pop(name, None)
        if found is None:
            raise _differs(name, f"is not read back by {read.reader}")
        same = found._dense(dtype)._same_product(factors._dense(dtype), dtype)
        if same is None:
            raise _differs(name, f"is read back otherwise by {read.reader}")
        exact = exact and same
    for name, extra in there.items():
        if bool(extra.up.any()) and bool(extra.down.any()):
            raise _differs(name, f"is read back by {read.reader} and was not trained")
    return exact


def _differs(layer: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        reason, key=layer, fix='export with layout="diffusers", which every tool can convert'
    )
