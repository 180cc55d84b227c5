"""A whole model in one file, in the layout of its first publication, which ComfyUI reads too.

diffusers has converters from that layout to its own and none back. Here its converter is run on
tensors whose rows are numbered, which take no memory: what comes out says where each row of each
tensor of the model lies in the file. Weights are read and written by that.
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
"""What the name of a single file ends with."""

_MODEL: Final = "model.diffusion_model."
_VAES: Final = ("first_stage_model.", "vae.")
_STALE: Final = "model_ema."
"""An average of the weights before they were trained on."""
_SCALED_FP8: Final = re.compile(
    r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale|comfy_quant)$"
)
"""What belongs to weights that are quantized in a way of ComfyUI's own."""


# -- Where the rows of a model's tensors lie.


@attrs.frozen
class Run:
    """Rows of a tensor of the model that lie one behind another in a tensor of the file."""

    key: str
    """The file's name of its tensor."""
    there: int
    """First row in that."""
    here: int
    """First row in the tensor of the model."""
    count: int


Places = Mapping[str, tuple[Run, ...]]
"""Where the tensors of a model lie, by their names in the model."""


def place_rows(
    kind: type[Any], config: Mapping[str, Any], *, model: Shapes, file: Shapes
) -> Places:
    """Ask diffusers' converter where the tensors of a model lie among those of a file.

    Args:
        kind: The model's class.
        config: The model's configuration.
        model: Shapes of the model's tensors.
        file: Shapes of the file's.

    Raises:
        InvalidValueError: diffusers has no converter for this class.
        CheckpointMismatchError: It makes something else of such a file than the model.
    """
    starts: dict[str, int] = {}
    position = 0
    for key, shape in file.items():
        starts[key] = position
        position += _rows(shape) + 1  # A gap, so that no run leads from one tensor to the next.
    given = {
        key: torch.arange(start, start + _rows(file[key])).view(_rows_alone(file[key]))
        for key, start in starts.items()
    }
    converted = _converted(kind, dict(config), given, names=model)
    begins, keys = torch.tensor([*starts.values()]), list(starts)
    places = {}
    for name, shape in model.items():
        numbers = converted.get(name)
        if numbers is None or numbers.numel() != _rows(shape):
            raise _other_model(
                name, "is not in it" if numbers is None else f"has other rows than {list(shape)}"
            )
        places[name] = tuple(_runs(numbers.flatten(), begins, keys))
        for run in places[name]:
            if math.prod(file[run.key][1:]) != math.prod(shape[1:]):
                raise _other_model(name, f"is {list(file[run.key])} there, not {list(shape)}")
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


def _rows_alone(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], *(1 for _ in shape[1:]))


def _converted(
    kind: type[Any], config: dict[str, Any], given: dict[str, torch.Tensor], *, names: Shapes
) -> Mapping[str, torch.Tensor]:
    """What diffusers makes of a file, by the names of the model."""
    from diffusers.loaders import single_file_model as theirs

    known = theirs._get_single_file_loadable_mapping_class(kind)
    if known is None:
        raise InvalidValueError(
            f"diffusers has no converter of such files for {kind.__name__}",
            key="single file",
            value=kind.__name__,
            fix="load and export it as the folder of a pipeline",
        )
    if set(names) == set(given):
        return given
    convert = theirs.SINGLE_FILE_LOADABLE_CLASSES[known]["checkpoint_mapping_fn"]
    try:
        converted: Mapping[str, torch.Tensor] = convert(checkpoint=given, config=config)
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise _other_model(
            kind.__name__, f"cannot be read from it ({first_line(error)})"
        ) from error
    return converted


def _other_model(name: str, reason: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{reason}, as diffusers' converter reads the file",
        key=name,
        fix="give the configuration of the file's own model; sizes that were never published are "
        "known to no converter",
    )


# -- A file.


@attrs.frozen(kw_only=True)
class SingleFile:
    """A safetensors file, and the folder of a pipeline that says what its model is."""

    path: Path
    config: Path
    """With ``model_index.json``, the parts' configurations and the tokenizers; weights of parts
    that the file lacks, too."""
    tensors: Mapping[str, StoredTensor]
    """What the file holds."""
    stamp: tuple[int, int]

    @classmethod
    def open(cls, path: Path, *, config: Path) -> SingleFile:
        """Read the header."""
        return cls(
            path=path, config=config, tensors=read_header(path)[0], stamp=stamp_of(path.stat())
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the file's names."""
        return {key: tensor.shape for key, tensor in self.tensors.items()}

    @property
    def published(self) -> str:
        """The pipeline on the hub that diffusers knows the file's keys by.

        Raises:
            InvalidValueError: There is none.
        """
        from diffusers.loaders import single_file_utils as theirs

        shaped = {key: torch.empty(shape, device="meta") for key, shape in self.shapes.items()}
        kind = theirs.infer_diffusers_model_type(shaped)
        if kind == "v1" and theirs.CHECKPOINT_KEY_NAMES["v1"] not in shaped:
            raise InvalidValueError(
                "its keys are of no model that diffusers knows",
                key="source",
                value=str(self.path),
                fix="give config=, the folder of a pipeline with a model of its sizes",
            )
        found: str = theirs.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]
        return found

    def check_plain(self) -> None:
        """Refuse weights that are numbers of ComfyUI's own scaled formats."""
        for key in self.tensors:
            if _SCALED_FP8.search(key):
                raise InvalidValueError(
                    "its weights are scaled, which diffusers' converters do not undo",
                    key=str(self.path),
                    value=key,
                    fix="give the file in bf16, fp16 or plain fp8",
                )

    def is_stale(self, key: str) -> bool:
        """Whether a tensor is an average of the trained weights, from before."""
        return key.startswith(_STALE)

    def unused(self, places: Places) -> list[str]:
        """Tensors of the trained model that the converter drops."""
        read = {run.key for runs in places.values() for run in runs}
        whole = any(key.startswith(_MODEL) for key in self.tensors)
        return [
            key for key in self.tensors if key not in read and (key.startswith(_MODEL) or not whole)
        ]

    def weights(self, places: Places, model: Shapes) -> dict[str, StoredWeight]:
        """Where the values of a model's tensors are, to be read when they are needed."""
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
    def components(self) -> dict[str, tuple[str, str]]:
        """Library and class of the pipeline's components by name."""
        index = json_of((self.config / "model_index.json").read_text())
        return {
            name: (entry[0], entry[1])
            for name, entry in index.items()
            if isinstance(entry, list)
            and len(entry) == 2
            and all(isinstance(e, str) for e in entry)
        }

    def without(self, parts: Iterable[str]) -> dict[str, Any]:
        """Options that leave all components out but some."""
        kept = set(parts)
        index = json_of((self.config / "model_index.json").read_text())
        left = {
            name for name, entry in index.items() if isinstance(entry, list) and name not in kept
        }
        quiet = {name: False for name in index if name == "requires_safety_checker"}
        return dict.fromkeys(sorted(left)) | quiet

    @property
    def parts(self) -> frozenset[str]:
        """Names of the pipeline's frozen parts that the file holds."""
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
        """A pipeline with parts of the file, and the folder's others.

        Args:
            kind: Its class.
            options: Of ``from_pretrained``; components that are ``None`` are left out.
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
        """Write the frozen parts that the file holds into a pipeline's folder, in fp32."""
        import diffusers

        index = json_of((self.config / "model_index.json").read_text())
        kind = getattr(diffusers, index["_class_name"])
        pipeline = self.pipeline(kind, self.without(self.parts))
        for name in self.parts:
            getattr(pipeline, name).save_pretrained(folder / name)
