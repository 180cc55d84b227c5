"""Single-file models in the layout of their original release, which ComfyUI also reads.

diffusers' converters read the weights. zerotune reads only the file's header: which pipeline it
belongs to, and which of the pipeline's components it contains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import json_of
from zerotune.backend.stored import StoredTensor, read_header
from zerotune.errors import InvalidValueError

SUFFIX: Final = ".safetensors"
"""File name suffix of a single-file model."""
INDEX: Final = "model_index.json"
"""Name of the file that lists the components of a diffusers pipeline, in the pipeline's folder."""

_VAES: Final = ("first_stage_model.", "vae.")
_SCALED_FP8: Final = re.compile(
    r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale|comfy_quant)$"
)
"""Names of tensors that belong to ComfyUI's own quantization formats."""


@attrs.frozen(kw_only=True)
class SingleFile:
    """A single-file checkpoint, and the diffusers pipeline folder with its configuration."""

    path: Path
    config: Path
    """Folder with ``model_index.json``, configurations, tokenizers, and weights of components that
    the file lacks."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of the file, by name."""

    @classmethod
    def open(cls, path: Path, *, config: Path) -> SingleFile:
        """Read the header of a file.

        Args:
            path: The safetensors file.
            config: Folder of the pipeline.
        """
        return cls(path=path, config=config, tensors=read_header(path)[0])

    @property
    def published(self) -> str:
        """Hub name of the pipeline that diffusers infers from the file's keys.

        Raises:
            InvalidValueError: diffusers does not recognise the keys.
        """
        from diffusers.loaders import single_file_utils as theirs

        shaped = {
            key: torch.empty(stored.shape, device="meta") for key, stored in self.tensors.items()
        }
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
