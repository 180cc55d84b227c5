"""Single-file models in the layout of their original release, which ComfyUI also reads.

diffusers converts from this layout to its own, but not back. To find out which row of the file
becomes which row of the model, zerotune runs diffusers' converter on small tensors of row numbers
instead of weights. The converted row numbers show where each row of each model tensor lies in the
file. zerotune uses these positions both to read and to write the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import json_of
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
            "load and export the model as a pipeline folder",
            "single file",
            kind.__name__,
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
                "set config= to the folder of a pipeline with the same model sizes",
                "source",
                str(self.path),
            )
        found: str = theirs.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]
        return found

    def check_plain(self) -> None:
        """Raise an error if the file uses one of ComfyUI's scaled weight formats."""
        for key in self.tensors:
            if _SCALED_FP8.search(key):
                raise InvalidValueError(
                    "the weights are stored with scales, which diffusers' converters ignore",
                    "use a file in bf16, fp16 or unscaled fp8",
                    str(self.path),
                    key,
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
