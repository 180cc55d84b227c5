"""Save an engine's checkpoint: lay out the files, write them on all ranks, verify and rename them.

The module contains, in this order, the file layout, the writer, ``save_checkpoint``, and saving in
the background.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import torch.distributed as dist
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.files import write_synced
from zerotune._util.text import listing
from zerotune.backend.distributed import ProcessGroup, together
from zerotune.backend.master_weights import StateFormat
from zerotune.checkpoint.contents import (
    Counters,
    Part,
    Piece,
    RankContents,
    RankShare,
    ShadowLike,
    draft,
    plain_data,
)
from zerotune.checkpoint.folders import Staging, check_space, checked_path
from zerotune.checkpoint.manifest import MANIFEST, FileRecord, Manifest, ParameterRecord
from zerotune.checkpoint.tensors import (
    WEIGHTS,
    Subject,
    TensorFile,
    TensorSpec,
    TensorWriter,
    Written,
    shard_name,
    split,
)
from zerotune.errors import CheckpointError, CheckpointNotFiniteError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


SHARD_SIZE: Final = 4 * 2**30
"""Maximum size in bytes of a file that all ranks write together. Larger data is split into several
files, which the ranks verify in parallel."""

Shapes = Mapping[str, tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class Filing:
    """Layout of the files that all ranks write together, and the records of the parameters."""

    files: tuple[TensorFile, ...]
    parameters: tuple[ParameterRecord, ...]
    formats: Mapping[str, StateFormat]
    """Formats of the optimizer states, as in ``Manifest``."""
    nbytes: int
    """Total size in bytes of all files except the manifest."""

    @classmethod
    def of(
        cls, shares: Sequence[RankShare], shapes: Shapes, *, shard_size: int = SHARD_SIZE
    ) -> Filing:
        """Lay out the data of all ranks in files.

        Args:
            shares: Each rank's description of its data.
            shapes: Full shape of each parameter.
            shard_size: Maximum bytes of a file.
        """
        merged: dict[Subject, dict[str, list[Part]]] = {WEIGHTS: {}}
        for subject, some in (item for share in shares for item in share.parts.items()):
            for part in some:
                merged.setdefault(subject, {}).setdefault(part.name, []).append(part)
        parts = dict(sorted(merged.items(), key=lambda item: (item[0] != WEIGHTS, item[0].prefix)))
        formats: dict[str, StateFormat] = {}
        files: list[TensorFile] = []
        for subject, named in parts.items():
            wanted = shapes if subject == WEIGHTS else [name for name in shapes if name in named]
            forms = {part.form for some in named.values() for part in some}
            # A state that two parameters store in different dtypes is saved in fp32.
            form = forms.pop() if len(forms) == 1 else StateFormat()
            if any(each.whole for each in (form, *forms)):
                form = StateFormat(whole=True)
            if subject.kind == "optimizer":
                formats[subject.of] = form
            specs = [_spec(name, form, shapes[name], named.get(name, ())) for name in wanted]
            for spec in specs:
                _check_covered(subject, spec, named.get(spec.key, []))
            shards = split(specs, shard_size)
            files += [
                TensorFile.of(shard_name(subject.prefix, index, len(shards)), subject, shard)
                for index, shard in enumerate(shards, start=1)
            ]
        return cls(
            files=tuple(files),
            parameters=_records(shapes, parts, shares),
            formats=formats,
            nbytes=sum(file.nbytes for file in files) + sum(share.nbytes for share in shares),
        )


def _spec(
    name: str, form: StateFormat, shape: tuple[int, ...], parts: Sequence[Part]
) -> TensorSpec:
    if not form.whole:
        shape = form.shape_for(shape)
        return TensorSpec(key=name, dtype=getattr(torch, form.dtype), shape=shape)
    own = parts[0]
    return TensorSpec(key=name, dtype=getattr(torch, own.form.dtype), shape=own.shape or shape)


def _check_covered(subject: Subject, spec: TensorSpec, parts: list[Part]) -> None:
    position = 0
    for part in sorted(parts, key=lambda part: (part.start, part.numel)):
        if part.start != position:
            break
        position += part.numel
    if position != math.prod(spec.shape) or sum(part.numel for part in parts) != position:
        raise CheckpointError(
            f"the ranks' fragments do not cover the tensor's {math.prod(spec.shape)} elements "
            "exactly once",
            "report this as a bug, with the model's class and the plan",
            f"{subject.prefix}/{spec.key}",
        )


def _records(
    shapes: Shapes,
    parts: Mapping[Subject, Mapping[str, list[Part]]],
    shares: Sequence[RankShare],
) -> tuple[ParameterRecord, ...]:
    nothing = Counters(step=None, scalars={})
    counters = {name: count for share in reversed(shares) for name, count in share.counters.items()}
    states = {s.of: set(named) for s, named in parts.items() if s.kind == "optimizer"}
    return tuple(
        ParameterRecord(
            name=name,
            shape=shape,
            step=counters.get(name, nothing).step,
            states=[state for state, named in states.items() if name in named],
            scalars=dict(counters.get(name, nothing).scalars),
        )
        for name, shape in shapes.items()
    )


# -- Write a checkpoint that the ranks have agreed on, and read it back before it is published.


_MOST_NAMES: Final = 5


class Writing:
    """The operation of writing a checkpoint, on one rank."""

    def __init__(
        self,
        *,
        group: ProcessGroup,
        final: Path,
        draft: Manifest,
        filing: Filing,
        contents: RankContents,
        pieces: Callable[[], Iterator[Piece]],
        allow_not_finite: bool,
    ) -> None:
        self._group, self._final = group, final
        self._draft, self._filing = draft, filing
        self._contents, self._pieces = contents, pieces
        self._allow_not_finite = allow_not_finite
        self._staging: Staging | None = None
        self._folder = Path()
        self._files: tuple[TensorFile, ...] = ()
        self._writer: TensorWriter | None = None

    def run(self) -> Path:
        """Write, verify and rename the checkpoint. Collective over the group's control channel."""
        group = self._group
        try:
            self._folder = together(group, "create the folder", self._stage)[0]
            written = together(group, "write the weights", self._write)
            self._judge(name for _, not_finite in written for name in not_finite)
            parts = [part for each, _ in written for part in each]
            confirmed = together(group, "verify the written files", lambda: self._confirm(parts))
            files = [file for files in confirmed for file in files]
            together(group, "finish the checkpoint", lambda: self._publish(files))
        except BaseException:
            self._abandon()
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
        return self._final

    def _stage(self) -> Path:
        """Create the temporary folder and its shared files, on rank 0."""
        if not self._group.is_main:
            return Path()
        self._staging = Staging(self._final)
        check_space(self._staging.path, self._filing.nbytes)
        for file in self._filing.files:
            file.create(self._staging.path)
        return self._staging.path

    def _write(self) -> tuple[tuple[Written, ...], tuple[str, ...]]:
        """Write this rank's parts and its file; return the written parts and non-finite names."""
        if not self._folder.is_dir():
            raise CheckpointError(
                "rank 0 created this folder, but this rank does not see it",
                "save to a file system that all machines share",
                str(self._folder),
            )
        alone = self._contents.file()
        alone.create(self._folder)
        shared = self._filing.files
        self._files = (*shared[self._group.rank :: self._group.world_size], alone)
        self._writer = writer = TensorWriter(self._folder, [*shared, alone])
        for piece in self._pieces():
            part = piece.part
            writer.write(part.name, piece.tensor, subject=piece.subject, start=part.start)
        for key, tensor in self._contents.others.items():
            writer.write(key, tensor, subject=alone.subject)
        if self._group.world_size > 1:
            # Another machine may see the data only once it is on disk.
            writer.sync()
        return writer.written, writer.not_finite

    def _judge(self, names: Iterable[str]) -> None:
        """Refuse non-finite tensors; all ranks get the same names, so all decide the same."""
        spoiled = tuple(dict.fromkeys(names))
        self._draft = attrs.evolve(self._draft, not_finite=spoiled)
        if spoiled and not self._allow_not_finite:
            raise CheckpointNotFiniteError(
                f"NaN or infinity in {listing(spoiled, most=_MOST_NAMES)}, so the checkpoint "
                "is not saved; earlier checkpoints are kept",
                "resume from an earlier checkpoint with a lower learning rate, or save "
                "anyway with allow_not_finite=True",
                str(self._final),
            )

    def _confirm(self, parts: Iterable[Written]) -> tuple[FileRecord, ...]:
        """Read back this rank's share of the shared files, and its own file."""
        return () if self._writer is None else self._writer.confirm(self._files, parts)

    def _publish(self, records: Iterable[FileRecord]) -> None:
        """Write the manifest and give the folder its name, on rank 0."""
        if self._staging is None:
            return
        files = sorted(records, key=lambda record: record.name)
        manifest = attrs.evolve(self._draft, files=files).to_json()
        write_synced(self._staging.path / MANIFEST, manifest.encode())
        self._staging.publish()

    def _abandon(self) -> None:
        """Remove what was written, on rank 0."""
        if self._staging is not None:
            self._staging.abandon()


