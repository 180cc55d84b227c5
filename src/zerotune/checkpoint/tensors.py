"""Safetensors files written and read piece by piece: no second copy of the weights is needed.

``safetensors.torch.save_file`` wants every tensor in memory at once. But the file is an 8-byte
length, a JSON header that follows from names and shapes alone, and the tensors' bytes one after
another: so the header can be written first and the bytes as they come, by one process or by all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import torch
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.files import naming, sync_file
from zerotune.backend.stored import TENSOR_DTYPES, OpensFiles
from zerotune.checkpoint.manifest import FileRecord
from zerotune.errors import CheckpointCorruptError, CheckpointError

_PIECE: Final = 2**22
"""Elements brought to the CPU and written at a time."""

_NAMES: Final = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


@attrs.frozen(kw_only=True)
class TensorSpec:
    """A tensor that will be written."""

    key: str
    """Its name in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(key=key, dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Everything in the file before the first tensor's bytes.

    Raises:
        CheckpointError: Two tensors share a name, or the format has no such dtype.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        if spec.key in entries:
            raise CheckpointError("two tensors share this name", key=spec.key)
        if spec.dtype not in _NAMES:
            raise CheckpointError(
                f"safetensors cannot hold {spec.dtype}",
                key=spec.key,
                fix="register the buffer with persistent=False, or as a real dtype",
            )
        entries[spec.key] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The bytes of the first tensor begin at a multiple of 8, as the library's own writer does.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> int:
    """Bytes the file will have."""
    return len(file_header(specs, metadata)) + sum(spec.nbytes for spec in specs)


class TensorFileWriter(Closable):
    """Writes one safetensors file, tensor by tensor, hashing on the way.

    Args:
        path: The file; must not exist.
        specs: What will be written, in this order.
        metadata: Text stored in the header.

    Raises:
        CheckpointError: As in ``file_header``.
    """

    def __init__(
        self, path: Path, *, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._path = path
        self._pending = list(reversed(specs))
        self._hash = hashlib.sha256()
        self._nbytes = 0
        header = file_header(specs, metadata)
        self._file = path.open("xb", buffering=0)
        try:
            self._write(memoryview(header))
        except BaseException:
            self._file.close()
            raise

    def append(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor.

        Args:
            key: Its name; the next of ``specs``.
            tensor: Its elements, on any device.

        Raises:
            CheckpointError: It is not the tensor that was announced.
        """
        spec = TensorSpec.of(key, tensor)
        expected = self._pending.pop() if self._pending else None
        if spec != expected:
            raise CheckpointError(
                f"expected {expected} and got {spec}",
                key=self._path.name,
                fix="let nothing train while a checkpoint is saved",
            )
        for piece in bytes_of(tensor):
            self._write(piece)

    def finish(self) -> tuple[int, str]:
        """Bring everything to disk and close.

        Returns:
            Bytes and SHA-256 (hex) of the file.

        Raises:
            CheckpointError: Not every announced tensor was written.
        """
        if self._pending:
            raise CheckpointError(
                f"{len(self._pending)} tensors were not written", key=self._path.name
            )
        with naming(self._path):
            sync_file(self._file)
            self._file.close()
        return self._nbytes, self._hash.hexdigest()

    @override
    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _write(self, piece: memoryview) -> None:
        self._hash.update(piece)
        with naming(self._path):
            write_at(self._file.fileno(), piece, self._nbytes)
        self._nbytes += len(piece)


def write_at(descriptor: int, piece: memoryview, offset: int) -> None:
    """Write all of ``piece`` at a byte offset; the only place where tensors reach the disk."""
    while piece:
        # A write may stop short, at 2 GiB at the latest.
        written = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[written:], offset + written


def bytes_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """A tensor's elements as bytes, in ``dtype`` if given, from any device."""
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, _PIECE):
        if part.numel():
            yield part.cpu().to(dtype or part.dtype).contiguous().view(torch.uint8).numpy().data


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity in a tensor in host memory."""
    # A sum is much cheaper; only where that overflows the elements are looked at. numpy's is taken
    # by this thread alone, while torch's would take the cores from those that train.
    with np.errstate(all="ignore"):
        total = float(tensor.float().numpy().sum())
    return math.isfinite(total) or bool(tensor.isfinite().all())


def without_nan(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN in a tensor on any device; infinities may be meant, as in a mask."""
    return not (tensor.is_floating_point() and bool(tensor.detach().float().isnan().any()))


def hash_of(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


# -- One safetensors file that many ranks fill: each writes its parts at their byte offsets.
#
# Nothing is gathered. Every part carries a checksum of what was meant; the finished file is read
# once, against these, and only then gets the hash that stands in the manifest.


_METADATA: Final = {"format": "pt"}
_VERIFIED_PIECE: Final = 2**20
"""Bytes read at a time."""


@attrs.frozen(kw_only=True)
class Subject:
    """What the tensors of a file are."""

    kind: str
    """``"weights"``, ``"optimizer"``, ``"shadow"`` or ``"rank"``."""
    of: str = ""
    """Name of the optimizer state or of the shadow; number of the rank."""

    @property
    def prefix(self) -> str:
        """What the names of its files begin with."""
        return f"{self.kind}.{self.of}" if self.of else self.kind


WEIGHTS: Final = Subject(kind="weights")


@attrs.frozen(kw_only=True, eq=False)
class SharedFile:
    """A file that does not exist yet, laid out to the last byte."""

    name: str
    subject: Subject
    specs: Sequence[TensorSpec]
    """fp32 tensors in their full shapes, by parameter name."""
    header: bytes
    offsets: Mapping[str, int]
    """Byte offset of each tensor in the file."""
    nbytes: int

    @classmethod
    def of(cls, name: str, subject: Subject, specs: Sequence[TensorSpec]) -> SharedFile:
        """Lay out a file of these tensors, one after the other."""
        header = file_header(specs, _METADATA)
        offsets, position = {}, len(header)
        for spec in specs:
            offsets[spec.key] = position
            position += spec.nbytes
        return cls(
            name=name,
            subject=subject,
            specs=tuple(specs),
            header=header,
            offsets=offsets,
            nbytes=position,
        )

    def create(self, folder: Path) -> None:
        """Make the file with its header and its size, on one rank."""
        path = folder / self.name
        with naming(path), path.open("xb", buffering=0) as file:
            write_at(file.fileno(), memoryview(self.header), 0)
            file.truncate(self.nbytes)


def lay_out(subject: Subject, specs: Iterable[TensorSpec], *, most: int) -> list[SharedFile]:
    """Files of at most ``most`` bytes for the tensors of a subject; a larger tensor has its own."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return [
        SharedFile.of(f"{subject.prefix}-{i:05d}-of-{len(shards):05d}.safetensors", subject, shard)
        for i, shard in enumerate(shards, start=1)
    ]


@attrs.frozen(kw_only=True)
class Written:
    """A run of bytes that was written, as it was meant."""

    file: str
    offset: int
    nbytes: int
    crc: int
    """CRC-32."""


class SharedFileWriter(OpensFiles):
    """Writes this rank's parts into files that all ranks share.

    Args:
        folder: Where rank 0 created them.
        files: The files.
    """

    def __init__(self, folder: Path, files: Sequence[SharedFile]) -> None:
        super().__init__(os.O_WRONLY)
        self._folder = folder
        self._places = {(file.subject, key): file for file in files for key in file.offsets}
        self._specs = {(file.subject, spec.key): spec for file in files for spec in file.specs}
        self._written: list[Written] = []
        self._not_finite: dict[str, None] = {}

    def write(self, subject: Subject, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write a part of a tensor.

        Args:
            subject: What the tensor is.
            name: The parameter.
            start: First element in the flattened parameter.
            tensor: The part, of any shape, on any device; fp32, or bf16, which is widened.

        Raises:
            CheckpointError: No file has room for it.
        """
        file, spec = self._places.get((subject, name)), self._specs.get((subject, name))
        if file is None or spec is None or tensor.dtype not in (spec.dtype, torch.bfloat16):
            raise CheckpointError(
                f"{subject.prefix} changed while it was saved",
                key=name,
                fix="let nothing train while a checkpoint is saved",
            )
        offset = file.offsets[name] + start * spec.dtype.itemsize
        crc, first, finite = 0, offset, True
        for piece in bytes_of(tensor, spec.dtype):
            with naming(self._folder / file.name):
                write_at(self._descriptor(self._folder / file.name), piece, offset)
            crc = zlib.crc32(piece, crc)
            finite = finite and all_finite(torch.frombuffer(piece, dtype=spec.dtype))
            offset += len(piece)
        if not finite:
            self._not_finite[f"{subject.prefix}/{name}"] = None
        if offset > first:
            self._written.append(
                Written(file=file.name, offset=first, nbytes=offset - first, crc=crc)
            )

    @property
    def written(self) -> tuple[Written, ...]:
        """What was written so far."""
        return tuple(self._written)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """In which tensors there was NaN or infinity, such as ``weights/conv.bias``."""
        return tuple(self._not_finite)

    def sync(self) -> None:
        """Bring everything to disk."""
        for path, descriptor in self._open.items():
            # Also here a full disk may first be told.
            with naming(path):
                os.fsync(descriptor)

    def finish(self) -> tuple[Written, ...]:
        """Bring everything to disk; what was written."""
        self.sync()
        return self.written


def confirm(folder: Path, file: SharedFile, written: Iterable[Written]) -> FileRecord:
    """Read a finished file once: is every byte there, and as it was meant?

    Args:
        folder: Where it lies.
        file: What it should be.
        written: What all ranks wrote, in any order.

    Returns:
        Its record for the manifest.

    Raises:
        CheckpointCorruptError: Something else is on the disk than was written.
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
        f"the disk does not hold what was written (at byte {offset})",
        key=str(path),
        fix="look at the disk, or save elsewhere",
    )
