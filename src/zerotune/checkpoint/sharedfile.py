"""One safetensors file that many ranks fill: each writes its parts at their byte offsets.

Nothing is gathered. Every part carries a checksum of what was meant; the finished file is read
once, against these, and only then gets the hash that stands in the manifest.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch

from zerotune.checkpoint import tensorfile
from zerotune.checkpoint.manifest import FileRecord
from zerotune.checkpoint.tensorfile import TensorSpec, bytes_of, file_header
from zerotune.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_METADATA: Final = {"format": "pt"}
_PIECE: Final = 2**20
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
        with (folder / self.name).open("xb", buffering=0) as file:
            tensorfile.write_at(file.fileno(), memoryview(self.header), 0)
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


class SharedFileWriter:
    """Writes this rank's parts into files that all ranks share.

    Args:
        folder: Where rank 0 created them.
        files: The files.
    """

    def __init__(self, folder: Path, files: Sequence[SharedFile]) -> None:
        self._folder = folder
        self._places = {(file.subject, key): file for file in files for key in file.offsets}
        self._specs = {(file.subject, spec.key): spec for file in files for spec in file.specs}
        self._open: dict[str, int] = {}
        self._written: list[Written] = []

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
        crc, first = 0, offset
        for piece in bytes_of(tensor, spec.dtype):
            with tensorfile.naming(self._folder / file.name):
                tensorfile.write_at(self._descriptor(file.name), piece, offset)
            crc = zlib.crc32(piece, crc)
            offset += len(piece)
        if offset > first:
            self._written.append(
                Written(file=file.name, offset=first, nbytes=offset - first, crc=crc)
            )

    @property
    def written(self) -> tuple[Written, ...]:
        """What was written so far."""
        return tuple(self._written)

    def sync(self) -> None:
        """Bring everything to disk."""
        for name, descriptor in self._open.items():
            # Also here a full disk may first be told.
            with tensorfile.naming(self._folder / name):
                os.fsync(descriptor)

    def finish(self) -> tuple[Written, ...]:
        """Bring everything to disk; what was written."""
        self.sync()
        return self.written

    def close(self) -> None:
        """Close the files as they are."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[name]


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
            while left and (piece := source.read(min(left, _PIECE))):
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
