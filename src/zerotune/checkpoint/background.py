"""Checkpoints written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zerotune.backend.distributed import ProcessGroup
from zerotune.checkpoint.saving import Save
from zerotune.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from zerotune.backend.engine import Engine
    from zerotune.checkpoint.contents import ShadowLike
    from zerotune.checkpoint.writing import Writing


class PendingCheckpoint:
    """A checkpoint that is being written."""

    def __init__(self, writing: Writing) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._writing: Writing | None = writing
        # Not a daemon: an interpreter that exits waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, name="zerotune-checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is finished, or has failed."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has failed; ``wait`` tells why."""
        return self._error is not None

    def wait(self, *, timeout_s: float | None = None) -> Path:
        """Wait until it is written, read back and published.

        Args:
            timeout_s: Seconds to wait at most; without it, as long as it takes.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: It was not finished in time, or has failed.
            ZeroTuneError: What has failed, here or on another rank.
        """
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._path is None:
            raise CheckpointError(f"is still being written after {timeout_s:g} s", key="wait()")
        return self._path

    def _run(self) -> None:
        try:
            if self._writing is not None:
                self._path = self._writing.run()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), in the caller's thread
            self._error = error
        finally:
            # The copies of weights and states are as large as what was copied.
            self._writing = None


class BackgroundSaver:
    """Saves checkpoints in a thread of each rank.

    Weights, states and shadows of this rank are first copied into host memory, which takes as
    much again as they do (16 bytes per fp32 weight with Adam and an EMA); then training goes on::

        with BackgroundSaver(engine=engine) as saver:
            ...
            saver.save("checkpoints/step-00001000", shadows={"ema": ema})
            ...

    One checkpoint is written at a time: a second ``save`` waits for the first, and raises what went
    wrong with it; leaving the block does the same.

    Args:
        engine: What is saved.
        timeout_s: Seconds the threads of different ranks wait for each other.
    """

    def __init__(self, *, engine: Engine, timeout_s: float = 600.0) -> None:
        self._engine = engine
        # A control channel of its own: training's must not meet the thread's.
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
    ) -> PendingCheckpoint:
        """Copy everything and begin to write. Collective; arguments as in ``save_checkpoint``.

        Returns:
            What is being written.

        Raises:
            ZeroTuneError: As ``save_checkpoint``, for what is known before writing begins; or what
                became of the checkpoint before.
        """
        self.wait()
        group = self._engine.group
        group.barrier(f"saving checkpoint {os.fspath(directory)}", timeout_s=timeout_s)
        save = Save(engine=self._engine, group=group)
        save.prepare(directory, extra=extra, shadows=shadows, rng=rng)
        save.copy()
        self._pending = PendingCheckpoint(save.writing(group=self._group))
        return self._pending

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            ZeroTuneError: What has failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """Wait, and give the control channel back. May be repeated."""
        try:
            self.wait()
        finally:
            self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
