"""Save an engine's checkpoint: all ranks together, in bounded memory, whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch.distributed as dist
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune.backend.distributed import ProcessGroup, together
from zerotune.checkpoint.contents import RankContents, RankShare, ShadowLike, plain_data
from zerotune.checkpoint.drafting import draft
from zerotune.checkpoint.filing import Filing
from zerotune.checkpoint.folders import checked_path
from zerotune.checkpoint.manifest import Manifest
from zerotune.checkpoint.writing import Writing
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


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
        portions=lambda: contents.read(engine),
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
