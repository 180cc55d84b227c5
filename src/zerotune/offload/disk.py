"""What a swap root's disk can do: measured through DeepSpeed's own op, kept beside the leases."""

from __future__ import annotations

import json
import os
import platform
import platform as machine
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.files import read_record, system_errors, write_atomically
from zerotune._util.proc import mount_identity
from zerotune._util.text import disk_size, json_of
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.budget import lockable_memory
from zerotune.offload.choosing import RootChoice
from zerotune.offload.lease import making_in
from zerotune.offload.removal import Removed, open_folder, remove_entry
from zerotune.offload.root import BENCH_PREFIX, check_root
from zerotune.plan.model import AUTO, AioSection, evolved

if TYPE_CHECKING:
    from zerotune.backend.ops.aio import AioSample, AioSettings
    from zerotune.plan.memory.model import MemoryEstimate
    from zerotune.plan.model import ResolvedPlan
    from zerotune.platform import Platform


MEASURED_FILE: Final = "zerotune-aio.json"
TUNED: Final = ("block_size", "queue_depth", "intra_op_parallelism")
"""Keys of ``aio`` that a measurement chooses."""

_FORMAT: Final = 1
_LONGEST: Final = 65536


@attrs.frozen(kw_only=True)
class MeasuredDisk:
    """Bandwidth of one root through DeepSpeed's aio, and the settings it was reached with."""

    block_size: int
    """Bytes of one request."""
    queue_depth: int
    """Requests in flight per thread."""
    intra_op_parallelism: int
    """Threads that share one tensor."""
    read: float
    """Bytes per second."""
    write: float
    """Bytes per second."""
    size: int
    """Bytes of the file it was measured with."""
    host: str
    """Machine it was measured on."""
    device: int
    """Number of the device, as ``stat`` gives it."""
    measured: str
    """UTC time, ISO 8601."""

    @property
    def settings(self) -> dict[str, int]:
        """The keys of ``aio`` it chose."""
        return {name: getattr(self, name) for name in TUNED}

    def step_seconds(self, estimate: MemoryEstimate) -> float:
        """The least seconds one optimizer step spends on this disk, when nothing overlaps.

        Args:
            estimate: What the plan needs; its ranks share the disk.
        """
        ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
        traffic = estimate.swap_traffic
        return ranks * traffic.seconds(read_rate=self.read, write_rate=self.write)

    def to_aio(self, written: AioSection | None = None) -> AioSection:
        """An ``aio`` section for a plan; what is ``written`` there already stands."""
        section = written or AioSection()
        chosen = {
            name: value
            for name, value in self.settings.items()
            if getattr(section, name) in (None, AUTO)
        }
        return evolved(section, **chosen)

    def save(self, root: Path) -> Path:
        """Write it into a root, where later leases find it; readers see all of it or nothing.

        Raises:
            OffloadError: It cannot be written.
        """
        path = root / MEASURED_FILE
        text = json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"
        with system_errors(OffloadError, path, "what was measured cannot be written"):
            write_atomically(path, text.encode())
        return path

    @classmethod
    def load(cls, root: Path) -> MeasuredDisk | None:
        """What was measured in a root; ``None`` when nothing was.

        Raises:
            OffloadError: The file is damaged, or of a format this version does not know.
        """
        path = root / MEASURED_FILE
        try:
            fields = json_of(read_record(path, most=_LONGEST))
            if fields.pop("format") != _FORMAT:
                raise ValueError(f"not of format {_FORMAT}")
            found = cls(**fields)
            if not all(type(value) is int and value > 0 for value in found.settings.values()):
                raise ValueError("a setting is no positive whole number")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OffloadError(
                f"cannot be used ({error})",
                key="offload.root",
                value=str(path),
                fix="delete it, or measure again with `zerotune offload bench`",
            ) from error
        return found


def usable_settings(root: Path) -> tuple[Mapping[str, int], tuple[Decision, ...]]:
    """The ``aio`` settings measured in a root, if they are of this machine and this disk."""
    try:
        found = MeasuredDisk.load(root)
    except OffloadError as error:
        return {}, (_decision(root, {}, error.reason, warn=True),)
    if found is None:
        return {}, ()
    if found.host != platform.node() or found.device != root.stat().st_dev:
        why = f"it was measured on {found.host}, on another disk or before it was mounted anew"
        return {}, (_decision(root, {}, why),)
    why = (
        f"measured on {found.measured}: {found.read / 1e9:.2f} GB/s read, "
        f"{found.write / 1e9:.2f} GB/s written"
    )
    return found.settings, (_decision(root, found.settings, why),)


def _decision(root: Path, after: Any, reason: str, *, warn: bool = False) -> Decision:
    return Decision(
        key="aio",
        before=str(root / MEASURED_FILE),
        after=dict(after) or None,
        reason=reason,
        severity="warning" if warn else "note",
    )


def with_settings(resolved: ResolvedPlan, settings: Mapping[str, Any]) -> ResolvedPlan:
    """``resolved`` with measured ``aio`` settings where the user wrote none."""
    written = resolved.requested.aio
    chosen = {
        name: settings[name]
        for name in TUNED
        if name in settings and getattr(written, name, None) in (None, AUTO)
    }
    aio = resolved.plan.aio
    if not chosen or aio is None:
        return resolved
    plan = attrs.evolve(resolved.plan, aio=evolved(aio, **chosen))
    return attrs.evolve(resolved, plan=plan)


# -- Measure what a swap root can do, through the very op that DeepSpeed swaps with.


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
    from zerotune.backend.ops.aio import AioMeter
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
            f"{disk_size(free)} are free, and {disk_size(size)} are to be written",
            key="offload bench",
            value=str(path),
            fix="measure with a smaller size",
        )
    lockable = lockable_memory(platform)
    if lockable is not None and size > lockable:
        raise OffloadError(
            f"{disk_size(size)} must be locked in memory, and this process may lock "
            f"{disk_size(lockable)}",
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
    from zerotune.backend.ops.aio import AioSettings

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
