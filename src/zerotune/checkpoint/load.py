"""Load a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune.backend.distributed import together
from zerotune.checkpoint.adapting import (
    adapted_state,
    keeps_states,
    optimizer_decisions,
    restart_generators,
    world_decisions,
)
from zerotune.checkpoint.comparison import changes, check_accumulation, check_model, load_decision
from zerotune.checkpoint.contents import BUFFER, ShadowLike, persistent_buffers
from zerotune.checkpoint.files import check_files, check_hashes
from zerotune.checkpoint.folders import find_checkpoint
from zerotune.checkpoint.generators import check_generators, restore_generators
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.reader import (
    CheckpointReader,
    Filler,
    ShadowTensors,
    rank_subject,
    state_subject,
)
from zerotune.checkpoint.tensors import WEIGHTS, Subject
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


# -- ``load_checkpoint``: everything is checked before anything is changed.


@attrs.frozen(kw_only=True)
class CheckpointContents:
    """Manifest, caller's data and decisions of a loaded checkpoint."""

    extra: Mapping[str, Any]
    """The ``extra`` data passed to ``save_checkpoint``."""
    manifest: Manifest
    decisions: tuple[Decision, ...]
    """Decisions about saved data that was not loaded and about values that were changed."""


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
) -> CheckpointContents:
    """Load a checkpoint into an engine, even if its plan differs from the saved run's plan.

    Collective: every rank must call ``load_checkpoint`` with the same arguments. Files and model
    are checked before anything is loaded, so a checkpoint of a different model leaves the engine
    unchanged. Stage, offload, precision, number of processes and the use of DeepSpeed may differ
    from the saved run. Every rank reads only its fragments. Effects of a different plan are
    recorded as decisions.

    Args:
        directory: A folder written by ``save_checkpoint`` or the recipe ``convert.py``.
        engine: An engine of the same model.
        shadows: EMA shadows attached to the engine, by their saved names.
        rng: Also restore the states of the random number generators.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.

    Returns:
        The caller's ``extra`` data, the manifest and the decisions.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint, or the engine has accumulated micro
            batches.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names the file.
        CheckpointMismatchError: The checkpoint belongs to a different model; the message names
            every tensor that is missing, unexpected or of a different shape.
        CollectiveError: A rank did not call ``load_checkpoint``, or the arguments differ.
    """
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"loading checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    load = _Load(engine=engine, shadows=shadows)
    agreed = together(group, "find the checkpoint", lambda: load.find(directory))
    if any(arguments != agreed[0] for arguments in agreed):
        group.agree(agreed[group.rank], "arguments of load_checkpoint")
    decisions = together(group, "compare the checkpoint", lambda: load.compare(rng=rng))[0]
    together(group, "verify the checkpoint", load.verify)
    together(group, "check the files' headers", lambda: load.judge(rng=rng))
    together(group, "compare the shadows", load.compare_shadows)
    with engine.replacing():
        load.restore()
        together(group, "restore the rest", lambda: load.restore_rest(rng=rng))
    announce(decisions, rank=group.rank)
    manifest = load.manifest
    return CheckpointContents(extra=manifest.extra, manifest=manifest, decisions=decisions)


