"""Weights and optimizer states from a checkpoint into the fragments of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zerotune.checkpoint.manifest import ParameterRecord
from zerotune.checkpoint.sharedfile import WEIGHTS, Subject

if TYPE_CHECKING:
    from zerotune.backend.master_weights import EditableFragment
    from zerotune.checkpoint.reading import CheckpointReader


class Filler:
    """Fills fragments one by one, whatever parts of which parameters they are.

    Args:
        reader: The checkpoint.
        records: Its parameters.
        states: Whether the optimizer's states carry over; if not they begin anew.
    """

    def __init__(
        self, reader: CheckpointReader, records: Iterable[ParameterRecord], *, states: bool
    ) -> None:
        self._reader = reader
        self._records = {record.name: record for record in records}
        self._states = states
        self._steps: dict[int, int] = {}

    def fill(self, fragment: EditableFragment) -> None:
        """Overwrite a fragment's weights and states."""
        address = fragment.address
        record = self._records[address.name]
        self._reader.fill(fragment.value, WEIGHTS, address.name, address.start)
        saved = record.states if self._states else ()
        states = fragment.ensure_states(saved) if saved else fragment.states
        for name, state in states.items():
            if name in saved:
                subject = Subject(kind="optimizer", of=name)
                self._reader.fill(state, subject, address.name, address.start)
            else:
                state.zero_()
        if saved and record.scalars:
            fragment.set_scalars(record.scalars)
        if states:
            # A counter without states would look to the optimizer like states it has made.
            fragment.set_step(self._step(address.slab, record.step if saved else 0))

    def _step(self, slab: int, step: int | None) -> int:
        """The step of a slab so far: its parameters share one counter, the largest is its own."""
        self._steps[slab] = max(self._steps.get(slab, 0), step or 0)
        return self._steps[slab]
