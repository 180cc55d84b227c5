"""A diffusers model folder: written tensor by tensor, checked before it gets its name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from zerotune.checkpoint import tensorfile
from zerotune.checkpoint.folders import Staging, check_space, checked_path
from zerotune.checkpoint.tensorfile import (
    StoredTensor,
    TensorFileWriter,
    TensorSpec,
    file_size,
    read_header,
)
from zerotune.errors import CheckpointCorruptError, CheckpointError
from zerotune.files import sync_folder

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

CONFIG: Final = "config.json"
SHARD_SIZE: Final = 10 * 2**30
"""Most bytes of tensors in one file, as diffusers itself splits them."""
_STEMS: Final = ("diffusion_pytorch_model", "model")
_METADATA: Final = {"format": "pt"}


class ModelFolderWriter:
    """Writes ``config.json`` and sharded safetensors that ``from_pretrained`` reads.

    A path that ends with ``.safetensors`` becomes a single file instead.

    Args:
        path: The folder or file; must not exist.
        config: The model's configuration; ``None`` of a model that is not diffusers'.
        specs: Every tensor, in the order they will come.
        shard_size: Most bytes of tensors in a file.

    Raises:
        CheckpointError: The path is taken, or the disk is too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None,
        specs: Sequence[TensorSpec],
        shard_size: int = SHARD_SIZE,
    ) -> None:
        self._final = checked_path(path)
        self._single = self._final.suffix == ".safetensors"
        if self._final.exists() and not _empty(self._final):
            raise CheckpointError(
                "exists and is not replaced",
                key=str(self._final),
                fix="choose another name, or remove it yourself",
            )
        self._config = config
        self._shards = _split(specs, None if self._single else shard_size)
        self._names = self._file_names()
        self._staging = Staging(self._final)
        self._writers: list[TensorFileWriter] = []
        self._left = 0
        with ExitStack() as undo:
            undo.callback(self.abandon)
            check_space(self._staging.path, sum(file_size(s, _METADATA) for s in self._shards))
            undo.pop_all()

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, cast to what was announced."""
        if not self._left:
            self._next()
        spec = self._shards[len(self._writers) - 1][-self._left]
        self._writers[-1].append(key, tensor.to(spec.dtype))
        self._left -= 1
        if not self._left:
            self._writers[-1].finish()

    def publish(self) -> Path:
        """Compare what is on the disk with what was announced, then give it its name.

        Returns:
            The folder or file.

        Raises:
            CheckpointCorruptError: A tensor is missing, or has another name, shape or dtype.
        """
        folder = self._staging.path
        for name, specs in zip(self._names, self._shards, strict=True):
            _check_shard(folder / name, specs)
        if self._single:
            (folder / self._names[0]).rename(self._final)
            sync_folder(self._final.parent)
            self._staging.abandon()
            return self._final
        if self._config is not None:
            _write_json(folder / CONFIG, self._config)
        if len(self._names) > 1:
            _write_json(folder / f"{self._stem}.safetensors.index.json", self._index())
        self._staging.publish()
        return self._final

    def abandon(self) -> None:
        """Remove what was written so far."""
        for writer in self._writers:
            writer.close()
        self._staging.abandon()

    @property
    def _stem(self) -> str:
        return _STEMS[0] if self._config is not None else _STEMS[1]

    def _file_names(self) -> list[str]:
        count = len(self._shards)
        if count == 1:
            return [f"{self._stem}.safetensors"]
        return [f"{self._stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def _next(self) -> None:
        index = len(self._writers)
        if index == len(self._shards):
            raise CheckpointError("more tensors than were announced", key=str(self._final))
        specs = self._shards[index]
        path = self._staging.path / self._names[index]
        self._writers.append(TensorFileWriter(path, specs=specs, metadata=_METADATA))
        self._left = len(specs)

    def _index(self) -> dict[str, Any]:
        named = zip(self._names, self._shards, strict=True)
        weight_map = {spec.key: name for name, specs in named for spec in specs}
        total = sum(spec.nbytes for specs in self._shards for spec in specs)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


class ModelFolderReader:
    """Reads a diffusers model folder, or a single safetensors file, tensor by tensor.

    Raises:
        CheckpointError: There is no model here.
        CheckpointCorruptError: A file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[Path, StoredTensor]] = {}
        for file in _weight_files(path):
            tensors, _ = read_header(file)
            self._places.update({name: (file, stored) for name, stored in tensors.items()})
        self._open: dict[Path, int] = {}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """What ``config.json`` holds."""
        path = self.path / CONFIG
        if not path.is_file():
            return None
        try:
            config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointCorruptError(f"is not JSON ({error})", key=str(path)) from error
        return config

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What is there, by name."""
        return {name: stored for name, (_, stored) in self._places.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        file, stored = self._places[name]
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        view = memoryview(flat.view(torch.uint8).numpy().data)
        if tensorfile.read_at(self._open[file], view, stored.offset) != flat.nbytes:
            raise CheckpointCorruptError("ends too early", key=str(file))
        return flat.view(stored.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for stem in _STEMS:
        index = path / f"{stem}.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [path / name for name in sorted(set(names))]
        if (path / f"{stem}.safetensors").is_file():
            return [path / f"{stem}.safetensors"]
    raise CheckpointError(
        "holds no safetensors weights of a model",
        key=str(path),
        fix="give the folder of the model itself, such as <pipeline>/unet, saved as safetensors",
    )


def _split(specs: Sequence[TensorSpec], most: int | None) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if most is not None and shards[-1] and filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _check_shard(path: Path, specs: Sequence[TensorSpec]) -> None:
    stored, _ = read_header(path)
    wanted = {spec.key: (spec.dtype, spec.shape) for spec in specs}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    nbytes, expected = path.stat().st_size, file_size(specs, _METADATA)
    if wanted != there or nbytes != expected:
        raise CheckpointCorruptError(
            f"holds {len(there)} tensors in {nbytes} bytes, not the {len(wanted)} in {expected} "
            "that were to be written",
            key=str(path),
            fix="look at the disk, or export elsewhere",
        )


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
