"""Tensors out of a checkpoint: any part of a parameter, and one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from zerotune.checkpoint.contents import BUFFER, MASTER, shadow_key, state_key
from zerotune.checkpoint.manifest import FragmentRecord, Manifest
from zerotune.checkpoint.randomness import PREFIX
from zerotune.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class CheckpointReader:
    """Reads tensors from the files of a checkpoint, which are mapped, not loaded.

    A part of a parameter is put together from whatever parts were saved, on whichever ranks.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        rank: Whose buffers and generators are read.

    Raises:
        CheckpointCorruptError: A tensor is missing or a file is not in safetensors format.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, rank: int) -> None:
        self._folder = folder
        self._own = manifest.ranks[rank].file.name
        # Among replicas, rank 0 alone wrote weights and what goes with them.
        self._shadows = manifest.ranks[0 if manifest.replicated else rank].file.name
        self._files: dict[str, Any] = {}
        self._open = ExitStack()
        self._parts: dict[str, list[tuple[FragmentRecord, str]]] = {}
        for record in manifest.ranks:
            for fragment in record.fragments:
                parts = self._parts.setdefault(fragment.name, [])
                parts.append((fragment, record.file.name))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[0].start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def record(self, name: str) -> FragmentRecord:
        """What the manifest says of a parameter's optimizer states, by its first part."""
        if name not in self._parts:
            raise CheckpointCorruptError(
                "is in no file", key=MASTER + name, fix="use another checkpoint"
            )
        return self._parts[name][0][0]

    def master(self, into: torch.Tensor, name: str, start: int) -> None:
        """Copy master weights into a 1-D tensor, from element ``start`` of the parameter on."""
        self._assemble(into, name, start, prefix=MASTER)

    def optimizer_state(self, into: torch.Tensor, state: str, name: str, start: int) -> None:
        """Copy an optimizer state into a 1-D tensor, as ``master`` does."""
        self._assemble(into, name, start, prefix=state_key(state, ""))

    def shadow(self, name: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a shadow for this rank, read when they are looked up."""
        return ShadowTensors(self, name)

    def buffers(self) -> dict[str, torch.Tensor]:
        """This rank's buffers, by dotted name."""
        named = self._named(BUFFER, self._own)
        return {name: self._get(self._own, key) for name, key in named.items()}

    def generators(self) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
        """This rank's generator states, under the names they were saved by, and metadata."""
        keys = self._named(PREFIX, self._own).values()
        tensors = {key: self._get(self._own, key) for key in keys}
        return tensors, self._file(self._own).metadata() or {}

    def shadow_keys(self, name: str) -> list[str]:
        """Names of a shadow's tensors for this rank."""
        return list(self._named(shadow_key(name, ""), self._shadows))

    def shadow_tensor(self, name: str, key: str) -> torch.Tensor:
        """One tensor of a shadow."""
        return self._get(self._shadows, shadow_key(name, key))

    def _assemble(self, into: torch.Tensor, name: str, start: int, *, prefix: str) -> None:
        stop = start + into.numel()
        copied = 0
        for part, file in self._parts.get(name, ()):
            first, last = max(start, part.start), min(stop, part.stop)
            if first >= last:
                continue
            key = prefix + part.key
            piece = self._slice(file, key, first - part.start, last - part.start)
            into[first - start : last - start].copy_(piece)
            copied += last - first
        if copied != into.numel():
            raise CheckpointCorruptError(
                f"holds {copied} of the elements {start} to {stop}",
                key=f"{prefix}{name}",
                fix="use another checkpoint",
            )

    def _named(self, prefix: str, file: str) -> dict[str, str]:
        """Full names of a file's tensors by the rest of their names."""
        keys = self._file(file).keys()
        return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            try:
                file = safe_open(str(path), framework="pt", device="cpu")
                self._files[name] = self._open.enter_context(file)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
        return self._files[name]

    def _get(self, file: str, key: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(key)
        except SafetensorError as error:
            raise _unreadable(self._folder / file, error) from error
        return tensor

    def _slice(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        try:
            piece: torch.Tensor = self._file(file).get_slice(key)[start:stop]
        except SafetensorError as error:
            raise _unreadable(self._folder / file, error) from error
        return piece


class ShadowTensors(Mapping[str, torch.Tensor]):
    """A shadow's tensors, read one by one."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._keys = reader.shadow_keys(name)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self._reader.shadow_tensor(self._name, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _unreadable(path: Path, error: Exception) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"cannot be read ({error})", key=str(path), fix="use another checkpoint"
    )