class _Load:
    """The stages of one load on one rank."""

    manifest: Manifest

    def __init__(self, *, engine: Engine, shadows: Mapping[str, ShadowLike]) -> None:
        self._engine = engine
        self._shadows = shadows
        self._folder = Path()

    def find(self, directory: str | os.PathLike[str]) -> tuple[Any, ...]:
        """Read the manifest, and return the values that must be equal on all ranks."""
        self._folder, self.manifest = find_checkpoint(directory)
        return str(self._folder), self.manifest.created, sorted(self._shadows)

    def compare(self, *, rng: bool) -> tuple[Decision, ...]:
        """Check that the checkpoint fits the engine, and return decisions about differences."""
        check_accumulation(self._engine)
        check_model(self.manifest, self._engine)
        absent = [name for name in self._shadows if name not in self.manifest.shadows]
        if absent:
            raise CheckpointMismatchError(
                f"the checkpoint has no such shadow; its shadows are {list(self.manifest.shadows)}",
                "omit the shadow, which then starts from the loaded weights",
                "shadows",
                absent,
            )
        return (
            *changes(self.manifest, self._engine),
            *optimizer_decisions(self.manifest, self._engine),
            *adapted_state(self.manifest, self._engine)[1],
            *world_decisions(self.manifest, self._engine, rng=rng),
            *self._left_out(),
        )

    def verify(self) -> None:
        """Check the sizes of all files, and the hashes of this rank's share of the files."""
        check_files(self._folder, self.manifest)
        group = self._engine.group
        check_hashes(self._folder, self.manifest.files[group.rank :: group.world_size])

    def judge(self, *, rng: bool) -> None:
        """Check the headers of all files before the first weight is changed."""
        with self._reader() as reader:
            for record in self.manifest.parameters:
                reader.of(WEIGHTS).check(record.name, torch.float32, record.shape)
                for state in record.states:
                    form, saved = self.manifest.format_of(state), reader.of(state_subject(state))
                    if form.whole:
                        saved.stored(record.name)
                        continue
                    dtype, shape = getattr(torch, form.dtype), form.shape_for(record.shape)
                    saved.check(record.name, dtype, shape)
            shapes = {record.name: record.shape for record in self.manifest.parameters}
            for shadow in self.manifest.shadows:
                averaged = reader.of(Subject(kind="shadow", of=shadow))
                for name in averaged.tensors:
                    averaged.check(name, torch.float32, shapes.get(name, ()))
            self._judge_rank(reader, rng=rng)

    def _judge_rank(self, reader: CheckpointReader, *, rng: bool) -> None:
        """Check the state that this rank loads for itself: buffers and generators."""
        alone, weights = reader.of(rank_subject(self._like)), reader.of(WEIGHTS)
        saved = {record.name: record.dtype for record in self.manifest.buffers}
        for name, buffer in persistent_buffers(self._engine.module).items():
            if BUFFER + name in alone.tensors:
                dtype = getattr(torch, saved.get(name, ""), None)
                alone.check(BUFFER + name, dtype, buffer.shape)
            else:
                weights.check(name, torch.float32, buffer.shape)
        if rng and self.manifest.rng:
            check_generators(*reader.generators(self._like))

    def compare_shadows(self) -> None:
        """Check that the saved shadows belong to the engine's parameters."""
        with self._reader() as reader:
            for name, shadow in self._shadows.items():
                saved = self._shadow(reader, name)
                state = shadow.state_dict()
                missing = [key for key in state if not saved.holds(key, state)]
                if missing:
                    raise CheckpointMismatchError(
                        f"the saved shadow {name!r} is incomplete",
                        "omit the shadow, which then starts from the loaded weights",
                        f"shadows.{name}",
                        missing[:3],
                    )

    def restore(self) -> None:
        """Copy weights and optimizer states into the engine. Collective."""
        with self._reader() as reader, self._engine.master_weights.editing() as fragments:
            filler = Filler(
                reader,
                self.manifest.parameters,
                states=keeps_states(self.manifest, self._engine),
            )
            for fragment in fragments:
                filler.fill(fragment)

    def restore_rest(self, *, rng: bool) -> None:
        """Restore counters, buffers, shadows and random number generators."""
        self._engine.load_state(adapted_state(self.manifest, self._engine)[0])
        rank = self._engine.group.rank
        with self._reader() as reader:
            saved = reader.buffers(self._like)
            with torch.no_grad():
                for name, buffer in persistent_buffers(self._engine.module).items():
                    # A checkpoint converted from a model folder has buffers among its weights.
                    buffer.copy_(saved[name] if name in saved else reader.tensor(WEIGHTS, name))
            for name, shadow in self._shadows.items():
                shadow.load_state_dict(self._shadow(reader, name))
            if rng and self.manifest.rng:
                tensors, text = reader.generators(self._like)
                restore_generators(tensors, text)
                if rank != self._like:
                    restart_generators(tensors, rank=rank)

    @property
    def _like(self) -> int:
        """Rank of the saved run whose state this rank continues."""
        rank = self._engine.group.rank
        return rank if rank < self.manifest.world_size else 0

    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self._folder, self.manifest)

    def _shadow(self, reader: CheckpointReader, name: str) -> ShadowTensors:
        addresses = self._engine.master_weights.addresses
        return ShadowTensors(reader, name, addresses, rank=self._like)

    def _left_out(self) -> tuple[Decision, ...]:
        reason = "this shadow is in the checkpoint, but was not passed to load_checkpoint"
        return tuple(
            load_decision(f"shadows.{name}", "saved", None, reason, warning=True)
            for name in self.manifest.shadows
            if name not in self._shadows
        )
