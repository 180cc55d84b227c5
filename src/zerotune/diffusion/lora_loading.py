"""Adapters from a file as the first values of a training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from zerotune.backend.adapters import AdapterFacts
from zerotune.backend.trained_parts import components
from zerotune.diffusion.lora import require_no_adapters, settle
from zerotune.diffusion.lora_targets import peft
from zerotune.errors import CheckpointError, CheckpointMismatchError

_FILE = "pytorch_lora_weights.safetensors"


def load_adapters(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    component: str | None = None,
    name: str = "default",
    base_dtype: str | torch.dtype | None = None,
) -> AdapterFacts:
    """Freeze a model and give it the adapters of a LoRA file, to train on from there, in place.

    ``add_lora`` with a file in place of an initialization; rank, alpha and targets are the
    file's. Its dropout is not kept in files and is none.

    Args:
        model: A diffusers model or a transformers text encoder, without adapters.
        path: A file in diffusers' format, or a folder that holds one under its usual name.
        component: What the file calls the model (``"unet"``, ``"text_encoder_2"``); told from
            its class when not given.
        name: What the adapter will be called in the model.
        base_dtype: As in ``add_lora``.

    Returns:
        What was added.

    Raises:
        CheckpointError: There is no such file.
        CheckpointMismatchError: It has no adapters for the model, or not all of them fit.
        InvalidValueError: The class does not tell the component, or the model has adapters.
        MissingDependencyError: peft is not installed.
    """
    peft()
    require_no_adapters(model)
    file = Path(path) / _FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise CheckpointError("there is no LoRA file", key=str(file))
    ((part, (_, module)),) = components(model, component).items()
    expected = _expected(file, part)
    try:
        _load(module, file, part, name)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointMismatchError(
            f"does not fit {type(model).__name__} ({error})", key=str(file)
        ) from error
    facts = settle(model, name, base_dtype=base_dtype)
    if facts.tensors != expected:
        raise CheckpointMismatchError(
            f"has {expected} tensors for {part!r}, of which the model took {facts.tensors}",
            key=str(file),
            fix="load it onto the model it was trained with",
        )
    return facts


def _expected(file: Path, component: str) -> int:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        keys: list[str] = list(opened.keys())
    count = sum(key.startswith(f"{component}.") and ".lora_" in key for key in keys)
    if count == 0:
        raise CheckpointMismatchError(
            f"has nothing for {component!r}, only for {sorted({k.split('.')[0] for k in keys})}",
            key=str(file),
            fix="name the component=, or let the pipeline's lora_state_dict convert a file of "
            "another trainer, and save that",
        )
    return count


def _load(module: Any, file: Path, component: str, name: str) -> None:
    if hasattr(module, "load_lora_adapter"):
        module.load_lora_adapter(
            str(file.parent),
            weight_name=file.name,
            prefix=component,
            adapter_name=name,
            use_safetensors=True,
            local_files_only=True,
        )
        return
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    state, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
        str(file.parent), weight_name=file.name, local_files_only=True, return_lora_metadata=True
    )
    StableDiffusionLoraLoaderMixin.load_lora_into_text_encoder(
        state,
        alphas,
        module,
        prefix=component,
        adapter_name=name,
        metadata=metadata,
    )
