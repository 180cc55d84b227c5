"""Write a pipeline folder as a single file in the layout of the model's original release.

    python examples/recipes/one_file.py runs/sdxl sdxl.safetensors

ComfyUI and diffusers' from_single_file read this layout. The file contains the U-Net, the VAE and
the text encoders of Stable Diffusion 1.5, 2.1 and SDXL; the transformer and the VAE of SD3; and the
transformer of FLUX.1, Kontext, Chroma, Qwen-Image, Z-Image and HiDream.

diffusers converts from this layout to its own, but not back. Its converter therefore runs on small
tensors of row numbers instead of weights, which shows where each row lies in the file. The
converters also verify the file. diffusers has the names only in scripts outside its package:
https://github.com/huggingface/diffusers/blob/main/scripts/convert_diffusers_to_original_sdxl.py
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import diffusers
import torch
from safetensors.torch import load_file, save_file

from zerotune._util.text import json_of
from zerotune.backend.single_file import INDEX, SingleFile
from zerotune.backend.stored import weight_files
from zerotune.diffusion.models.pipeline import component_class
from zerotune.errors import CheckpointCorruptError, CheckpointMismatchError, InvalidValueError
from zerotune.platform.detect import first_line

Shapes = Mapping[str, tuple[int, ...]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    index = json_of((options.folder / INDEX).read_text())
    originals = ORIGINALS.get(index["_class_name"])
    if originals is None:
        raise CheckpointMismatchError(
            f"the single-file layout of {index['_class_name']} is unknown",
            key="folder",
            value=str(options.folder),
            fix=f"known pipelines are {', '.join(ORIGINALS)}",
        )
    tensors: dict[str, torch.Tensor] = {}
    parts = [part for part in originals if (options.folder / part).is_dir()]
    for part in parts:
        place = options.folder / part
        config = json_of((place / "config.json").read_text())
        state = {name: t for file in weight_files(place) for name, t in load_file(file).items()}
        keys = originals[part].keys(list(state), config)
        if part in ("unet", "transformer"):
            tensors |= placed(component_class(*index[part]), config, state, keys)
        else:
            tensors |= {
                key: as_published(key, [state[name] for name in of]) for key, of in keys.items()
            }
    save_file(tensors, options.output)
    compare(options.output, options.folder, pipeline=index["_class_name"], parts=parts)


def placed(
    kind: type[Any],
    config: Config,
    state: Mapping[str, torch.Tensor],
    keys: Mapping[str, tuple[str, ...]],
) -> dict[str, torch.Tensor]:
    """Return a model's rows at their positions in the file's tensors."""
    file: dict[str, torch.Tensor] = {}
    for key, names in keys.items():
        rows = sum(math.prod(state[name].shape[:1]) for name in names)
        file[key] = state[names[0]].new_empty(rows, *state[names[0]].shape[1:])
    model = {name: tuple(tensor.shape) for name, tensor in state.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in file.items()}
    for name, runs in place_rows(kind, config, model=model, file=shapes).items():
        rows = state[name].reshape(math.prod(state[name].shape[:1]), -1)
        for run in runs:
            there = file[run.key].view(math.prod(shapes[run.key][:1]), -1)
            there[run.there : run.there + run.count] = rows[run.here : run.here + run.count]
    return file


# -- Positions of a model's rows in a file.


@attrs.frozen
class Run:
    """Rows of a model's tensor that are consecutive in a tensor of the file."""

    key: str
    """Name of the file's tensor."""
    there: int
    """Index of the first of these rows in the file's tensor."""
    here: int
    """Index of the first of these rows in the model's tensor."""
    count: int


Places = Mapping[str, tuple[Run, ...]]
"""Where the file stores the rows of each model tensor, by the tensor's name in the model."""


