"""DeepSpeed's asynchronous file I/O, measured as it will be used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.backend.ops.build import build_op, building
from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
from zerotune.errors import OffloadError, PlatformError

if TYPE_CHECKING:
    from zerotune.platform import Platform


ALIGNMENT: Final = 4096
"""Sizes are a multiple of this times the threads, so that each thread's share is whole pages."""


@attrs.frozen(kw_only=True)
class AioSettings:
    """How a file is cut into requests; the keys of ``aio`` in DeepSpeed's configuration."""

    block_size: int
    """Bytes of one request."""
    queue_depth: int
    """Requests in flight per thread."""
    intra_op_parallelism: int
    """Threads that share one file."""


@attrs.frozen(kw_only=True)
class AioSample:
    """What one measurement gave."""

    settings: AioSettings
    read: float
    """Bytes per second."""
    write: float
    """Bytes per second."""


class AioMeter:
    """Reads and writes one file with direct I/O through DeepSpeed's ``async_io`` op.

    Args:
        path: The file, which need not exist; it is left for the caller to delete.
        size: Bytes of it, rounded up to what every number of threads up to 64 can share; as much
            host memory is locked.
        platform: The machine, which decides DeepSpeed's accelerator.

    Raises:
        PlatformError: The op cannot be built or loaded here.
        MissingDependencyError: DeepSpeed is not installed.
    """

    def __init__(self, *, path: Path, size: int, platform: Platform) -> None:
        import torch

        if not platform.deepspeed.available:
            raise PlatformError(platform.deepspeed.reason, fix=platform.deepspeed.fix)
        require_deepspeed(accelerator=platform.deepspeed.accelerator or platform.accelerator)
        quiet_deepspeed()
        with building():
            build_op("async_io")
            from deepspeed.accelerator import get_accelerator

            self._op = get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
        unit = 64 * ALIGNMENT
        self.size = -(-size // unit) * unit
        """Bytes that are read and written."""
        self._path = path
        generator = torch.Generator().manual_seed(0)
        # Random, because some disks compress or skip what repeats.
        self._content = torch.randint(
            256, (self.size,), dtype=torch.uint8, generator=generator, device="cpu"
        )

    def measure(self, settings: AioSettings, *, repeats: int = 2) -> AioSample:
        """Write the file and read it back, so often; the fastest of each counts.

        Raises:
            OffloadError: The file cannot be opened for direct I/O, was not written whole (the
                disk is full), or was read back different.
        """
        handle = self._op.aio_handle(
            block_size=settings.block_size,
            queue_depth=settings.queue_depth,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=settings.intra_op_parallelism,
        )
        buffer = handle.new_cpu_locked_tensor(self.size, self._content[:0])
        try:
            written, read = [], []
            for _ in range(repeats):
                buffer.copy_(self._content)
                written.append(self._timed(handle.sync_pwrite, buffer, "written"))
                self._check_whole()
                buffer.zero_()
                read.append(self._timed(handle.sync_pread, buffer, "read"))
            if not bool((buffer == self._content).all()):
                raise self._refused("was read back different from what was written")
        finally:
            handle.free_cpu_locked_tensor(buffer)
        return AioSample(
            settings=settings, read=self.size / min(read), write=self.size / min(written)
        )

    def _timed(self, act: Any, buffer: Any, what: str) -> float:
        start = time.perf_counter()
        if act(buffer, str(self._path), 0) < 0:
            raise self._refused(
                f"cannot be {what} with direct I/O, which DeepSpeed's aio needs and file systems "
                "in memory and some networked ones lack"
            )
        return time.perf_counter() - start

    def _check_whole(self) -> None:
        # The op counts a request that the disk had no room for as done.
        found = self._path.stat().st_size
        if found < self.size:
            raise self._refused(
                f"only {found} of {self.size} bytes were written; is the disk full?"
            )

    def _refused(self, reason: str) -> OffloadError:
        return OffloadError(
            reason,
            key="offload bench",
            value=str(self._path),
            fix="measure a folder on a local disk with enough room",
        )