# -- ``save_checkpoint``: all ranks together, in bounded memory, whole or not at all.


_SHADOW_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: Engine,
    extra: Mapping[str, Any] | None = None,
    shadows: Mapping[str, ShadowLike] | None = None,
    rng: bool = True,
    timeout_s: float | None = None,
    allow_not_finite: bool = False,
) -> Path:
    """Save everything that is needed to continue training, with the same or a different plan.

    Collective: every rank must call ``save_checkpoint`` with the same arguments. Weights, optimizer
    states and shadows are saved in safetensors files, as full tensors named after the parameters.
    Every rank writes its fragments directly into the files. No tensor is gathered, so saving needs
    additional memory for only one fragment. The folder gets its final name only after all files are
    read back and verified; until then a previous checkpoint of this name is kept.

    Args:
        directory: Folder of the checkpoint, on a file system shared by all ranks.
        engine: Engine whose master weights, optimizer states, counters and buffers are saved.
            Frozen parameters are not saved.
        extra: JSON-serialisable data to save, such as the position in the training data;
            ``load_checkpoint`` returns it.
        shadows: EMA shadows by name.
        rng: Also save the states of every rank's random number generators.
        timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.
        allow_not_finite: Allow NaN and infinity in the checkpoint, for debugging; rollbacks skip
            such a checkpoint.

    Returns:
        The folder's absolute path.

    Raises:
        CheckpointError: The engine has accumulated micro batches, ``extra`` is not
            JSON-serialisable, the disk has too little free space, or the folder exists and is not a
            checkpoint.
        CheckpointNotFiniteError: Weights, states or shadows contain NaN or infinity, or a buffer
            contains NaN; no checkpoint is saved.
        CheckpointCorruptError: The data on disk differ from the written data; the message names the
            file.
        CollectiveError: A rank did not call ``save_checkpoint``, or the arguments differ.
    """
    writing = _agreed_writing(
        engine,
        directory,
        extra=extra,
        shadows=shadows,
        rng=rng,
        timeout_s=timeout_s,
        allow_not_finite=allow_not_finite,
    )
    return writing.run()