def place_rows(
    kind: type[Any], config: Mapping[str, Any], *, model: Shapes, file: Shapes
) -> Places:
    """Find where a file stores a model's tensors, using diffusers' converter.

    Args:
        kind: The model's class.
        config: The model's configuration.
        model: Shapes of the model's tensors, by name.
        file: Shapes of the file's tensors, by name.

    Raises:
        InvalidValueError: diffusers has no converter for this class.
        CheckpointMismatchError: The converted file does not match the model.
    """
    starts: dict[str, int] = {}
    position = 0
    for key, shape in file.items():
        starts[key] = position
        position += _rows(shape) + 1  # A gap, so that no run leads from one tensor to the next.
    given = {
        key: torch.arange(start, start + _rows(file[key])).view(
            (*file[key][:1], *(1 for _ in file[key][1:]))
        )
        for key, start in starts.items()
    }
    converted = _converted(kind, dict(config), given, names=model)
    begins, keys = torch.tensor([*starts.values()]), list(starts)
    places = {}
    for name, shape in model.items():
        numbers = converted.get(name)
        if numbers is None or numbers.numel() != _rows(shape):
            raise _other_model(
                name,
                "the tensor is not in the file"
                if numbers is None
                else f"the number of rows does not match the shape {list(shape)}",
            )
        places[name] = tuple(_runs(numbers.flatten(), begins, keys))
        for run in places[name]:
            if math.prod(file[run.key][1:]) != math.prod(shape[1:]):
                raise _other_model(
                    name, f"the shape in the file is {list(file[run.key])}, not {list(shape)}"
                )
    return places


def _runs(numbers: torch.Tensor, begins: torch.Tensor, keys: list[str]) -> Iterator[Run]:
    edges = (torch.diff(numbers) != 1).nonzero().flatten() + 1
    here = 0
    for piece in torch.tensor_split(numbers, edges):
        which = int(torch.searchsorted(begins, piece[0], right=True)) - 1
        yield Run(keys[which], int(piece[0] - begins[which]), here, piece.numel())
        here += piece.numel()


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _converted(
    kind: type[Any], config: dict[str, Any], given: dict[str, torch.Tensor], *, names: Shapes
) -> Mapping[str, torch.Tensor]:
    """Tensors of a file as converted by diffusers, by their names in the model."""
    from diffusers.loaders import single_file_model as theirs

    known = theirs._get_single_file_loadable_mapping_class(kind)
    if known is None:
        raise InvalidValueError(
            f"diffusers cannot convert a single file to {kind.__name__}",
            key="single file",
            value=kind.__name__,
            fix="keep the pipeline folder",
        )
    if set(names) == set(given):
        return given
    convert = theirs.SINGLE_FILE_LOADABLE_CLASSES[known]["checkpoint_mapping_fn"]
    try:
        converted: Mapping[str, torch.Tensor] = convert(checkpoint=given, config=config)
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise _other_model(
            kind.__name__, f"the model cannot be read from this file ({first_line(error)})"
        ) from error
    return converted


def _other_model(name: str, reason: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{reason}, according to diffusers' converter",
        "pass the configuration of the model in this file; diffusers cannot convert models of "
        "unpublished sizes",
        name,
    )


# -- The file as diffusers reads it, and the names in it.


def compare(file: Path, folder: Path, *, pipeline: str, parts: Sequence[str]) -> None:
    """Compare all parts as diffusers reads them from the file with those of the folder."""
    single, kind = SingleFile.open(file, config=folder), getattr(diffusers, pipeline)
    options = {"local_files_only": True, **single.without(parts)}
    read, meant = single.pipeline(kind, options), kind.from_pretrained(folder, **options)
    for name in parts:
        theirs = getattr(read, name).state_dict()
        for key, tensor in getattr(meant, name).state_dict().items():
            other = theirs.get(key)
            if other is None or other.is_meta or not torch.equal(other.float(), tensor.float()):
                raise CheckpointCorruptError(
                    f"diffusers reads a different tensor from the file ({key})",
                    key=name,
                    value=str(folder / name),
                )


Config = Mapping[str, Any]

_ORIGINAL_TENSOR: Final = re.compile(r"(.+)(\.(?:weight|bias))")


@attrs.frozen
class Original:
    """Names that a single file uses for the tensors of a pipeline's component."""

    prefix: str
    """Prefix of the component's tensor names in the file."""
    names: Callable[[list[str], Config], dict[str, str]]
    """Function that maps tensor names of the component to names in the file, without the prefix."""

    def keys(self, names: list[str], config: Config) -> dict[str, tuple[str, ...]]:
        """Map each tensor of the file to the component's tensors that it concatenates, in order.

        Args:
            names: Names of the component's tensors.
            config: Configuration of the component.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name, theirs in sorted(self.names(names, config).items(), key=_projections_in_order):
            key = self.prefix + theirs
            found[key] = (*found.get(key, ()), name)
        return found


def _projections_in_order(item: tuple[str, str]) -> str:
    return re.sub(r"([qkv])_proj", lambda found: str("qkv".index(found[1])), item[0])


def as_published(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join tensors of a frozen component into one tensor of the file.

    Args:
        key: Name of the file's tensor.
        tensors: The component's tensors, in order.
    """
    if _VAE_PROJECTION.search(key) and tensors[0].ndim == _MATRIX:
        return tensors[0][:, :, None, None]
    if key.endswith(".text_projection"):
        return tensors[0].T.contiguous()
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


