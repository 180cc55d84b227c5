"""``save_checkpoint``: all ranks together, in bounded memory, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.checkpoint.collective import together
from zerotune.checkpoint.contents import RankContents, ShadowLike, plain_data
from zerotune.checkpoint.folders import Staging, check_space, checked_path
from zerotune.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    ParameterRecord,
    RankRecord,
)
from zerotune.checkpoint.records import buffer_records, plan_record
from zerotune.checkpoint.tensorfile import TensorFileWriter, file_size
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    extra: Mapping[str, Any] | None = None,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
) -> Path:
    """Write everything that training needs to go on.

    Collective: every rank must call it, with the same arguments. The folder appears under its
    name only when it is whole and on disk; a former checkpoint of that name stays until then.
    Beyond the engine's own memory it needs that of one fragment.

    Args:
        directory: The checkpoint's folder, on a file system all ranks share.
        engine: What to save: master weights, optimizer states, counters, buffers. Frozen
            parameters are not saved.
        extra: What the caller wants back on loading, as JSON-able data: the position in the
            data, for example.
        shadows: EMA shadows by name.
        rng: Also save the random number generators of every rank.
        timeout_s: Seconds to wait for all ranks to come; the group's timeout when not given.

    Returns:
        The folder's absolute path.

    Raises:
        CheckpointError: Micro batches are accumulated, ``extra`` is not JSON-able, the disk is
            too small, or the folder exists and is no checkpoint.
        CollectiveError: A rank did not come, or the arguments differ.
    """
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"saving checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    save = _Save(engine=engine, shadows=shadows, rng=rng)
    agreed = together(group, "check the arguments", lambda: save.check(directory, extra or {}))
    if any(arguments != agreed[0] for arguments in agreed):
        group.agree(agreed[group.rank], "arguments of save_checkpoint")
    try:
        sizes = together(group, "look at the weights", save.inspect)
        save.folder = together(group, "make the folder", lambda: save.stage(sum(sizes)))[0]
        records = together(group, "write the weights", save.write)
        together(group, "finish the checkpoint", lambda: save.publish(records))
    except BaseException:
        save.abandon()
        raise
    return save.final


class _Save:
    """The stages of one save, as one rank goes through them."""

    def __init__(self, *, engine: Engine, shadows: Mapping[str, ShadowLike], rng: bool) -> None:
        self._engine = engine
        self._shadows = shadows
        self._rng = rng
        self._extra: Mapping[str, Any] = {}
        self._contents: RankContents | None = None
        self._staging: Staging | None = None
        self.final = Path()
        self.folder = Path()

    def check(self, directory: str | os.PathLike[str], extra: Mapping[str, Any]) -> tuple[Any, ...]:
        """Refuse what cannot be saved; returns what all ranks must agree on."""
        steps = self._engine.plan.gradient_accumulation_steps
        if self._engine.state.micro_step % steps:
            raise CheckpointError(
                f"{self._engine.state.micro_step % steps} of {steps} micro batches are "
                "accumulated, and their gradients would be lost",
                key="gradient_accumulation_steps",
                value=steps,
                fix="save when engine.step() returned boundary=True",
            )
        for name in self._shadows:
            if not name or "/" in name:
                raise CheckpointError("a shadow's name has no '/'", key="shadows", value=name)
        self.final = checked_path(directory)
        self._extra = plain_data(extra, "extra")
        step = self._engine.state.global_step
        return str(self.final), step, sorted(self._shadows), self._rng, self._extra

    def inspect(self) -> int:
        """Settle what this rank writes; returns how many bytes."""
        contents = RankContents.of(self._engine, shadows=self._shadows, rng=self._rng)
        self._contents = contents
        return file_size(contents.specs, contents.metadata)

    def stage(self, nbytes: int) -> Path:
        """Make the temporary folder, on rank 0."""
        if self._engine.group.is_main:
            self._staging = Staging(self.final)
            check_space(self._staging.path, nbytes)
            return self._staging.path
        return Path()

    def write(self) -> RankRecord:
        """Write this rank's tensor file."""
        group, contents = self._engine.group, self._require_contents()
        if not self.folder.is_dir():
            raise CheckpointError(
                "rank 0 made this folder and this rank does not see it",
                key=str(self.folder),
                fix="save to a file system that all machines share",
            )
        name = f"rank-{group.rank:05d}-of-{group.world_size:05d}.safetensors"
        return RankRecord(
            rank=group.rank,
            file=self._write_tensors(self.folder / name, contents),
            fragments=contents.fragments,
        )

    def publish(self, records: list[RankRecord]) -> None:
        """Write the manifest and give the folder its name, on rank 0."""
        if self._staging is None:
            return
        path = self._staging.path / MANIFEST
        with path.open("x", encoding="utf-8") as file:
            file.write(self._manifest(records).to_json())
            file.flush()
            os.fsync(file.fileno())
        self._staging.publish()

    def abandon(self) -> None:
        """Remove what was written, on rank 0."""
        if self._staging is not None:
            self._staging.abandon()

    def _require_contents(self) -> RankContents:
        if self._contents is None:
            raise CheckpointError("inspect() comes first", key="save_checkpoint")
        return self._contents

    def _write_tensors(self, path: Path, contents: RankContents) -> FileRecord:
        with TensorFileWriter(path, specs=contents.specs, metadata=contents.metadata) as writer:
            for key, tensor in contents.tensors(self._engine):
                writer.append(key, tensor)
            return writer.finish()

    def _manifest(self, records: list[RankRecord]) -> Manifest:
        engine = self._engine
        state = attrs.evolve(
            engine.state,
            scheduler=plain_data(engine.state.scheduler, "scheduler"),
            loss_scaler=plain_data(engine.state.loss_scaler, "loss_scaler"),
        )
        return Manifest(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions={"zerotune": _version(), **engine.plan.platform.versions},
            world_size=engine.group.world_size,
            replicated=engine.master_weights.replicated,
            plan=plan_record(engine),
            state=state,
            parameters=[
                ParameterRecord(name=name, shape=shape)
                for name, shape in engine.master_weights.parameters.items()
            ],
            buffers=buffer_records(engine),
            ranks=records,
            shadows=sorted(self._shadows),
            rng=self._rng,
            extra=self._extra,
        )


def _version() -> str:
    try:
        return importlib.metadata.version("zerotune")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
