"""``load_checkpoint``: everything is checked before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zerotune.checkpoint import randomness
from zerotune.checkpoint.adapting import (
    adapted_state,
    keeps_states,
    optimizer_decisions,
    restart_generators,
    world_decisions,
)
from zerotune.checkpoint.collective import together
from zerotune.checkpoint.comparing import changes, check_accumulation, check_model
from zerotune.checkpoint.contents import ShadowLike, persistent_buffers
from zerotune.checkpoint.filling import Filler
from zerotune.checkpoint.folders import check_files, find_checkpoint
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.reading import CheckpointReader
from zerotune.checkpoint.sharedfile import WEIGHTS
from zerotune.checkpoint.verifying import check_hashes
from zerotune.decisions import Decision, announce
from zerotune.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


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
    """Continue where ``save_checkpoint`` stopped, under the same plan or any other.

    Collective: every rank must call it, with the same arguments. Files and model are checked first;
    a checkpoint that does not fit leaves the engine as it was. Every rank then reads only the parts
    it owns: any stage, offload, precision and number of processes, DeepSpeed or not. Where the
    plan differs, what that changes is a recorded decision.

    Args:
        directory: A folder written by ``save_checkpoint`` or ``convert``.
        engine: An engine of the same model.
        shadows: EMA shadows, attached to the engine, by the names they were saved under.
        rng: Also restore the random number generators.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        What the caller had saved beside the engine.

    Raises:
        CheckpointError: There is no checkpoint here, or the engine has accumulated micro batches.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names it.
        CheckpointMismatchError: It belongs to another model; the message names every missing,
            unexpected or differently shaped tensor.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"loading checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    load = _Load(engine=engine, shadows=shadows)
    found = together(group, "find the checkpoint", lambda: load.find(directory))
    if any(arguments != found[0] for arguments in found):
        group.agree(found[group.rank], "arguments of load_checkpoint")
    decisions = together(group, "compare the checkpoint", lambda: load.compare(rng=rng))[0]
    together(group, "verify the checkpoint", load.verify)
    together(group, "compare the shadows", load.compare_shadows)
    load.restore()
    together(group, "restore the rest", lambda: load.restore_rest(rng=rng))
    announce(decisions, rank=group.rank)
    manifest = load.manifest
    return CheckpointContents(extra=manifest.extra, manifest=manifest, decisions=decisions)


def restore(
    directory: str | os.PathLike[str],
    *,
    into: Engine,
    shadows: Mapping[str, ShadowLike] | None = None,
) -> CheckpointContents:
    """``load_checkpoint`` by the name it has in a loop of one's own. Collective."""
    return load_checkpoint(directory, engine=into, shadows=shadows)


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

    def compare(self, *, rng: bool) -> tuple[Decision, ...]:
        """Refuse what does not fit; what will be otherwise than it was saved."""
        check_accumulation(self._engine)
        check_model(self.manifest, self._engine)
        absent = [name for name in self._shadows if name not in self.manifest.shadows]
        if absent:
            raise CheckpointMismatchError(
                f"the checkpoint has no such shadow; it has {list(self.manifest.shadows)}",
                key="shadows",
                value=absent,
                fix="leave it out: it then starts from the loaded weights",
            )
        return (
            *changes(self.manifest, self._engine),
            *optimizer_decisions(self.manifest, self._engine),
            *adapted_state(self.manifest, self._engine)[1],
            *world_decisions(self.manifest, self._engine, rng=rng),
            *self._left_out(),
        )

    def verify(self) -> None:
        """Check that all files are there, and the hash of this rank's share of them."""
        check_files(self._folder, self.manifest)
        group = self._engine.group
        check_hashes(self._folder, self.manifest.files[group.rank :: group.world_size])

    def compare_shadows(self) -> None:
        """Refuse a shadow of other parameters."""
        with self._reader() as reader:
            for name, shadow in self._shadows.items():
                saved = set(self._shadow(reader, name))
                missing = [key for key in shadow.state_dict() if key not in saved]
                if missing:
                    raise CheckpointMismatchError(
                        f"the saved shadow {name!r} does not have all of it",
                        key=f"shadows.{name}",
                        value=missing[:3],
                        fix="leave it out: it then starts from the loaded weights",
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
        """Counters, buffers, shadows and, last, the generators."""
        self._engine.load_state(adapted_state(self.manifest, self._engine)[0])
        rank = self._engine.group.rank
        with self._reader() as reader:
            saved = reader.buffers(self._like)
            with torch.no_grad():
                for name, buffer in persistent_buffers(self._engine.module).items():
                    # In a checkpoint made of a model folder they lie among the weights.
                    given = saved[name] if name in saved else reader.tensor(WEIGHTS, name)
                    buffer.copy_(given)
            for name, shadow in self._shadows.items():
                shadow.load_state_dict(self._shadow(reader, name))
            if rng and self.manifest.rng:
                tensors, metadata = reader.generators(self._like)
                randomness.restore(tensors, metadata.get(randomness.TEXT, ""))
                if rank != self._like:
                    restart_generators(tensors, rank=rank)

    @property
    def _like(self) -> int:
        """The rank of the saved run that this one goes on as."""
        rank = self._engine.group.rank
        return rank if rank < self.manifest.world_size else 0

    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self._folder, self.manifest)

    def _shadow(self, reader: CheckpointReader, name: str) -> Mapping[str, torch.Tensor]:
        addresses = self._engine.master_weights.addresses
        return reader.shadow(name, addresses, rank=self._like)

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