_MATRIX: Final = 2
_VAE_PROJECTION: Final = re.compile(r"\.attn_1\.(q|k|v|proj_out)\.weight$")
"""Layers that are 1 x 1 convolutions in the original VAE, but linear layers in diffusers."""


_RESNET: Final = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK: Final = re.compile(
    r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.(resnets|attentions|downsamplers|upsamplers)"
    r"\.(\d+)\.(.+)"
)


def _unet_names(names: list[str], config: Config) -> dict[str, str]:
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

    tables: Mapping[str, Mapping[str, str]] = DIFFUSERS_TO_LDM_MAPPING["unet"]
    top = {ours: theirs for table in tables.values() for ours, theirs in table.items()}
    if not isinstance(config["layers_per_block"], int):
        raise InvalidValueError(
            "the single-file format has no names for U-Net blocks with different numbers of layers",
            key="layers_per_block",
            value=config["layers_per_block"],
            fix="export the model to a folder",
        )
    return {name: top.get(name) or _unet_block(name, config) for name in names}


def _unet_block(name: str, config: Config) -> str:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    side, block, _, kind, layer, rest = match.groups()
    per, number, index = config["layers_per_block"] + 1, int(block or 0), int(layer)
    inner = rest
    if kind == "resnets":
        first, _, last = rest.partition(".")
        inner = f"{_RESNET.get(first, first)}.{last}"
    column = int(kind == "attentions")
    if side == "down":
        if kind == "downsamplers":
            return f"input_blocks.{(number + 1) * per}.0.op.{rest.removeprefix('conv.')}"
        return f"input_blocks.{1 + number * per + index}.{column}.{inner}"
    if side == "up":
        if kind == "upsamplers":
            column = 1 + int("Attn" in config["up_block_types"][number])
            inner = rest
            index = per - 1
        return f"output_blocks.{number * per + index}.{column}.{inner}"
    return f"middle_block.{2 * index + column}.{inner}"


_VAE_ATTENTION: Final = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def _vae_names(names: list[str], config: Config) -> dict[str, str]:
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

    top: Mapping[str, str] = DIFFUSERS_TO_LDM_MAPPING["vae"]
    last = len(config["up_block_types"]) - 1
    return {name: top.get(name) or _vae_block(name, last) for name in names}


def _vae_block(name: str, last: int) -> str:
    half, _, inside = name.partition(".")
    match = _BLOCK.fullmatch(inside)
    if match is None:
        return name
    side, block, _, kind, layer, rest = match.groups()
    if kind == "attentions":
        ours, tensor = rest.rsplit(".", 1)
        return f"{half}.mid.attn_1.{_VAE_ATTENTION.get(ours, ours)}.{tensor}"
    rest = rest.replace("conv_shortcut", "nin_shortcut")
    if side is None:
        return f"{half}.mid.block_{int(layer) + 1}.{rest}"
    number = last - int(block) if side == "up" else int(block)
    if kind == "resnets":
        return f"{half}.{side}.{number}.block.{layer}.{rest}"
    return f"{half}.{side}.{number}.{kind.removesuffix('rs')}.{rest}"


def _clip_names(names: list[str], config: Config) -> dict[str, str]:  # noqa: ARG001
    # transformers 5.6 removed the prefix text_model.
    return {name: name if name.startswith("text_") else f"text_model.{name}" for name in names}


_OPEN_CLIP: Final = (
    (r"(text_model\.)?encoder\.layers\.(\d+)\.", r"transformer.resblocks.\2."),
    (r"layer_norm(\d)", r"ln_\1"),
    (r"self_attn\.[qkv]_proj\.", "attn.in_proj_"),
    (r"self_attn\.", "attn."),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"(text_model\.)?final_layer_norm", "ln_final"),
    (r"(text_model\.)?embeddings\.token_embedding", "token_embedding"),
    (r"(text_model\.)?embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"text_projection\.weight", "text_projection"),
)


