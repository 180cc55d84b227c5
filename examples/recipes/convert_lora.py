r"""Convert a LoRA or LoKr file to the layer names of ComfyUI or kohya's trainers, or back.

    python examples/recipes/convert_lora.py runs/flux --base FLUX --to comfyui \
        --output flux-for-comfyui.safetensors
    python examples/recipes/convert_lora.py theirs.safetensors --base FLUX --to diffusers \
        --output pytorch_lora_weights.safetensors

ComfyUI and kohya's trainers use the layer names of a model's original release, in which one layer
may combine several projections of diffusers' model. The factors of combined projections are written
as blocks of one matrix, with zeros for projections without adapters. Files in these names are read
back through diffusers' converters before they are written. A ComfyUI file has no alpha, so the
scale is multiplied into the second factor; if the scale is not a power of two, this rounds.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file

from zerotune._util.text import json_of
from zerotune.backend.adapters import Read, adapter_settings, find_adapters, read_others
from zerotune.backend.checks import checked_dtype
from zerotune.diffusion.models.pipeline import component_class
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    InvalidValueError,
)

Form = Literal["comfyui", "kohya"]
"""Format of files with the layer names of a model's original release."""

COMFYUI_PREFIX: Final = "diffusion_model."
KOHYA_PREFIX: Final = "lora_unet_"
ENCODER_PREFIXES: Final = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
_LAYER_PREFIXES: Final = (
    COMFYUI_PREFIX,
    KOHYA_PREFIX,
    "lycoris_",
    *ENCODER_PREFIXES.values(),
    "lora_te_",
)
_TENSOR: Final = re.compile(r"\.(?:lora_|lokr_|hada_|alpha$|dora_scale$|diff)")
"""The suffix after a layer's name in a key."""

_CLOSE_STEPS: Final = 4
"""Tolerance, in units of machine epsilon, for scales that a reader multiplies into factors."""


def main(arguments: Sequence[str] | None = None) -> bool:
    options = parse(arguments)
    with safe_open(find_adapters(options.file), framework="pt") as opened:
        state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata() or {}
    if options.to == "diffusers":
        model = model_of(options.base, options.component)
        save_file(for_diffusers(state, model, options.component), options.output)
        return True
    tensors, exact = {}, True
    for component in sorted({key.split(".")[0] for key in state}):
        own = {
            key.removeprefix(f"{component}."): tensor.float()
            for key, tensor in state.items()
            if key.startswith(f"{component}.")
        }
        settings = adapter_settings(metadata, component) or {}
        model = model_of(options.base, component)
        dtype = checked_dtype(options.dtype)
        renamed, same = converted(own, settings, model, component, form=options.to, dtype=dtype)
        tensors |= renamed
        exact = exact and same
    save_file(tensors, options.output, metadata=_header(settings) if options.to == "kohya" else {})
    if not exact:
        print("scales that are not powers of two were multiplied into the factors and rounded")
    return exact


def model_of(base: Path, component: str) -> torch.nn.Module:
    """Return a pipeline's model without weights."""
    kind = component_class(*json_of((base / "model_index.json").read_text())[component])
    with torch.device("meta"):
        if hasattr(kind, "load_config"):
            made: torch.nn.Module = kind.from_config(kind.load_config(base, subfolder=component))
            return made
        config = kind.config_class.from_pretrained(base, subfolder=component)
        return kind(config)  # type: ignore[no-any-return]


