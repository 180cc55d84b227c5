"""Read exactly the requested bytes of a checkpoint, and fill an engine's fragments with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune.backend.optimizers.classes import BLOCK, CODEBOOKS, decode, scale_of
from zerotune.checkpoint.contents import BUFFER, shadow_key
from zerotune.checkpoint.generators import GENERATOR, GENERATOR_TEXT
from zerotune.checkpoint.manifest import Manifest, ParameterRecord
from zerotune.checkpoint.tensors import WEIGHTS, Subject, TensorReader
from zerotune.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from zerotune.backend.fragments import EditableFragment, FragmentAddress

_DECODED_AT_ONCE: Final = 2**20
"""Codes read and decoded at a time, a multiple of ``BLOCK``."""


class CheckpointReader(Closable):
    """Reads exactly the requested bytes from the files of a checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self.manifest = manifest
        self._readers: dict[Subject, TensorReader] = {}

    def of(self, subject: Subject) -> TensorReader:
        """Return the reader for tensors of one kind; file headers are read at first use."""
        if subject not in self._readers:
            records = self.manifest.files_of(subject.kind, subject.of)
            files = [self._folder / record.name for record in records]
            self._readers[subject] = TensorReader(files, subject=subject)
        return self._readers[subject]

    def tensor(self, subject: Subject, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        return self.of(subject).tensor(name)

    def fill_state(self, into: torch.Tensor, state: str, address: FragmentAddress) -> None:
        """Copy a fragment's part of an optimizer state; codes are decoded unless copied as codes.

        Args:
            into: Tensor to fill, 1-D.
            state: Name of the state.
            address: The fragment. If codes or scales are copied, it begins at a block.
        """
        form, reader = self.manifest.format_of(state), self.of(state_subject(state))
        if not form.codebook or into.dtype == torch.uint8:
            reader.fill(into, address.name, address.start // form.block)
            return
        signed = CODEBOOKS[form.codebook]
        scaling = self.of(state_subject(scale_of(state)))
        for start in range(address.start // BLOCK * BLOCK, address.stop, _DECODED_AT_ONCE):
            stop = min(start + _DECODED_AT_ONCE, address.stop)
            codes = torch.empty(stop - start, dtype=torch.uint8)
            scales = torch.empty(-(-codes.numel() // BLOCK))
            reader.fill(codes, address.name, start)
            scaling.fill(scales, address.name, start // BLOCK)
            numbers = decode(codes, scales, signed=signed)[max(0, address.start - start) :]
            into[stop - address.start - len(numbers) : stop - address.start].copy_(numbers)

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a rank's buffers by dotted name."""
        reader = self.of(rank_subject(rank))
        named = [name for name in reader.tensors if name.startswith(BUFFER)]
        return {name.removeprefix(BUFFER): reader.tensor(name) for name in named}

    def generators(self, rank: int) -> tuple[dict[str, torch.Tensor], str]:
        """Return a rank's random generator states: tensors by name, and other states as JSON."""
        reader = self.of(rank_subject(rank))
        if len(reader.metadata) != 1:
            raise CheckpointCorruptError(
                f"has {len(reader.metadata)} files instead of one",
                "use a different checkpoint",
                rank_subject(rank).prefix,
            )
        named = [name for name in reader.tensors if name.startswith(GENERATOR)]
        text = reader.metadata[0].get(GENERATOR_TEXT, "")
        return {name: reader.tensor(name) for name in named}, text

    @override
    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()


class ShadowTensors(Mapping[str, torch.Tensor]):
    """Mapping that reads this rank's fragments of an EMA shadow, one tensor at a time."""

    def __init__(
        self,
        reader: CheckpointReader,
        shadow: str,
        addresses: Sequence[FragmentAddress],
        *,
        rank: int,
    ) -> None:
        self._shared = reader.of(Subject(kind="shadow", of=shadow))
        self._alone = reader.of(rank_subject(rank))
        prefix = shadow_key(shadow, "")
        others = [name for name in self._alone.tensors if name.startswith(prefix)]
        self._others = {name.removeprefix(prefix): name for name in others}
        self._addresses = {a.key: a for a in addresses if a.name in self._shared.tensors}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._others:
            return self._alone.tensor(self._others[key])
        address = self._addresses[key]
        into = torch.empty(address.numel, dtype=self._shared.stored(address.name).dtype)
        self._shared.fill(into, address.name, address.start)
        return into

    def holds(self, key: str, state: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the checkpoint contains a tensor, without reading its elements.

        Args:
            key: Name of the tensor.
            state: The shadow's current state. Fragments, whose keys contain the number of elements,
                are not read, because they may be on disk.
        """
        if key in self._others:
            stored, like = self._alone.stored(self._others[key]), state[key]
            return (stored.dtype, math.prod(stored.shape)) == (like.dtype, like.numel())
        return key in self._addresses

    def __iter__(self) -> Iterator[str]:
        yield from self._addresses
        yield from self._others

    def __len__(self) -> int:
        return len(self._addresses) + len(self._others)


def state_subject(name: str) -> Subject:
    """Return the subject of an optimizer state."""
    return Subject(kind="optimizer", of=name)


def rank_subject(rank: int) -> Subject:
    """Return the subject of the tensors that each rank has for itself."""
    return Subject(kind="rank", of=str(rank))


class Filler:
    """Loads saved values into an engine's fragments, even if the partitioning has changed.

    Args:
        reader: Reader of the checkpoint.
        records: Records of the checkpoint's parameters.
        states: Whether to load the saved optimizer states; ``False`` resets the optimizer.
    """

    def __init__(
        self, reader: CheckpointReader, records: Iterable[ParameterRecord], *, states: bool
    ) -> None:
        self._reader = reader
        self._records = {record.name: record for record in records}
        self._states = states
        self._steps: dict[int, int] = {}
        self._taken = max([record.step or 0 for record in self._records.values()], default=0)

    def fill(self, fragment: EditableFragment) -> None:
        """Overwrite a fragment's weights and optimizer states with the saved ones."""
        address = fragment.address
        record = self._records[address.name]
        self._reader.of(WEIGHTS).fill(fragment.value, address.name, address.start)
        saved = record.states if self._states else ()
        formats = {name: self._reader.manifest.format_of(name) for name in saved}
        whole = [name for name, form in formats.items() if form.whole]
        fragment.slab_states.set_whole(
            {name: self._reader.tensor(state_subject(name), record.name) for name in whole}
        )
        formats = {name: form for name, form in formats.items() if name not in whole}
        if formats:
            fragment.ensure_states(tuple(n for n, form in formats.items() if form.block == 1))
        # Codes are copied between equal optimizers; otherwise they are decoded, and encoded anew.
        states = fragment.stored if fragment.formats == formats else fragment.states
        for name, state in states.items():
            if name in formats:
                self._reader.fill_state(state, name, address)
            else:
                state.zero_()
        if saved and record.scalars:
            fragment.slab_states.set_scalars(record.scalars)
        elif not saved and not self._steps.get(address.slab):
            # No other parameter has set the slab's shared scalars.
            fragment.slab_states.begin_scalars_anew()
        if states or whole:
            # From a step counter without states, the optimizer would infer that states exist.
            step = (record.step or 0) if saved else 0
            # A flat tensor with one counter for all has the largest of its parameters' steps; where
            # parameters have their own, it counts the steps that it took part in, even without one.
            self._steps[address.slab] = max(self._steps.get(address.slab, 0), step)
            taken = (
                self._taken
                if saved and fragment.slab_states.counts_each
                else self._steps[address.slab]
            )
            fragment.set_step(step, largest=taken)