def _agreed_writing(
    engine: Engine,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None,
    shadows: Mapping[str, ShadowLike] | None,
    rng: bool,
    timeout_s: float | None,
    allow_not_finite: bool,
    background: ProcessGroup | None = None,
) -> Writing:
    """Agree on contents and folder; a background save gets copies of the tensors. Collective."""
    group, shadows = engine.group, dict(shadows or {})
    group.barrier(f"saving checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
    drafts: list[tuple[Path, Manifest]] = []
    looked: list[RankContents] = []

    def check() -> tuple[Any, ...]:
        _check_savable(engine, shadows)
        final, plain = checked_path(directory), plain_data(extra or {}, "extra")
        manifest = draft(engine, shadows=shadows, rng=rng, extra=plain)
        drafts.append((final, manifest))
        return str(final), manifest.state.global_step, sorted(shadows), rng, plain

    agreed = together(group, "check the arguments", check)
    if any(arguments != agreed[0] for arguments in agreed):
        group.agree(agreed[group.rank], "arguments of save_checkpoint")

    for shadow in shadows.values():
        if hasattr(shadow, "check_stepped"):
            shadow.check_stepped()

    def inspect() -> RankShare:
        looked.append(RankContents.of(engine, shadows=shadows, rng=rng))
        return looked[0].share()

    shares = together(group, "check the weights", inspect)
    # Every rank computes the same layout or raises the same error.
    filing = Filing.of(shares, engine.master_weights.parameters)
    contents = looked[0].copied(engine) if background else looked[0]
    final, manifest = drafts[0]
    return Writing(
        group=background or group,
        final=final,
        draft=attrs.evolve(manifest, parameters=filing.parameters, formats=filing.formats),
        filing=filing,
        contents=contents,
        pieces=lambda: contents.read(engine),
        allow_not_finite=allow_not_finite,
    )


def _check_savable(engine: Engine, shadows: Iterable[str]) -> None:
    steps = engine.plan.gradient_accumulation_steps
    if engine.state.micro_step % steps:
        raise CheckpointError(
            f"{engine.state.micro_step % steps} of {steps} micro batches are accumulated, and "
            "their gradients would be lost",
            "save after engine.step() returns boundary=True",
            "gradient_accumulation_steps",
            steps,
        )
    for name in shadows:
        if not _SHADOW_NAME.fullmatch(name):
            raise CheckpointError(
                "cannot be part of a file name",
                "use only letters, digits, '.', '-' and '_' in the names of shadows",
                "shadows",
                name,
            )


# -- Checkpoints written while training goes on.


class PendingCheckpoint:
    """A checkpoint that is being written."""

    def __init__(self, writing: Writing) -> None:
        # Not a daemon thread, so the interpreter waits for the checkpoint at exit.
        pool = ThreadPoolExecutor(1, thread_name_prefix="zerotune-checkpoint")
        self._written = pool.submit(writing.run)
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Whether writing has finished or failed."""
        return self._written.done()

    @property
    def failed(self) -> bool:
        """Whether writing has failed; ``wait`` raises the error."""
        return self.done and self._written.exception() is not None

    def wait(self, *, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is written, verified and renamed.

        Args:
            timeout_s: Timeout in seconds; by default there is no timeout.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: Writing has not finished within the timeout, or has failed.
            ZeroTuneError: Writing failed on this rank or another.
        """
        wait_for([self._written], timeout_s)
        if not self.done:
            raise CheckpointError(f"is still being written after {timeout_s:g} s", key="wait()")
        return self._written.result()


class BackgroundSaver(Closable):
    """Saves checkpoints in a background thread on each rank while training continues.

    Each rank first copies its weights, states and shadows into host memory. With Adam and an EMA,
    the copy needs 16 bytes per weight, or 10 if the moments are stored in 8 bits::

        with BackgroundSaver(engine=engine) as saver:
            ...
            saver.save("checkpoints/step-00001000", shadows={"ema": ema})
            ...

    Only one checkpoint is written at a time. ``save`` and the end of the ``with`` block wait for
    the pending checkpoint, and raise an error if writing it failed.

    Args:
        engine: Engine to save.
        timeout_s: Seconds that a rank's thread waits for the threads of other ranks.

    Raises:
        CollectiveError: A rank did not create a ``BackgroundSaver``.
    """

    def __init__(self, *, engine: Engine, timeout_s: float = 600.0) -> None:
        self._engine = engine
        engine.group.barrier("making a BackgroundSaver")
        # A separate process group, so that the thread's collectives do not mix with training's.
        self._group = (
            ProcessGroup(backend=dist.get_backend(), timeout_s=timeout_s)
            if engine.group.world_size > 1
            else ProcessGroup.alone()
        )
        self._pending: PendingCheckpoint | None = None

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        shadows: Mapping[str, ShadowLike] | None = None,
        rng: bool = True,
        timeout_s: float | None = None,
        allow_not_finite: bool = False,
    ) -> PendingCheckpoint:
        """Copy the state to host memory and start writing.

        Collective; arguments as in ``save_checkpoint``.

        Args:
            directory: Folder of the checkpoint.
            extra: JSON-serialisable data of the caller.
            shadows: EMA shadows by name.
            rng: Also save the states of every rank's random number generators.
            timeout_s: Seconds to wait for the other ranks; defaults to the group's timeout.
            allow_not_finite: Allow NaN and infinity in the checkpoint, for debugging.

        Returns:
            The pending checkpoint.

        Raises:
            ZeroTuneError: Writing the previous checkpoint failed, or a check before writing failed.
        """
        self.wait()
        writing = _agreed_writing(
            self._engine,
            directory,
            extra=extra,
            shadows=shadows,
            rng=rng,
            timeout_s=timeout_s,
            allow_not_finite=allow_not_finite,
            background=self._group,
        )
        self._pending = PendingCheckpoint(writing)
        return self._pending

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            ZeroTuneError: Writing the checkpoint failed.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait()
        finally:
            # An interrupt ends the wait, not the write.
            if pending.done:
                self._pending = None

    @override
    def close(self) -> None:
        """Wait for the pending checkpoint, then close the saver. May be called repeatedly."""
        try:
            self.wait()
        finally:
            self._group.close()
