"""Single-file models in the layout of their original release, which ComfyUI also reads.

diffusers converts from this layout to its own, but not back. To find out which row of the file
becomes which row of the model, zerotune runs diffusers' converter on small tensors of row numbers
instead of weights. The converted row numbers show where each row of each model tensor lies in the
file. zerotune uses these positions both to read and to write the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import json_of
from zerotune.backend.adapters import PUBLISHED, numbered, with_number
from zerotune.backend.stored import StoredTensor, StoredWeight, read_header, stamp_of
from zerotune.errors import CheckpointMismatchError, InvalidValueError
from zerotune.platform.detect import first_line

Shapes = Mapping[str, tuple[int, ...]]

SUFFIX: Final = ".safetensors"
"""File name suffix of a single-file model."""
INDEX: Final = "model_index.json"
"""Name of the file that lists the components of a diffusers pipeline, in the pipeline's folder."""

_MODEL: Final = "model.diffusion_model."
_VAES: Final = ("first_stage_model.", "vae.")
_STALE: Final = "model_ema."
"""Prefix of an EMA, which does not match weights that are trained further."""
_SCALED_FP8: Final = re.compile(
    r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale|comfy_quant)$"
)
"""Names of tensors that belong to ComfyUI's own quantization formats."""


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
            fix="load and export the model as a pipeline folder",
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
        key=name,
        fix="pass the configuration of the model in this file; diffusers cannot convert models of "
        "unpublished sizes",
    )


# -- A file.


@attrs.frozen(kw_only=True)
class SingleFile:
    """A single-file checkpoint, and the diffusers pipeline folder with its configuration."""

    path: Path
    config: Path
    """Folder with ``model_index.json``, configurations, tokenizers, and weights of components that
    the file lacks."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of the file, by name."""
    stamp: tuple[int, int]

    @classmethod
    def open(cls, path: Path, *, config: Path) -> SingleFile:
        """Read the header of a file.

        Args:
            path: The safetensors file.
            config: Folder of the pipeline.
        """
        return cls(
            path=path, config=config, tensors=read_header(path)[0], stamp=stamp_of(path.stat())
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the file's tensors, by name."""
        return {key: tensor.shape for key, tensor in self.tensors.items()}

    @property
    def published(self) -> str:
        """Hub name of the pipeline that diffusers infers from the file's keys.

        Raises:
            InvalidValueError: diffusers does not recognise the keys.
        """
        from diffusers.loaders import single_file_utils as theirs

        shaped = {key: torch.empty(shape, device="meta") for key, shape in self.shapes.items()}
        kind = theirs.infer_diffusers_model_type(shaped)
        if kind == "v1" and theirs.CHECKPOINT_KEY_NAMES["v1"] not in shaped:
            raise InvalidValueError(
                "diffusers does not recognise this file's model by its keys",
                key="source",
                value=str(self.path),
                fix="set config= to the folder of a pipeline with the same model sizes",
            )
        found: str = theirs.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]
        return found

    def check_plain(self) -> None:
        """Raise an error if the file uses one of ComfyUI's scaled weight formats."""
        for key in self.tensors:
            if _SCALED_FP8.search(key):
                raise InvalidValueError(
                    "the weights are stored with scales, which diffusers' converters ignore",
                    key=str(self.path),
                    value=key,
                    fix="use a file in bf16, fp16 or unscaled fp8",
                )

    def is_stale(self, key: str) -> bool:
        """Return whether a tensor belongs to an EMA, which further training makes stale.

        Args:
            key: Name of the file's tensor.
        """
        return key.startswith(_STALE)

    def unused(self, places: Places) -> list[str]:
        """Return the names of the model's tensors in the file that the converter does not use.

        Args:
            places: Result of ``place_rows``.
        """
        read = {run.key for runs in places.values() for run in runs}
        whole = any(key.startswith(_MODEL) for key in self.tensors)
        return [
            key for key in self.tensors if key not in read and (key.startswith(_MODEL) or not whole)
        ]

    def weights(self, places: Places, model: Shapes) -> dict[str, StoredWeight]:
        """Return the positions of a model's weights in the file, so that they can be read later.

        Args:
            places: Result of ``place_rows``.
            model: Shapes of the model's tensors, by name.
        """
        found = {}
        for name, runs in places.items():
            pieces = []
            for run in runs:
                stored = self.tensors[run.key]
                width = math.prod(stored.shape[1:])
                pieces.append(
                    StoredTensor(
                        dtype=stored.dtype,
                        shape=(run.count * width,),
                        offset=stored.offset + run.there * width * stored.dtype.itemsize,
                    )
                )
            whole = attrs.evolve(pieces[0], shape=model[name])
            found[name] = StoredWeight(
                file=self.path, tensor=whole, stamp=self.stamp, pieces=tuple(pieces)
            )
        return found

    @property
    def index(self) -> dict[str, Any]:
        """Content of the folder's ``model_index.json``."""
        index: dict[str, Any] = json_of((self.config / INDEX).read_text())
        return index

    @property
    def components(self) -> dict[str, tuple[str, str]]:
        """Library and class of each of the pipeline's components, by name."""
        return {
            name: (entry[0], entry[1])
            for name, entry in self.index.items()
            if isinstance(entry, list)
            and len(entry) == 2
            and all(isinstance(e, str) for e in entry)
        }

    def without(self, parts: Iterable[str]) -> dict[str, Any]:
        """Return ``from_pretrained`` options that load only some components.

        Args:
            parts: Names of the components to load.
        """
        kept, index = set(parts), self.index
        left = {
            name for name, entry in index.items() if isinstance(entry, list) and name not in kept
        }
        quiet = {name: False for name in index if name == "requires_safety_checker"}
        return dict.fromkeys(sorted(left)) | quiet

    @property
    def parts(self) -> frozenset[str]:
        """Names of the pipeline's frozen components whose weights the file contains."""
        import transformers
        from diffusers.loaders import single_file_utils as theirs

        found = {"vae"} if any(key.startswith(_VAES) for key in self.tensors) else set()
        for name, (_, kind) in self.components.items():
            if name.startswith("text_encoder") and kind.startswith("CLIPTextModel"):
                made = getattr(transformers, kind)
                clip = theirs.is_clip_model_in_single_file(made, self.tensors)
                found |= {name} if clip else set()
            elif kind == "T5EncoderModel" and theirs.is_t5_in_single_file(self.tensors):
                found.add(name)
        return frozenset(found & self.components.keys())

    def pipeline(self, kind: type[Any], options: Mapping[str, Any]) -> Any:
        """Load a pipeline: some components from the file, and the remaining ones from the folder.

        Args:
            kind: The pipeline's class.
            options: Options of ``from_pretrained``; components that are ``None`` are not loaded.
        """
        there = self.parts - {name for name, value in options.items() if value is None}
        rest = kind.from_pretrained(self.config, **{**options, **dict.fromkeys(there)})
        if not there:
            return rest
        known = {name: part for name, part in rest.components.items() if name not in there}
        dtype = {name: value for name, value in options.items() if name.endswith("dtype")}
        return kind.from_single_file(
            str(self.path), config=str(self.config), local_files_only=True, **known, **dtype
        )

    def save_parts(self, folder: Path) -> None:
        """Write the file's frozen components to a pipeline's folder, in fp32.

        Args:
            folder: Folder of the pipeline.
        """
        import diffusers

        kind = getattr(diffusers, self.index["_class_name"])
        pipeline = self.pipeline(kind, self.without(self.parts))
        for name in self.parts:
            getattr(pipeline, name).save_pretrained(folder / name)


