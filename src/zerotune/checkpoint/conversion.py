"""Convert checkpoints to diffusers model folders and single files, without an engine."""

from __future__ import annotations

import os
from pathlib import Path

from zerotune._util.files import system_errors
from zerotune.backend.single_file import INDEX, SUFFIX
from zerotune.checkpoint.export.model import export_checkpoint
from zerotune.checkpoint.export.pipeline import single_file_of_folder
from zerotune.checkpoint.export.single_file import export_checkpoint_as_file
from zerotune.errors import CheckpointError


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    shadow: str | None = None,
    dtype: str = "fp32",
    base: str | os.PathLike[str] | None = None,
) -> Path:
    """Convert a checkpoint to a diffusers model folder, or to one ``.safetensors`` file.

    A recipe converts checkpoints of DeepSpeed and accelerate to zerotune's.

    Args:
        source: The checkpoint.
        target: Path to write.
        shadow: Name of the EMA shadow to write instead of the trained weights.
        dtype: Dtype of the tensors: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        base: For a checkpoint with frozen parameters, the model folder that training started from.
            If ``base`` is a single file and ``target`` ends with ``.safetensors``, the result has
            the layout of ``base``.

    Returns:
        The absolute path of the result.

    Raises:
        CheckpointError: ``source`` is not a checkpoint.
        CheckpointCorruptError: A file is damaged.
        CheckpointMismatchError: ``source`` does not contain the shadow, or ``base`` lacks a frozen
            parameter.
    """
    with system_errors(CheckpointError, target, f"cannot be written from {os.fspath(source)}"):
        origin = None if base is None else Path(base)
        single = origin is not None and Path(target).suffix == SUFFIX
        if origin is not None and single and (origin / INDEX).is_file():
            raise single_file_of_folder(Path(target))
        if origin is not None and single and origin.is_file():
            return export_checkpoint_as_file(
                source, target, base=origin, shadow=shadow, dtype=dtype
            )
        return export_checkpoint(source, target, shadow=shadow, dtype=dtype, base=base)
