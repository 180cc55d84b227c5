"""Read and write safetensors files piece by piece, without a second copy of the weights.

``safetensors.torch.save_file`` needs every tensor in memory at once; ``safe_open`` provides no byte
offsets and reads only into newly allocated memory. A safetensors file consists of an 8-byte length,
a JSON header that depends only on names, dtypes and shapes, and the tensors' bytes in sequence. The
header can therefore be written first, and every process can write its bytes directly into the file.

The writer computes a checksum of each part while the part is in memory. The finished file is read
back once, compared with these checksums and hashed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import torch

from zerotune._util.files import naming
from zerotune.backend import stored as stored_files
from zerotune.backend.stored import TENSOR_DTYPES, OpensFiles, StoredTensor, read_header
from zerotune.checkpoint.manifest import FileRecord
from zerotune.errors import CheckpointCorruptError, CheckpointError, shorten

_PIECE_ELEMENTS: Final = 2**22
"""Elements moved to the CPU and written, or read and moved to a device, at a time."""
_VERIFIED_PIECE: Final = 2**20
"""Bytes read at a time."""
_HASHED_AT_ONCE: Final = 2
"""Number of files hashed concurrently; one thread hashes more slowly than a fast disk writes."""
_METADATA: Final = {"format": "pt"}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


@attrs.frozen(kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to write."""

    key: str
    """Name of the tensor in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor by name, dtype and shape."""
        return cls(key=key, dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        """Return a copy with a different dtype; integer tensors keep their dtype."""
        return attrs.evolve(self, dtype=dtype if self.dtype.is_floating_point else self.dtype)


@attrs.frozen(kw_only=True)
class Subject:
    """Kind of the tensors in a file, such as weights or one optimizer state."""

    kind: str
    """``"weights"``, ``"optimizer"``, ``"shadow"`` or ``"rank"``; ``"export"`` outside of
    checkpoints."""
    of: str = ""
    """Name of the optimizer state or shadow, or the rank; empty for weights and exports."""

    @property
    def prefix(self) -> str:
        """Prefix of the names of all files of this kind, such as ``optimizer.exp_avg``."""
        return f"{self.kind}.{self.of}" if self.of else self.kind

    def label(self, name: str) -> str:
        """Return a tensor's name in the manifest, such as ``weights/conv.bias``."""
        return name if self.kind == "rank" else f"{self.prefix}/{name}"

    def sound(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values may be saved; buffers may contain infinities."""
        if self.kind == "export" or not tensor.is_floating_point():
            return True
        if self.kind == "rank":
            return not bool(tensor.float().isnan().any())
        return all_finite(tensor)


WEIGHTS: Final = Subject(kind="weights")
EXPORT: Final = Subject(kind="export")


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor in host memory contains neither NaN nor infinity."""
    # A sum is much cheaper; check the elements only if it is not finite. numpy sums in this thread
    # alone, while torch would take cores from the threads that train.
    with np.errstate(all="ignore"):
        total = float(tensor.float().numpy().sum())
    return math.isfinite(total) or bool(tensor.isfinite().all())


def hash_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


# -- Writing.


@attrs.frozen(kw_only=True, eq=False)
class TensorFile:
    """Byte layout of a file to be written."""

    name: str
    subject: Subject
    specs: Mapping[str, TensorSpec]
    header: bytes
    """Everything before the first tensor's bytes."""
    offsets: Mapping[str, int]
    """Byte offset of each tensor in the file."""
    nbytes: int

    @classmethod
    def of(
        cls,
        name: str,
        subject: Subject,
        specs: Iterable[TensorSpec],
        *,
        metadata: Mapping[str, str] = _METADATA,
    ) -> TensorFile:
        """Lay out tensors in a file, one after another.

        Args:
            name: Name of the file.
            subject: Kind of the tensors.
            specs: Tensors of the file, in the order in which they are stored.
            metadata: String values for ``__metadata__`` in the safetensors header.
        """
        named: dict[str, TensorSpec] = {}
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        begins: dict[str, int] = {}
        position = 0
        for spec in specs:
            if spec.key in entries:
                raise CheckpointError("two tensors have this name", key=spec.key)
            if spec.dtype not in _DTYPE_NAMES:
                raise CheckpointError(
                    f"safetensors does not support {spec.dtype}",
                    "register the buffer with persistent=False, or store it in a supported "
                    "dtype such as float32",
                    spec.key,
                )
            entries[spec.key] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            named[spec.key], begins[spec.key] = spec, position
            position += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Align the first tensor to 8 bytes, as safetensors' own writer does.
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(
            name=name,
            subject=subject,
            specs=named,
            header=header,
            offsets={key: len(header) + begin for key, begin in begins.items()},
            nbytes=len(header) + position,
        )

    def create(self, folder: Path) -> None:
        """Create the file in ``folder``, with its header and final size. Call on one rank."""
        path = folder / self.name
        with naming(path), path.open("xb", buffering=0) as file:
            write_at(file.fileno(), memoryview(self.header), 0)
            file.truncate(self.nbytes)


def split(specs: Iterable[TensorSpec], most: int | None) -> list[list[TensorSpec]]:
    """Group tensors into files of at most ``most`` bytes; a larger tensor gets its own file."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or (most is not None and filled + spec.nbytes > most):
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def shard_name(stem: str, index: int, count: int) -> str:
    """Return the name of file number ``index``, counted from 1, out of ``count`` files."""
    return f"{stem}-{index:05d}-of-{count:05d}.safetensors"


@attrs.frozen(kw_only=True)
class Written:
    """A range of bytes that was written, and its checksum."""

    file: str
    offset: int
    nbytes: int
    crc: int
    """CRC-32."""


class TensorWriter(OpensFiles):
    """Writes this process's tensors, or parts of tensors, directly into their files."""

    def __init__(self, folder: Path, files: Iterable[TensorFile]) -> None:
        super().__init__(os.O_WRONLY)
        self._folder = folder
        self._files = {(file.subject, key): file for file in files for key in file.specs}
        self._written: list[Written] = []
        self._not_finite: dict[str, None] = {}

    def write(
        self, name: str, tensor: torch.Tensor, *, subject: Subject = EXPORT, start: int = 0
    ) -> None:
        """Write a part of a tensor.

        Args:
            name: Name of the tensor.
            tensor: Elements of the part, in any shape, on any device. In checkpoints the dtype must
                be the file's dtype or bf16; in exports all dtypes are allowed.
            subject: Kind of the tensor.
            start: Index of the part's first element in the flattened tensor.
        """
        file = self._files.get((subject, name))
        spec = None if file is None else file.specs[name]
        if (
            file is None
            or spec is None
            or (subject != EXPORT and tensor.dtype not in (spec.dtype, torch.bfloat16))
            or (start + tensor.numel()) * spec.dtype.itemsize > spec.nbytes
        ):
            raise CheckpointError(
                f"{subject.prefix} changed while it was saved",
                "do not train while a checkpoint is being saved",
                name,
            )
        offset = first = file.offsets[name] + start * spec.dtype.itemsize
        crc, sound, path = 0, True, self._folder / file.name
        for piece in _element_bytes(tensor, spec.dtype):
            with naming(path):
                write_at(self._descriptor(path), piece, offset)
            crc = zlib.crc32(piece, crc)
            sound = sound and subject.sound(torch.frombuffer(piece, dtype=spec.dtype))
            offset += len(piece)
        if not sound:
            self._not_finite[subject.label(name)] = None
        if offset > first:
            part = Written(file=file.name, offset=first, nbytes=offset - first, crc=crc)
            self._written.append(part)

    @property
    def written(self) -> tuple[Written, ...]:
        """The byte ranges that have been written so far."""
        return tuple(self._written)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Names of written tensors with NaN or infinity, such as ``weights/conv.bias``."""
        return tuple(self._not_finite)

    def sync(self) -> None:
        """Flush all written data to disk."""
        for path, descriptor in self._open.items():
            # A full disk may be reported only here.
            with naming(path):
                os.fsync(descriptor)

    def confirm(
        self, files: Iterable[TensorFile], written: Iterable[Written]
    ) -> tuple[FileRecord, ...]:
        """Read files back and compare checksums, while this process's writes are flushed to disk.

        Args:
            files: Files to read.
            written: Ranges of bytes that all ranks have written.

        Returns:
            The files' records, with size and hash.
        """
        written = tuple(written)
        with ThreadPoolExecutor(1 + _HASHED_AT_ONCE) as pool:
            syncing = pool.submit(self.sync)
            records = tuple(pool.map(lambda file: confirm(self._folder, file, written), files))
            syncing.result()
        return records


def write_at(descriptor: int, piece: memoryview, offset: int) -> None:
    """Write all bytes of ``piece`` to an open file, at a byte offset."""
    while piece:
        # A write may be short; Linux writes at most 2 GiB at once.
        written = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[written:], offset + written


def _element_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield a tensor's elements as bytes, in ``dtype``, from any device."""
    for part in torch.split(tensor.detach().reshape(-1), _PIECE_ELEMENTS):
        if part.numel():
            yield part.cpu().to(dtype).contiguous().view(torch.uint8).numpy().data


def confirm(folder: Path, file: TensorFile, written: Iterable[Written]) -> FileRecord:
    """Read a finished file once, and compare it with the checksums of the written data.

    Args:
        folder: Folder of the file.
        file: Name, header and size of the file to check.
        written: Ranges of bytes that all ranks have written.
    """
    path = folder / file.name
    header = Written(file=file.name, offset=0, nbytes=len(file.header), crc=zlib.crc32(file.header))
    digest, position = hashlib.sha256(), 0
    parts = sorted((part for part in written if part.file == file.name), key=lambda p: p.offset)
    with path.open("rb", buffering=0) as source:
        for part in (header, *parts):
            crc, left = 0, part.nbytes
            while left and (piece := source.read(min(left, _VERIFIED_PIECE))):
                digest.update(piece)
                crc = zlib.crc32(piece, crc)
                left -= len(piece)
            if left or part.offset != position or crc != part.crc:
                raise _not_as_written(path, part.offset)
            position += part.nbytes
        if position != file.nbytes or source.read(1):
            raise _not_as_written(path, position)
    return FileRecord(
        name=file.name,
        kind=file.subject.kind,
        of=file.subject.of,
        nbytes=position,
        sha256=digest.hexdigest(),
    )


def _not_as_written(path: Path, offset: int) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"the data on disk differ from the written data (at byte {offset})",
        "check the disk, or save to a different disk",
        str(path),
    )


# -- Reading.


class TensorReader(OpensFiles):
    """Reads exactly the requested bytes from one or several files."""

    def __init__(self, files: Iterable[Path], *, subject: Subject = EXPORT) -> None:
        super().__init__(os.O_RDONLY)
        self._subject = subject
        self._homes: dict[str, Path] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """Tensors by name."""
        self.metadata: list[dict[str, str]] = []
        """Metadata in the header of each file."""
        for file in files:
            tensors, metadata = read_header(file)
            if twice := [name for name in tensors if name in self._homes]:
                raise CheckpointCorruptError(
                    f"is also in {self._homes[twice[0]].name}",
                    "use a different checkpoint",
                    f"{file.name}: {shorten(twice[0])}",
                )
            self.tensors |= tensors
            self._homes |= dict.fromkeys(tensors, file)
            self.metadata.append(metadata)

    def stored(self, name: str) -> StoredTensor:
        """Return the dtype, full shape and byte offset of a tensor."""
        if name not in self.tensors:
            raise CheckpointCorruptError(
                "is in no file", "use a different checkpoint", f"{self._subject.prefix}/{name}"
            )
        return self.tensors[name]

    def check(self, name: str, dtype: torch.dtype | None, shape: Sequence[int]) -> None:
        """Check that a tensor exists and has the expected dtype and shape.

        Args:
            name: Name of the tensor.
            dtype: Expected dtype.
            shape: Expected full shape.
        """
        stored = self.stored(name)
        if (stored.dtype, stored.shape) != (dtype, tuple(shape)):
            raise CheckpointCorruptError(
                f"is {stored.dtype} {stored.shape} instead of {dtype} {tuple(shape)}",
                "use a different checkpoint",
                f"{self._homes[name].name}: {shorten(name)}",
            )

    def fill(self, into: torch.Tensor, name: str, start: int = 0) -> None:
        """Copy a part of a stored tensor into the tensor ``into``.

        Args:
            into: 1-D tensor on any device, with as many elements as the part.
            name: Name of the tensor.
            start: Index of the part's first element in the flattened tensor.
        """
        stored = self.stored(name)
        numel = math.prod(stored.shape)
        if start + into.numel() > numel:
            raise CheckpointCorruptError(
                f"has {numel} elements, but elements {start} to {start + into.numel()} are needed",
                "use a different checkpoint",
                f"{self._homes[name].name}: {name}",
            )
        offset = stored.offset + start * stored.dtype.itemsize
        if into.device.type == "cpu" and into.is_contiguous() and into.dtype == stored.dtype:
            self._read(self._homes[name], into, offset)
            return
        for piece in torch.split(into, _PIECE_ELEMENTS):
            buffer = torch.empty(piece.numel(), dtype=stored.dtype)
            self._read(self._homes[name], buffer, offset)
            piece.copy_(buffer)
            offset += buffer.nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        stored = self.stored(name)
        flat = torch.empty(math.prod(stored.shape), dtype=stored.dtype)
        self.fill(flat, name)
        return flat.view(stored.shape)

    def _read(self, path: Path, into: torch.Tensor, offset: int) -> None:
        if not into.numel():
            return
        try:
            view = memoryview(into.detach().view(torch.uint8).numpy().data)
            missing = into.nbytes - stored_files.read_at(self._descriptor(path), view, offset)
            if missing:
                raise OSError(f"the file ends {missing} bytes too early")
        except OSError as error:
            raise CheckpointCorruptError(
                f"cannot be read ({error})", "use a different checkpoint", str(path)
            ) from error
