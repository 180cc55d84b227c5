"""A LoRA file in diffusers' format: written under another name, read back, then renamed."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from zerotune.checkpoint.folders import check_space
from zerotune.checkpoint.tensorfile import (
    TensorFileWriter,
    TensorSpec,
    file_size,
    hash_of,
    read_header,
)
from zerotune.errors import CheckpointCorruptError, CheckpointError
from zerotune.files import sync_folder

LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""What diffusers looks for in a folder."""
SETTINGS: Final = "lora_adapter_metadata"
"""Where diffusers keeps rank, alpha and the like in the header."""


class AdapterFileWriter:
    """Writes a LoRA file tensor by tensor.

    Args:
        path: The file; must not exist.
        specs: The tensors, in the order they will come.
        settings: JSON text of the adapters' settings.

    Raises:
        CheckpointError: The file exists, or the disk is too small.
    """

    def __init__(self, path: Path, *, specs: Sequence[TensorSpec], settings: str) -> None:
        if path.exists() or path.is_symlink():
            raise CheckpointError(
                "exists and is not replaced",
                key=str(path),
                fix="choose another name, or remove it yourself",
            )
        self.path = path
        self._specs = tuple(specs)
        self._metadata = {"format": "pt", SETTINGS: settings}
        path.parent.mkdir(parents=True, exist_ok=True)
        check_space(path.parent, file_size(specs, self._metadata))
        self._draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.draft")
        try:
            self._writer = TensorFileWriter(self._draft, specs=specs, metadata=self._metadata)
        except BaseException:
            self._draft.unlink(missing_ok=True)
            raise

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        self._writer.append(key, tensor)

    def publish(self) -> tuple[int, str]:
        """Read the file back and give it its name.

        Returns:
            Its bytes and SHA-256 (hex).

        Raises:
            CheckpointCorruptError: The disk does not hold what was written.
        """
        nbytes, sha256 = self._writer.finish()
        _check(self._draft, self._specs, self._metadata, nbytes=nbytes, sha256=sha256)
        self._draft.rename(self.path)
        sync_folder(self.path.parent)
        return nbytes, sha256

    def abandon(self) -> None:
        """Close, and remove what has not got its name."""
        self._writer.close()
        self._draft.unlink(missing_ok=True)


def find_adapters(path: str | os.PathLike[str]) -> Path:
    """The LoRA file that a path means.

    Raises:
        CheckpointError: There is none.
    """
    given = Path(path)
    file = given / LORA_FILE if given.is_dir() else given
    if not file.is_file():
        raise CheckpointError(
            "there is no LoRA file",
            key=str(file),
            fix=f"give the file, or a folder with {LORA_FILE}",
        )
    return file


def adapter_settings(metadata: Mapping[str, str], component: str) -> dict[str, Any] | None:
    """What a file's header says of a component's adapters; ``None`` when it says nothing.

    Raises:
        CheckpointCorruptError: It is not JSON.
    """
    try:
        every = json.loads(metadata.get(SETTINGS, "{}"))
    except ValueError as error:
        raise CheckpointCorruptError(f"is not JSON ({error})", key=SETTINGS) from error
    prefix = f"{component}."
    return {
        key.removeprefix(prefix): value for key, value in every.items() if key.startswith(prefix)
    } or None


def _check(
    path: Path,
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    *,
    nbytes: int,
    sha256: str,
) -> None:
    stored, header = read_header(path)
    wanted = {spec.key: (spec.dtype, spec.shape) for spec in specs}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    if wanted != there or header != metadata or path.stat().st_size != nbytes:
        raise CheckpointCorruptError(
            f"holds {len(there)} tensors, not the {len(wanted)} that were written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )
    if hash_of(path) != sha256:
        raise CheckpointCorruptError(
            "does not hold the bytes that were written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )
