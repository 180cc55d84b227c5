"""Weights of the trained model, read here or later by the engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from packaging.version import Version

from zerotune._util.text import json_of, listing
from zerotune.backend.checks import DTYPES
from zerotune.backend.single_file import SingleFile
from zerotune.backend.stored import (
    StoredWeight,
    leave_in_file,
    read_header,
    stamp_of,
    stored_weight,
    weight_files,
    without_weights,
)
from zerotune.decisions import Decision
from zerotune.errors import CheckpointCorruptError, InvalidValueError, MissingDependencyError
from zerotune.plan.plan import DeepSpeedPlan, ResolvedPlan
from zerotune.platform.detect import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@attrs.frozen(kw_only=True)
class Loading:
    """Options for loading the trained model."""

    folder: Path
    plan: DeepSpeedPlan | ResolvedPlan | None
    dtype: str | None
    variant: str | None
    quantization: Any
    single: SingleFile | None = None

    def model(self, kind: Any, name: str | None = None) -> tuple[Any, tuple[Decision, ...]]:
        """Load a model of class ``kind`` from the folder, or from its subfolder ``name``."""
        place = self.folder / (name or "")
        if self.dtype is not None:
            dtype_named(self.dtype)
        if self.quantization is not None:
            return self._quantized(kind, name)
        if self.plan is None:
            return self._read_now(kind, name, dtype_named(self.dtype or "fp32")), ()
        if self.single is not None:
            return self._read_for_plan(
                kind,
                name,
                "diffusers reads a single file whole; to read it in parts, convert it once to a "
                "folder with the pipeline's from_single_file and save_pretrained",
            )
        try:
            files = weight_files(place, variant=self.variant)
        except CheckpointCorruptError as error:
            raise not_loaded(place, error) from error
        if not files:
            return self._read_for_plan(
                kind,
                name,
                "the model has no safetensors file, and other formats can only be read "
                "whole; convert the model with save_pretrained",
            )
        try:
            found = _stored_weights(files)
        except CheckpointCorruptError as error:
            raise not_loaded(place, error) from error
        model = self._without_weights(kind, place)
        self._leave_in_files(model, place, found)
        names = f"{files[0].name}" + (f" and {len(files) - 1} more" if files[1:] else "")
        return model, (_waits_in(names),)

    def _quantized(self, kind: Any, name: str | None) -> tuple[Any, tuple[Decision, ...]]:
        """Return the frozen model, with linear layers quantized by diffusers."""
        told = type(self.quantization).__name__
        if told == "GGUFQuantizationConfig":
            raise InvalidValueError(
                "diffusers supports GGUF only in single files, not in a pipeline's folder",
                f"write model = diffusers.{kind.__name__}.from_single_file(FILE, "
                "quantization_config=...), then call add_lora(model)",
                "quantization",
                told,
            )
        precision = "bf16" if self.plan is None else self.plan.precision
        dtype = self.dtype or (precision if precision in DTYPES else "bf16")
        try:
            model = self._read_now(
                kind, name, dtype_named(dtype), quantization_config=self.quantization
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"this quantization needs a package that is not installed ({first_line(error)})",
                "run pip install 'zerotune[optimizers]' to install bitsandbytes and torchao",
                "quantization",
                told,
            ) from error
        model.requires_grad_(False)
        if self.plan is None:
            return model, ()
        return model, (
            Decision(
                "model.weights",
                "read from their files by the engine",
                f"read on every rank, and quantized with {told}",
                "quantization packages need whole weights",
            ),
        )

    def _read_for_plan(
        self, kind: Any, name: str | None, why: str
    ) -> tuple[Any, tuple[Decision, ...]]:
        """Return a model whose files cannot be read in parts, in the dtype DeepSpeed will use."""
        rounds = isinstance(self.plan, ResolvedPlan) and self.plan.uses_deepspeed
        chosen = self.dtype or (self.plan.precision if self.plan and rounds else "fp32")
        model = self._read_now(kind, name, dtype_named(chosen))
        return model, (
            Decision(
                "model.weights",
                "read from their files by the engine",
                f"read whole on every rank, in {chosen}",
                why,
                "warning",
            ),
        )

    def _read_now(
        self, kind: Any, name: str | None, dtype: torch.dtype, **quantization: Any
    ) -> Any:
        place = self.folder / (name or "")
        options: dict[str, Any] = {} if name is None else {"subfolder": name}
        options |= {"local_files_only": True, **dtype_option(dtype), **quantization}
        try:
            if self.single is not None:
                return self._read_file(kind, self.single, options)
            model, told = kind.from_pretrained(
                self.folder, variant=self.variant, output_loading_info=True, **options
            )
        except (OSError, ValueError, RuntimeError) as error:
            if quantization:
                raise InvalidValueError(
                    f"the model cannot be loaded with this quantization ({first_line(error)})",
                    "without a GPU, use TorchAoConfig, because diffusers runs bitsandbytes "
                    "on GPUs only",
                    "quantization",
                    type(self.quantization).__name__,
                ) from error
            raise not_loaded(place, error) from error
        if not quantization:
            _check_weight_names(
                place, missing=told["missing_keys"], unexpected=told["unexpected_keys"]
            )
        return model

    def _read_file(self, kind: Any, file: SingleFile, options: dict[str, Any]) -> Any:
        """Return the model of a single file, converted by diffusers."""
        file.check_plain()
        try:
            model = kind.from_single_file(str(file.path), config=str(self.folder), **options)
        except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            if self.quantization is not None:
                raise
            raise InvalidValueError(
                f"diffusers cannot read {kind.__name__} from this file ({first_line(error)})",
                "pass the configuration of the model in this file; diffusers cannot convert models "
                "of unpublished sizes",
                "source",
                str(file.path),
            ) from error
        unread = [name for name, weight in model.named_parameters() if weight.is_meta]
        _check_weight_names(file.path, missing=unread, unexpected=())
        return model

    def _without_weights(self, kind: Any, place: Path) -> Any:
        """Return a model whose buffers have values, but whose parameters do not."""
        from diffusers.models.modeling_utils import no_init_weights

        try:
            config = kind.load_config(place, local_files_only=True)
            with no_init_weights(), without_weights():
                model = kind.from_config(config)
        except (OSError, ValueError) as error:
            raise not_loaded(place, error) from error
        model.register_to_config(_name_or_path=str(self.folder))
        return model

    def _leave_in_files(self, model: Any, place: Path, found: dict[str, StoredWeight]) -> None:
        """Attach to each parameter its place in the files, and read buffers."""
        kind = type(model)
        # Old files use different names for some weights; the model's class renames them in place.
        rename = getattr(model, "_fix_state_dict_keys_on_load", None)
        if rename is not None:
            rename(found)
        state = model.state_dict(keep_vars=True)
        _check_fit(place, kind, state, found)
        kept = getattr(kind, "_keep_in_fp32_modules", None) or ()
        for name, tensor in state.items():
            weight = found.get(name)
            if weight is None:
                continue
            if not isinstance(tensor, torch.nn.Parameter):
                weight.read_into(tensor.view(-1))
            elif stored_weight(tensor) is None:
                if tensor.is_floating_point() and not set(kept) & set(name.split(".")):
                    tensor.data = tensor.data.to(dtype_named(self.dtype or "fp32"))
                leave_in_file(tensor, weight)


def _waits_in(names: str) -> Decision:
    return Decision(
        "model.weights",
        "read whole on every rank",
        f"read from {names} by the engine",
        "load_pretrained received a plan; without an engine, call Pretrained.read_weights()",
    )


def _stored_weights(files: Sequence[Path]) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    for file in files:
        stamp = stamp_of(file.stat())
        for name, tensor in read_header(file)[0].items():
            if name in found:
                raise CheckpointCorruptError(
                    f"appears in both {found[name].file.name} and {file.name}", key=name
                )
            found[name] = StoredWeight(file=file, tensor=tensor, stamp=stamp)
    return found


def _check_fit(
    place: Path, kind: Any, state: Mapping[str, torch.Tensor], found: Mapping[str, StoredWeight]
) -> None:
    there = {id(state[name]) for name in found if name in state}
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    _check_weight_names(
        place,
        # A tied weight may be stored under one of its names.
        missing=[name for name, tensor in state.items() if id(tensor) not in there],
        unexpected=[
            name
            for name in found
            if name not in state and not any(re.search(each, name) for each in ignored)
        ],
    )
    for name, weight in found.items():
        if name in state and tuple(state[name].shape) != weight.tensor.shape:
            raise InvalidValueError(
                f"the model's configuration requires a tensor of shape {list(state[name].shape)}",
                "download the model again, because its configuration does not match its weights",
                f"{weight.file}: {name}",
                list(weight.tensor.shape),
            )


def _check_weight_names(place: Path, *, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    lacks, extra = "lacks weights of the model", "contains weights that the model does not have"
    for names, what in ((missing, lacks), (unexpected, extra)):
        if names:
            raise InvalidValueError(
                f"{what}: {listing(list(names))}",
                "download the model again, because its configuration does not match its weights",
                "source",
                str(place),
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a pipeline."""
    try:
        content: dict[str, Any] = json_of(path.read_text())
    except (OSError, ValueError) as error:
        raise not_loaded(path, error) from error
    return content


def not_loaded(path: Path, error: Exception) -> InvalidValueError:
    """Return the error for a file that cannot be loaded."""
    return InvalidValueError(
        f"cannot be loaded ({first_line(error).rstrip('.')})",
        "download the pipeline again, or pass a variant= whose files exist",
        "source",
        str(path),
    )


def dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument for a dtype, as the installed diffusers names it."""
    import diffusers

    renamed = Version(diffusers.__version__) >= Version("0.42")
    return {"dtype" if renamed else "torch_dtype": dtype}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name such as ``"bf16"``."""
    if name not in DTYPES:
        raise InvalidValueError(
            "is not a supported dtype", f"one of {', '.join(DTYPES)}", "dtype", name
        )
    return DTYPES[name]
