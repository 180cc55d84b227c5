"""Tensors out of a checkpoint: any part of a parameter, and one tensor in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerotune.checkpoint import tensorfile
from zerotune.checkpoint.contents import BUFFER, shadow_key
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.randomness import PREFIX
from zerotune.checkpoint.sharedfile import Subject
from zerotune.checkpoint.tensorfile import StoredTensor, read_header
from zerotune.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from zerotune.backend.master_weights import FragmentAddress

_PIECE = 2**22
"""Elements brought to another device at a time."""


class CheckpointReader:
    """Reads exactly the bytes that are asked for, from the files of a checkpoint.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.

    Raises:
        CheckpointCorruptError: A tensor is missing or a file is not in safetensors format.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._places: dict[Subject, dict[str, tuple[str, StoredTensor]]] = {}
        self._texts: dict[str, dict[str, str]] = {}
        self._open: dict[str, int] = {}

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

    def names(self, subject: Subject) -> tuple[str, ...]:
        """Names of the tensors of a subject."""
        return tuple(self._tensors(subject))

    def stored(self, subject: Subject, name: str) -> StoredTensor:
        """Dtype and full shape of a tensor."""
        return self._place(subject, name)[1]

    def fill(self, into: torch.Tensor, subject: Subject, name: str, start: int = 0) -> None:
        """Copy a part of a tensor.

        Args:
            into: 1-D, on any device, of the dtype that was saved.
            subject: What the tensor is.
            name: Its name.
            start: First element in the flattened tensor.
        """
        file, stored = self._place(subject, name)
        if start + into.numel() > math.prod(stored.shape):
            raise CheckpointCorruptError(
                f"has {math.prod(stored.shape)} elements and {start} to {start + into.numel()} "
                "are wanted",
                key=f"{file}: {name}",
                fix="use another checkpoint",
            )
        offset = stored.offset + start * stored.dtype.itemsize
        if into.device.type == "cpu" and into.is_contiguous() and into.dtype == stored.dtype:
            self._read(file, into, offset)
            return
        for piece in torch.split(into, _PIECE):
            buffer = torch.empty(piece.numel(), dtype=stored.dtype)
            self._read(file, buffer, offset)
            piece.copy_(buffer)
            offset += buffer.nbytes

    def tensor(self, subject: Subject, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        stored = self.stored(subject, name)
        flat = torch.empty(math.prod(stored.shape), dtype=stored.dtype)
        self.fill(flat, subject, name)
        return flat.view(stored.shape)

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's buffers, by dotted name."""
        subject = _rank(rank)
        named = [name for name in self.names(subject) if name.startswith(BUFFER)]
        return {name.removeprefix(BUFFER): self.tensor(subject, name) for name in named}

    def generators(self, rank: int) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
        """A rank's generator states, under the names they were saved by, and metadata."""
        subject = _rank(rank)
        named = [name for name in self.names(subject) if name.startswith(PREFIX)]
        (file,) = self._manifest.files_of(subject.kind, subject.of)
        return {name: self.tensor(subject, name) for name in named}, self._texts[file.name]

    def shadow(
        self, name: str, addresses: Sequence[FragmentAddress], *, rank: int
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of a shadow for these fragments, read when they are looked up.

        Args:
            name: The shadow.
            addresses: The fragments this rank owns now.
            rank: Whose file tells what belongs to no fragment.
        """
        return ShadowTensors(self, name, addresses, rank=rank)

    def _tensors(self, subject: Subject) -> dict[str, tuple[str, StoredTensor]]:
        if subject not in self._places:
            places = {}
            for file in self._manifest.files_of(subject.kind, subject.of):
                tensors, self._texts[file.name] = read_header(self._folder / file.name)
                places.update({name: (file.name, stored) for name, stored in tensors.items()})
            self._places[subject] = places
        return self._places[subject]

    def _place(self, subject: Subject, name: str) -> tuple[str, StoredTensor]:
        found = self._tensors(subject).get(name)
        if found is None:
            raise CheckpointCorruptError(
                "is in no file", key=f"{subject.prefix}/{name}", fix="use another checkpoint"
            )
        return found

    def _read(self, file: str, into: torch.Tensor, offset: int) -> None:
        path = self._folder / file
        if not into.numel():
            return
        try:
            if file not in self._open:
                self._open[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            view = memoryview(into.detach().view(torch.uint8).numpy().data)
            done = tensorfile.read_at(self._open[file], view, offset)
        except OSError as error:
            raise _unreadable(path, str(error)) from error
        if done != into.nbytes:
            raise _unreadable(path, f"it ends {into.nbytes - done} bytes too early")


class ShadowTensors(Mapping[str, torch.Tensor]):
    """A shadow's tensors for the fragments of this rank, read one by one."""

    def __init__(
        self,
        reader: CheckpointReader,
        shadow: str,
        addresses: Sequence[FragmentAddress],
        *,
        rank: int,
    ) -> None:
        self._reader = reader
        self._subject = Subject(kind="shadow", of=shadow)
        self._rank = _rank(rank)
        prefix = shadow_key(shadow, "")
        others = [name for name in reader.names(self._rank) if name.startswith(prefix)]
        self._others = {name.removeprefix(prefix): name for name in others}
        saved = set(reader.names(self._subject))
        self._addresses = {a.key: a for a in addresses if a.name in saved}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._others:
            return self._reader.tensor(self._rank, self._others[key])
        address = self._addresses[key]
        dtype = self._reader.stored(self._subject, address.name).dtype
        into = torch.empty(address.numel, dtype=dtype)
        self._reader.fill(into, self._subject, address.name, address.start)
        return into

    def __iter__(self) -> Iterator[str]:
        yield from self._addresses
        yield from self._others

    def __len__(self) -> int:
        return len(self._addresses) + len(self._others)


def _rank(rank: int) -> Subject:
    return Subject(kind="rank", of=str(rank))


def _unreadable(path: Path, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"cannot be read ({reason})", key=str(path), fix="use another checkpoint"
    )
