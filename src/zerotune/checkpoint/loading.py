"""``load_checkpoint``: everything is checked before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune.checkpoint import randomness
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.comparing import changes, check_model, check_plan
from zerotune.checkpoint.contents import ShadowLike, persistent_buffers
from zerotune.checkpoint.folders import check_files, find_checkpoint
from zerotune.checkpoint.manifest import Manifest, RankRecord
from zerotune.checkpoint.reading import CheckpointReader
from zerotune.checkpoint.tensorfile import hash_of
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointCorruptError, CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.backend.master_weights import EditableFragment


@attrs.frozen(kw_only=True)
class CheckpointContents:
    """What a loaded checkpoint held."""

    extra: Mapping[str, Any]
    """What the caller gave to ``save_checkpoint``."""
    manifest: Manifest
    decisions: tuple[Decision, ...]
    """What was left out, or is used with another value than was saved."""


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
) -> CheckpointContents:
    """Continue where ``save_checkpoint`` stopped.

    Collective: every rank must call it, with the same arguments. Hashes, model and plan are
    checked first; a checkpoint that does not fit leaves the engine as it was.

    Args:
        directory: A folder written by ``save_checkpoint``.
        engine: An engine of the same model, plan and world size.
        shadows: EMA shadows, attached to the engine, by the names they were saved under.
        rng: Also restore the random number generators.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        What the caller had saved beside the engine.

    Raises:
        CheckpointError: There is no checkpoint here.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names it.
        CheckpointMismatchError: It belongs to another model, plan or world size; the message
            names every difference.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"loading checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    load = _Load(engine=engine, shadows=shadows)
    found = together(group, "find the checkpoint", lambda: load.find(directory))
    if any(arguments != found[0] for arguments in found):
        group.agree(found[group.rank], "arguments of load_checkpoint")
    decisions = together(group, "compare the checkpoint", load.compare)[0]
    together(group, "verify the checkpoint", load.verify)
    load.restore()
    together(group, "restore the rest", lambda: load.restore_rest(rng=rng))
    announce(decisions, rank=group.rank)
    manifest = load.manifest
    return CheckpointContents(extra=manifest.extra, manifest=manifest, decisions=decisions)


def verify_checkpoint(directory: str | os.PathLike[str]) -> Manifest:
    """Check every file of a checkpoint against its size and hash. Not collective.

    Raises:
        CheckpointError: There is no checkpoint here.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names it.
    """
    folder, manifest = find_checkpoint(directory)
    check_files(folder, manifest)
    for record in manifest.ranks:
        _check_hash(folder, record)
    return manifest


class _Load:
    """The stages of one load, as one rank goes through them."""

    manifest: Manifest

    def __init__(self, *, engine: Engine, shadows: Mapping[str, ShadowLike]) -> None:
        self._engine = engine
        self._shadows = shadows
        self._folder = Path()

    def find(self, directory: str | os.PathLike[str]) -> tuple[Any, ...]:
        """Read the manifest; returns what all ranks must agree on."""
        self._folder, self.manifest = find_checkpoint(directory)
        return str(self._folder), self.manifest.created, sorted(self._shadows)

    def compare(self) -> tuple[Decision, ...]:
        """Refuse what does not fit."""
        check_model(self.manifest, self._engine)
        check_plan(self.manifest, self._engine)
        absent = [name for name in self._shadows if name not in self.manifest.shadows]
        if absent:
            raise CheckpointMismatchError(
                f"the checkpoint has no such shadow; it has {list(self.manifest.shadows)}",
                key="shadows",
                value=absent,
                fix="leave it out: it then starts from the loaded weights",
            )
        return (*changes(self.manifest, self._engine), *self._left_out())

    def verify(self) -> None:
        """Check that all files are there, and the hash of this rank's share of them."""
        check_files(self._folder, self.manifest)
        group = self._engine.group
        for record in self.manifest.ranks[group.rank :: group.world_size]:
            _check_hash(self._folder, record)

    def restore(self) -> None:
        """Copy weights and optimizer states into the engine. Collective."""
        with self._reader() as reader, self._engine.master_weights.editing() as fragments:
            for fragment in fragments:
                _restore_fragment(reader, fragment)

    def restore_rest(self, *, rng: bool) -> None:
        """Counters, buffers, shadows and, last, the generators."""
        self._engine.load_state(self.manifest.state)
        with self._reader() as reader:
            saved = reader.buffers()
            with torch.no_grad():
                for name, buffer in persistent_buffers(self._engine.module).items():
                    buffer.copy_(saved[name])
            for name, shadow in self._shadows.items():
                shadow.load_state_dict(reader.shadow(name))
            if rng and self.manifest.rng:
                tensors, metadata = reader.generators()
                randomness.restore(tensors, metadata.get(randomness.TEXT, ""))

    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self._folder, self.manifest, rank=self._engine.group.rank)

    def _left_out(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(
                key=f"shadows.{name}",
                before="saved",
                after=None,
                reason="the checkpoint holds this shadow and load_checkpoint was not given one",
                severity="warning",
            )
            for name in self.manifest.shadows
            if name not in self._shadows
        )


def _restore_fragment(reader: CheckpointReader, fragment: EditableFragment) -> None:
    address = fragment.address
    reader.master(fragment.value, address.name, address.start)
    record = reader.record(address.name)
    states = fragment.ensure_states(record.states)
    for name, state in states.items():
        if name in record.states:
            reader.optimizer_state(state, name, address.name, address.start)
        else:
            state.zero_()
    if record.scalars:
        fragment.set_scalars(record.scalars)
    if states:
        # A counter without states would look to the optimizer like states it has made.
        fragment.set_step(record.step or 0)


def _check_hash(folder: Path, record: RankRecord) -> None:
    path = folder / record.file.name
    if hash_of(path) != record.file.sha256:
        raise CheckpointCorruptError(
            "was altered after it was written (its hash differs)",
            key=str(path),
            fix="use another checkpoint",
        )
