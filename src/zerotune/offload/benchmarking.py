"""Measure what a swap root can do, through the very op that DeepSpeed swaps with."""

from __future__ import annotations

import os
import platform as machine
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.budget import lockable_memory
from zerotune.offload.choosing import RootChoice
from zerotune.offload.filesystem import mount_identity
from zerotune.offload.lease import making_in
from zerotune.offload.measured import MeasuredDisk
from zerotune.offload.removal import Removed, open_folder, remove_entry
from zerotune.offload.root import BENCH_PREFIX, check_root, gibibytes

if TYPE_CHECKING:
    from zerotune.backend.aio import AioSample, AioSettings
    from zerotune.platform import Platform

DEFAULT_SIZE: Final = 256 * 1024**2
BLOCK_SIZES: Final = (1_048_576, 262_144)
"""None above 1 MiB: tensors smaller than a block stay in host memory, so a larger one would
change what is swapped."""
QUEUE_DEPTHS: Final = (32, 8, 128)
THREADS: Final = (1, 2, 4, 8)


@attrs.frozen(kw_only=True)
class Benchmark:
    """Everything that was measured on one root."""

    root: Path
    best: MeasuredDisk
    """The settings with which writing and reading back took the least time."""
    samples: tuple[AioSample, ...]
    """In the order they were taken."""


def benchmark(
    root: str | os.PathLike[str],
    *,
    size: int = DEFAULT_SIZE,
    sweep: bool = True,
    platform: Platform | None = None,
) -> Benchmark:
    """Measure read and write bandwidth of a root with direct I/O through DeepSpeed's aio.

    The sweep tries the number of threads first, then the queue depth, then the block size, each
    with the best of what came before: about eight measurements. Nothing is kept but a file of
    ``size`` bytes while it runs. ``benchmark(...).best.save(root)`` makes later leases use it.

    Args:
        root: The swap root; made when it is missing.
        size: Bytes of the file, and of host memory that is locked.
        sweep: ``False`` measures DeepSpeed's default settings only.
        platform: The machine; detected when not given.

    Raises:
        OffloadError: The root is unusable or too full, or it does no direct I/O.
        PlatformError: The op cannot be built or loaded.
    """
    from zerotune.backend.aio import AioMeter
    from zerotune.platform import detect_platform

    platform = platform or detect_platform()
    checked = check_root(RootChoice(path=os.fspath(root), key="offload bench"))
    _check_room(checked.path, checked.free_bytes, size, platform)
    with _scratch(checked.path) as folder:
        meter = AioMeter(path=folder / "bench.swp", size=size, platform=platform)
        samples = _sample(meter.measure, platform.usable_cores, sweep=sweep)
    best = min(samples, key=_cost)
    return Benchmark(
        root=checked.path,
        samples=tuple(samples),
        best=MeasuredDisk(
            **attrs.asdict(best.settings),
            read=best.read,
            write=best.write,
            size=meter.size,
            host=machine.node(),
            device=checked.path.stat().st_dev,
            measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ),
    )


def _check_room(path: Path, free: int, size: int, platform: Platform) -> None:
    if size < 1024**2:
        raise OffloadError(
            "is too little to measure; DeepSpeed swaps nothing below 1 MiB",
            key="size",
            value=size,
            fix="give at least 1 MiB, better the size of a large parameter",
        )
    if size > free:
        raise OffloadError(
            f"{gibibytes(free)} are free, and {gibibytes(size)} are to be written",
            key="offload bench",
            value=str(path),
            fix="measure with a smaller size",
        )
    lockable = lockable_memory(platform)
    if lockable is not None and size > lockable:
        raise OffloadError(
            f"{gibibytes(size)} must be locked in memory, and this process may lock "
            f"{gibibytes(lockable)}",
            key="offload bench",
            value=size,
            fix="raise the limit (ulimit -l unlimited) or measure with a smaller size",
        )


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """A folder that is gone after the block, or with the next clean-up if we are killed."""
    with making_in(root):
        folder = Path(tempfile.mkdtemp(prefix=BENCH_PREFIX, dir=root))
        try:
            yield folder
        finally:
            _discard(root, folder.name)


def _discard(root: Path, name: str) -> None:
    descriptor = open_folder(root)
    try:
        remove_entry(descriptor, name, mount_identity(descriptor), Removed())
    finally:
        os.close(descriptor)


def _sample(
    measure: Callable[[AioSettings], AioSample], cores: int, *, sweep: bool
) -> list[AioSample]:
    from zerotune.backend.aio import AioSettings

    best = AioSettings(block_size=BLOCK_SIZES[0], queue_depth=8, intra_op_parallelism=1)
    samples = [measure(best)]
    if not sweep:
        return samples
    ways = {
        "intra_op_parallelism": [n for n in THREADS if n <= max(cores, 1)],
        "queue_depth": list(QUEUE_DEPTHS),
        "block_size": list(BLOCK_SIZES),
    }
    for name, values in ways.items():
        tried = {sample.settings for sample in samples}
        for value in values:
            settings = attrs.evolve(best, **{name: value})
            if settings not in tried:
                samples.append(measure(settings))
        best = min(samples, key=_cost).settings
    return samples


def _cost(sample: AioSample) -> float:
    """Seconds to write a byte and read it back: a step does about as much of each."""
    return 1 / sample.read + 1 / sample.write