def _open_clip_names(names: list[str], config: Config) -> dict[str, str]:  # noqa: ARG001
    found = {}
    for name in names:
        if name.endswith("position_ids"):  # Numbers from 0, which OpenCLIP does not store.
            continue
        theirs = name
        for ours, replaced in _OPEN_CLIP:
            theirs = re.sub(ours, replaced, theirs)
        found[name] = theirs
    return found


def _first_names(names: list[str], config: Config) -> dict[str, str]:
    """Names for Stable Diffusion 1 (OpenAI's CLIP) or Stable Diffusion 2 (OpenCLIP)."""
    openai = config.get("hidden_act", "quick_gelu") == "quick_gelu"
    found = (_clip_names if openai else _open_clip_names)(names, config)
    prefix = "transformer" if openai else "model"
    return {name: f"{prefix}.{theirs}" for name, theirs in found.items()}


Layers = Mapping[str, tuple[str, ...]]


def _stack(there: str, ours: str, *pairs: tuple[str, tuple[str, ...]]) -> Layers:
    """Table entries for the blocks of a stack."""
    return {
        f"{there}.#.{theirs}": tuple(f"{ours}.#.{name}" for name in names)
        for theirs, names in pairs
    }


_ORIGINAL_FLUX: Final[Layers] = {
    **{
        f"{theirs}.{end}_layer": (f"time_text_embed.{ours}_embedder.linear_{number}",)
        for theirs, ours in (
            ("time_in", "timestep"),
            ("vector_in", "text"),
            ("guidance_in", "guidance"),
        )
        for end, number in (("in", 1), ("out", 2))
    },
    "txt_in": ("context_embedder",),
    "img_in": ("x_embedder",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    **_stack(
        "double_blocks",
        "transformer_blocks",
        ("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")),
        ("img_attn.proj", ("attn.to_out.0",)),
        ("img_mlp.0", ("ff.net.0.proj",)),
        ("img_mlp.2", ("ff.net.2",)),
        ("img_mod.lin", ("norm1.linear",)),
        ("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
        ("txt_attn.proj", ("attn.to_add_out",)),
        ("txt_mlp.0", ("ff_context.net.0.proj",)),
        ("txt_mlp.2", ("ff_context.net.2",)),
        ("txt_mod.lin", ("norm1_context.linear",)),
        ("img_attn.norm.query_norm.scale", ("attn.norm_q.weight",)),
        ("img_attn.norm.key_norm.scale", ("attn.norm_k.weight",)),
        ("txt_attn.norm.query_norm.scale", ("attn.norm_added_q.weight",)),
        ("txt_attn.norm.key_norm.scale", ("attn.norm_added_k.weight",)),
    ),
    **_stack(
        "single_blocks",
        "single_transformer_blocks",
        ("linear1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        ("linear2", ("proj_out",)),
        ("modulation.lin", ("norm.linear",)),
        ("norm.query_norm.scale", ("attn.norm_q.weight",)),
        ("norm.key_norm.scale", ("attn.norm_k.weight",)),
    ),
}
_CHROMA: Final[Layers] = {
    **_ORIGINAL_FLUX,
    **_stack(
        "distilled_guidance_layer.layers",
        "distilled_guidance_layer.layers",
        ("in_layer", ("linear_1",)),
        ("out_layer", ("linear_2",)),
    ),
    "distilled_guidance_layer.norms.#.scale": ("distilled_guidance_layer.norms.#.weight",),
}
_SD3: Final[Layers] = {
    "pos_embed": ("pos_embed.pos_embed",),
    "x_embedder.proj": ("pos_embed.proj",),
    **{
        f"{theirs}.mlp.{place}": (f"time_text_embed.{ours}_embedder.linear_{number}",)
        for theirs, ours in (("t_embedder", "timestep"), ("y_embedder", "text"))
        for place, number in ((0, 1), (2, 2))
    },
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    **_stack(
        "joint_blocks",
        "transformer_blocks",
        ("x_block.attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")),
        ("x_block.attn.ln_q", ("attn.norm_q",)),
        ("x_block.attn.ln_k", ("attn.norm_k",)),
        ("x_block.attn.proj", ("attn.to_out.0",)),
        ("x_block.attn2.qkv", ("attn2.to_q", "attn2.to_k", "attn2.to_v")),
        ("x_block.attn2.ln_q", ("attn2.norm_q",)),
        ("x_block.attn2.ln_k", ("attn2.norm_k",)),
        ("x_block.attn2.proj", ("attn2.to_out.0",)),
        ("x_block.adaLN_modulation.1", ("norm1.linear",)),
        ("x_block.mlp.fc1", ("ff.net.0.proj",)),
        ("x_block.mlp.fc2", ("ff.net.2",)),
        (
            "context_block.attn.qkv",
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        ),
        ("context_block.attn.ln_q", ("attn.norm_added_q",)),
        ("context_block.attn.ln_k", ("attn.norm_added_k",)),
        ("context_block.attn.proj", ("attn.to_add_out",)),
        ("context_block.adaLN_modulation.1", ("norm1_context.linear",)),
        ("context_block.mlp.fc1", ("ff_context.net.0.proj",)),
        ("context_block.mlp.fc2", ("ff_context.net.2",)),
    ),
}
_Z_IMAGE: Final[Layers] = {
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    "x_embedder": ("all_x_embedder.2-1",),
    **{
        there: ours
        for stack in ("layers", "noise_refiner", "context_refiner")
        for there, ours in _stack(
            stack,
            stack,
            ("attention.qkv", ("attention.to_q", "attention.to_k", "attention.to_v")),
            ("attention.out", ("attention.to_out.0",)),
            ("attention.q_norm", ("attention.norm_q",)),
            ("attention.k_norm", ("attention.norm_k",)),
        ).items()
    },
}


def _by_layers(layers: Layers) -> Callable[[list[str], Config], dict[str, str]]:
    """Translate names with a table of layers or tensors; names not in the table are unchanged."""
    theirs = {ours: name for name, every in layers.items() for ours in every}

    def names(found: list[str], config: Config) -> dict[str, str]:  # noqa: ARG001
        return {name: _in_table(name, theirs) for name in found}

    return names


def _in_table(name: str, theirs: Mapping[str, str]) -> str:
    block = re.search(r"(?<=\.)\d+(?=\.)", name)
    number = "" if block is None else block[0]
    pattern = name if block is None else f"{name[: block.start()]}#{name[block.end() :]}"
    if pattern in theirs:
        return theirs[pattern].replace("#", number, 1)
    match = _ORIGINAL_TENSOR.fullmatch(pattern)
    if match is not None and match[1] in theirs:
        return theirs[match[1]].replace("#", number, 1) + match[2]
    return name


_ORIGINAL_MODEL: Final = "model.diffusion_model."
_ORIGINAL_UNET: Final = {"unet": Original(_ORIGINAL_MODEL, _unet_names)}
_VAE: Final = {"vae": Original("first_stage_model.", _vae_names)}

ORIGINALS: Final[Mapping[str, Mapping[str, Original]]] = {
    "StableDiffusionPipeline": {
        **_ORIGINAL_UNET,
        **_VAE,
        "text_encoder": Original("cond_stage_model.", _first_names),
    },
    "StableDiffusionXLPipeline": {
        **_ORIGINAL_UNET,
        **_VAE,
        "text_encoder": Original("conditioner.embedders.0.transformer.", _clip_names),
        "text_encoder_2": Original("conditioner.embedders.1.model.", _open_clip_names),
    },
    "StableDiffusion3Pipeline": {
        "transformer": Original(_ORIGINAL_MODEL, _by_layers(_SD3)),
        **_VAE,
    },
    "FluxPipeline": {"transformer": Original("", _by_layers(_ORIGINAL_FLUX))},
    "FluxKontextPipeline": {"transformer": Original("", _by_layers(_ORIGINAL_FLUX))},
    "ChromaPipeline": {"transformer": Original("", _by_layers(_CHROMA))},
    "ZImagePipeline": {"transformer": Original("", _by_layers(_Z_IMAGE))},
    "QwenImagePipeline": {"transformer": Original("", _by_layers({}))},
    "QwenImageEditPipeline": {"transformer": Original("", _by_layers({}))},
    "QwenImageEditPlusPipeline": {"transformer": Original("", _by_layers({}))},
    "HiDreamImagePipeline": {"transformer": Original("", _by_layers({}))},
}
"""Components that a single file contains, with their names in the file, by pipeline class.

The text encoders of SD3 and Flux are not listed, because they are published as separate files. In
addition, diffusers does not read CLIP's projection from a single-file SD3 model.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a pipeline folder as a single file.")
    parser.add_argument("folder", type=Path, help="folder of a diffusers pipeline")
    parser.add_argument("output", type=Path, help="file to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