# -- Names of a diffusers pipeline's components in a single file.
#
# Only names: positions of rows follow from diffusers' converters (``place_rows``), which also
# verify each export. diffusers has these names in scripts that are not part of its package:
# https://github.com/huggingface/diffusers/blob/main/scripts/convert_diffusers_to_original_sdxl.py


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


# -- U-Nets and VAEs of Stable Diffusion.


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


# -- Text encoders.


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


# -- Transformers.


Layers = Mapping[str, tuple[str, ...]]


def _stack(there: str, ours: str, *pairs: tuple[str, tuple[str, ...]]) -> Layers:
    """Table entries for the blocks of a stack."""
    return {
        f"{there}.#.{theirs}": tuple(f"{ours}.#.{name}" for name in names)
        for theirs, names in pairs
    }


_ORIGINAL_FLUX: Final[Layers] = {
    **PUBLISHED["FluxTransformer2DModel"].layers,
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
        ("img_attn.norm.query_norm.scale", ("attn.norm_q.weight",)),
        ("img_attn.norm.key_norm.scale", ("attn.norm_k.weight",)),
        ("txt_attn.norm.query_norm.scale", ("attn.norm_added_q.weight",)),
        ("txt_attn.norm.key_norm.scale", ("attn.norm_added_k.weight",)),
    ),
    **_stack(
        "single_blocks",
        "single_transformer_blocks",
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
    pattern, number = numbered(name)
    if pattern in theirs:
        return with_number(theirs[pattern], number)
    match = _ORIGINAL_TENSOR.fullmatch(pattern)
    if match is not None and match[1] in theirs:
        return with_number(theirs[match[1]], number) + match[2]
    return name


# -- Pipelines.


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