def converted(
    state: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    model: Any,
    component: str,
    *,
    form: Form,
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return a component's tensors in another format, and whether diffusers reads the same bits."""
    with torch.device("meta"):
        model.add_adapter(peft.PeftConfig.from_peft_type(**settings), adapter_name="default")
    scales = {
        name: float(layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        layer, kind = layer_and_kind(key)
        layers.setdefault(layer, {})[kind] = tensor
    # transformers 5 dropped a level of CLIP, which files keep.
    scale_of = {name: scales[name if name in scales else name.partition(".")[2]] for name in layers}
    if settings.get("peft_type") == "LOKR":
        return write_lycoris(
            layers, model=model, form=form, component=component, scales=scale_of, dtype=dtype
        ), True
    for layer, tensors in layers.items():
        if extra := sorted(tensors.keys() - {"lora_A.weight", "lora_B.weight"}):
            raise CheckpointMismatchError(
                f"has {', '.join(extra)}, which the format does not support", key=layer
            )
    factors = {
        name: Factors(
            down=tensors["lora_A.weight"], up=tensors["lora_B.weight"], scale=scale_of[name]
        )
        for name, tensors in layers.items()
    }
    renamed = write_lora(
        factors,
        model=model,
        form=form,
        component=component,
        outputs=lambda layer: int(model.get_submodule(layer).out_features),
        dtype=dtype,
    )
    read = read_published(renamed, model=model, component=component)
    return renamed, compare(read, factors, component=component, dtype=dtype)


def _header(settings: Mapping[str, Any]) -> dict[str, str]:
    alpha = settings.get("lora_alpha", settings.get("alpha"))
    return {
        "ss_network_module": "networks.lora" if "lora_alpha" in settings else "lycoris.kohya",
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(alpha),
    }


@attrs.frozen(kw_only=True)
class Factors:
    """A layer's LoRA factors: the LoRA adds ``scale * up @ down`` to the layer's weight."""

    down: torch.Tensor
    """(rank, inputs, …)."""
    up: torch.Tensor
    """(outputs, rank, …)."""
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Rank of the LoRA."""
        return int(self.down.shape[0])

    def scaled(self) -> Factors:
        """Return the factors with the scale multiplied into ``up``."""
        return attrs.evolve(self, up=self.up * self.scale, scale=1.0)

    def _same_product(self, trained: Factors, dtype: torch.dtype) -> bool | None:
        """Whether two LoRA products are equal bit for bit; ``None`` if they are not even close.

        A reader may move a part of the scale from one factor to the other.
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
        """Both factors rounded to the file's dtype, without ranks that have no effect."""
        down, up = self.down.to(dtype).float(), self.up.to(dtype).float()
        used = up.transpose(0, 1).flatten(1).any(dim=1)
        return attrs.evolve(self, down=down[used], up=up[:, used])


def published(model: torch.nn.Module, form: Form, component: str) -> Published:
    """Return a model's layer names in a format; raise an error if diffusers cannot read it.

    Args:
        model: The model.
        form: Format of the file.
        component: Name of the model in its pipeline, such as ``"transformer"``.
    """
    kind, known = type(model).__name__, publication_of(model, component)
    if known is not None and form in known.layouts:
        return known
    others = [] if known is None else [repr(each) for each in known.layouts]
    raise InvalidValueError(
        f"diffusers cannot read {kind} from this format, so the file could not be verified",
        key="--to",
        value=form,
        fix=f"use one of {', '.join(others)}" if others else None,
    )


def write_lora(
    layers: Mapping[str, Factors],
    *,
    model: torch.nn.Module,
    form: Form,
    component: str,
    outputs: Callable[[str], int],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA file in ComfyUI's or kohya's format.

    kohya's format stores the factors unchanged, with an ``alpha`` in fp32. ComfyUI's format has no
    field for the scale, so the scale is multiplied into the second factor before the cast to
    ``dtype``.

    Args:
        layers: Trained factors in fp32, by the layer's name.
        model: The model that contains the layers.
        form: Format, ``"comfyui"`` or ``"kohya"``.
        component: Name of the model in its pipeline, such as ``"transformer"``.
        outputs: Function that takes a layer's name and returns the layer's number of outputs. The
            function is called for untrained layers that the format combines with trained ones.
        dtype: Dtype of the file's tensors.
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
    form: Form,
    component: str,
    scales: Mapping[str, float],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoKr or LoHa file in ComfyUI's or LyCORIS' format.

    LyCORIS scales a factorised product by ``alpha / rank``. For a LoKr of two unfactorised
    matrices, the format has no field for the scale, so the scale is multiplied into the first
    matrix.

    Args:
        layers: Trained tensors in fp32, by layer name and then by peft's name for the factor.
        model: The model that contains the layers.
        form: Format, ``"comfyui"`` or ``"kohya"``.
        component: Name of the model in its pipeline, such as ``"transformer"``.
        scales: Scale of each layer, by the layer's name.
        dtype: Dtype of the file's tensors.
    """
    known = published(model, form, component)
    written: dict[str, torch.Tensor] = {}
    for layer, tensors in layers.items():
        theirs, ours = known.theirs(layer)
        if len(ours) > 1:
            raise CheckpointMismatchError(
                f"this format joins the layer with others into {theirs}, but LoKr and LoHa cannot "
                "represent joined layers",
                key=layer,
                fix='train LoRA, or export with layout="peft"',
            )
        stem, rank, scale = (
            _their_stem(theirs, form, component),
            lycoris_rank(tensors),
            scales[layer],
        )
        for kind, tensor in tensors.items():
            whole = rank is None and kind == "lokr_w1"
            written[f"{stem}.{kind}"] = (tensor * scale if whole else tensor).to(dtype)
        if rank is not None:
            written[f"{stem}.alpha"] = torch.tensor(scale * rank)
    return written


def _their_stem(theirs: str, form: Form, component: str) -> str:
    if form == "comfyui":
        return f"{COMFYUI_PREFIX}{theirs}"
    return f"{ENCODER_PREFIXES.get(component, KOHYA_PREFIX)}{theirs.replace('.', '_')}"


def _joined_factors(
    parts: list[Factors | None], names: tuple[str, ...], outputs: Callable[[str], int]
) -> Factors:
    """Join the LoRA factors of several layers with the same input into those of one layer."""
    there = [part for part in parts if part is not None]
    if len(parts) == 1:
        return there[0]
    if len({part.scale for part in there}) > 1:
        parts = [None if part is None else part.scaled() for part in parts]
        there = [part for part in parts if part is not None]
    # All layers get the same rank, and layers that are not trained get zeros, so that a reader can
    # split the factors into layers again.
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


def factors_of(read: Read, component: str) -> dict[str, Factors]:
    """LoRA factors by layer, for one component."""
    utils = importlib.import_module("diffusers.utils.state_dict_utils")
    state = {
        key.removeprefix(f"{component}."): tensor
        for key, tensor in read.tensors.items()
        if key.startswith(f"{component}.")
    }
    if component in ENCODER_PREFIXES:
        state = utils.convert_state_dict_to_peft(utils.convert_state_dict_to_diffusers(state))
    elif not any("lora_A" in key for key in state):
        state = utils.convert_unet_state_dict_to_peft(state)
    alphas = _alphas_of(read, component)
    found = {}
    for key, down in state.items():
        layer, kind = layer_and_kind(key)
        if kind == "lora_A.weight":
            alpha = alphas.get(layer, down.shape[0])
            up = state[f"{layer}.lora_B.weight"]
            found[layer] = Factors(down=down, up=up, scale=alpha / down.shape[0])
    return found


def _alphas_of(read: Read, component: str) -> dict[str, float]:
    """Alphas by layer; their keys contain diffusers' older names."""
    encoder = component in ENCODER_PREFIXES
    found = {}
    for key, alpha in (read.alphas or {}).items():
        if key.startswith(f"{component}."):
            name = key.removeprefix(f"{component}.").removesuffix(".alpha")
            name = re.split(r"[._]lora(?:_linear_layer)?\.", name.replace(".processor", ""))[0]
            head, _, tail = name.rpartition(".")
            if encoder and tail.startswith("to_"):
                name = f"{head}.{tail.removeprefix('to_')}_proj"
            found[f"{name}.0" if tail == "to_out" and not encoder else name] = float(alpha)
    return found


def compare(
    read: Read, layers: Mapping[str, Factors], *, component: str, dtype: torch.dtype
) -> bool:
    """Check that a file contains the trained factors; return whether they match bit for bit.

    Zero columns are ignored, because layers that combine several projections contain them.

    Args:
        read: The file as diffusers reads it.
        layers: Trained factors in fp32, by the layer's name.
        component: Name of the model in its pipeline, such as ``"transformer"``.
        dtype: Dtype of the file's tensors.
    """
    there = factors_of(read, component)
    exact = True
    for name, factors in layers.items():
        found = there.pop(name, None)
        if found is None:
            raise _differs(name, f"{read.reader} does not find this layer in the written file")
        same = found._dense(dtype)._same_product(factors._dense(dtype), dtype)
        if same is None:
            raise _differs(name, f"{read.reader} reads values that differ from the written ones")
        exact = exact and same
    for name, extra in there.items():
        if bool(extra.up.any()) and bool(extra.down.any()):
            raise _differs(name, f"{read.reader} finds this layer, although it was not trained")
    return exact


def _differs(layer: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        reason,
        key=layer,
        fix='export with layout="diffusers", which uses the diffusers layer names',
    )


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


def read_published(
    state: Mapping[str, torch.Tensor], *, model: torch.nn.Module, component: str
) -> Read:
    """Convert a file in ComfyUI's or kohya's names to diffusers' names.

    Args:
        state: The file's tensors, by their names in the file.
        model: The model that the adapters are for.
        component: Name of the model in its pipeline, such as ``"transformer"``.
    """
    known = publication_of(model, component)
    plain = None if known is None else _plain_lycoris(state, known, model, component)
    if plain is not None:
        return Read(tensors=plain, alphas=None, reader="the layers' names")
    if known is not None and known.reader is not None:
        state = known.respelled(state, known.reader) or state
    return read_others(state, model=model)


def for_diffusers(
    state: Mapping[str, torch.Tensor], model: torch.nn.Module, component: str
) -> dict[str, torch.Tensor]:
    """Return a file's tensors in diffusers' names, with the scales multiplied into the factors."""
    read = read_published(state, model=model, component=component)
    if any(".hada_" in key for key in read.tensors):
        raise CheckpointMismatchError("is LoHa, which diffusers' files cannot contain", key="file")
    if any(".lokr_" in key for key in read.tensors):
        return baked_lokr(read.tensors)
    found = {}
    for layer, factors in factors_of(read, component).items():
        found[f"{component}.{layer}.lora_A.weight"] = factors.down.contiguous()
        found[f"{component}.{layer}.lora_B.weight"] = factors.scaled().up.contiguous()
    return found


def _plain_lycoris(
    state: Mapping[str, torch.Tensor], known: Published, model: torch.nn.Module, component: str
) -> dict[str, torch.Tensor] | None:
    """LoKr or LoHa tensors in diffusers' names; ``None`` for others, or if joined."""
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert a LoRA file for other programs.")
    parser.add_argument("file", type=Path, help="LoRA file, or the folder of an export")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base pipeline")
    parser.add_argument(
        "--to", choices=["comfyui", "kohya", "diffusers"], required=True, help="format"
    )
    parser.add_argument("--component", default="transformer", help="with --to diffusers: model")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--dtype", default="fp32", help="dtype of the tensors")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
