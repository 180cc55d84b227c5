r"""Convert an exported LoRA or LoKr file to the layer names of ComfyUI or kohya's trainers.

    python examples/recipes/convert_lora.py runs/flux --base FLUX --to comfyui \
        --output flux-for-comfyui.safetensors

ComfyUI and kohya's trainers use the layer names of a model's original release, in which one layer
may combine several projections of diffusers' model. The factors of combined projections are written
as blocks of one matrix, with zeros for projections without adapters. The file is read back through
diffusers' converters before it is written. A ComfyUI file has no alpha, so the scale is multiplied
into the second factor; if the scale is not a power of two, this rounds.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file

from zerotune._util.text import json_of
from zerotune.backend.adapters import (
    COMFYUI_PREFIX,
    ENCODER_PREFIXES,
    KOHYA_PREFIX,
    Form,
    Published,
    Read,
    adapter_settings,
    find_adapters,
    layer_and_kind,
    lycoris_rank,
    publication_of,
    read_others,
)
from zerotune.backend.checks import checked_dtype
from zerotune.diffusion.models.pipeline import component_class
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    InvalidValueError,
)

_CLOSE_STEPS: Final = 4
"""Tolerance, in units of machine epsilon, for scales that a reader multiplies into factors."""


def main(arguments: Sequence[str] | None = None) -> bool:
    options = parse(arguments)
    with safe_open(find_adapters(options.file), framework="pt") as opened:
        state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata() or {}
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
    read = read_others(renamed, model=model, component=component)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert a LoRA file for other programs.")
    parser.add_argument("file", type=Path, help="LoRA file, or the folder of an export")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base pipeline")
    parser.add_argument("--to", choices=["comfyui", "kohya"], required=True, help="format")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--dtype", default="fp32", help="dtype of the tensors")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
