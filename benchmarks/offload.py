"""Swapping: bandwidth against dd and fio on the same disk, and the cost of 10,000 swap files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.framework import (
    Benchmark,
    Case,
    CaseRefused,
    Context,
    Goal,
    Measured,
    Worker,
    WorkerError,
    alternate,
)

MIB = 2**20
DD, FIO, CHOSEN, DEFAULTS = "dd", "fio", "zerotune's settings", "DeepSpeed's default settings"
BY_HAND, LEASE = "makedirs and rmtree", "OffloadManager.lease"
RMTREE, CLEAN = "rmtree", "cleanup_stale_swap"
EMPTY, BESIDE = "in an empty root", "beside a living run's files"


def cases(quick: bool) -> Sequence[Case]:
    size = 4 * MIB if quick else 256 * MIB
    files = {"files": 50 if quick else 10_000, "bytes": 4096, "rounds": 2 if quick else 5}
    return (
        Case(
            name="bandwidth",
            settings={"bytes": size, "rounds": 2 if quick else 5, "sweep": not quick},
            measure=bandwidth,
        ),
        Case(name="a run with many files", settings=files, measure=one_run),
        Case(name="what a dead run left", settings=files, measure=dead_run),
        Case(name="starting", settings=files, measure=starting),
    )


def bandwidth(settings: Mapping[str, Any], context: Context) -> Measured:
    """Write a file and read it back, past the page cache."""
    size = settings["bytes"]
    with Worker(Swapper, str(context.scratch), size, settings["sweep"]) as swapper:
        try:
            chosen = swapper.call("choose")
        except WorkerError as error:
            raise CaseRefused(str(error).strip().splitlines()[-1]) from error
        context.log(f"  chosen: {chosen['settings']}")
        contestants: dict[str, Callable[[], Mapping[str, float]]] = {
            DD: lambda: _dd(context.scratch / "dd", size),
            CHOSEN: lambda: swapper.call("measure", chosen["settings"]),
            DEFAULTS: lambda: swapper.call("measure", chosen["defaults"]),
        }
        if shutil.which("fio"):
            contestants[FIO] = lambda: _fio(context.scratch / "fio", size)
        samples = alternate(contestants, rounds=settings["rounds"])
    return Measured(
        samples=samples,
        baseline=DD,
        facts=chosen | {"fio": bool(shutil.which("fio"))},
        notes=("All with direct I/O; dd has one request of 4 MiB in flight.",),
    )


class Swapper:
    """DeepSpeed's aio in a process of its own."""

    def __init__(self, folder: str, size: int, sweep: bool) -> None:
        self._root, self._size, self._sweep = Path(folder, "swap"), size, sweep

    def choose(self) -> dict[str, Any]:
        """What zerotune's own benchmark finds best here, and DeepSpeed's defaults."""
        from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

        from zerotune.backend.ops.aio import AioMeter
        from zerotune.offload.disk import TUNED, benchmark
        from zerotune.platform import detect_platform

        platform = detect_platform(log=False)
        found = benchmark(self._root, size=self._size, sweep=self._sweep, platform=platform)
        path = self._root / "aio.swp"
        self._meter = AioMeter(path=path, size=self._size, platform=platform)
        return {
            "settings": dict(found.best.settings),
            "defaults": {name: int(AIO_DEFAULT_DICT[name]) for name in TUNED},
        }

    def measure(self, settings: Mapping[str, int]) -> dict[str, float]:
        """One write and one read."""
        from zerotune.backend.ops.aio import AioSettings

        sample = self._meter.measure(AioSettings(**settings), repeats=1)
        return {"write_bytes_per_second": sample.write, "read_bytes_per_second": sample.read}


def _dd(path: Path, size: int) -> dict[str, float]:
    # Zeros cost nothing to make; DeepSpeed's contestant writes from memory too.
    count = ("bs=4M", f"count={max(1, size // (4 * MIB))}")
    write = _seconds("dd", "if=/dev/zero", f"of={path}", *count, "oflag=direct", "conv=notrunc")
    read = _seconds("dd", f"if={path}", "of=/dev/null", *count, "iflag=direct")
    moved = path.stat().st_size
    return {"write_bytes_per_second": moved / write, "read_bytes_per_second": moved / read}


def _fio(path: Path, size: int) -> dict[str, float]:
    found = {}
    for kind in ("write", "read"):
        seconds = _seconds(
            "fio", "--name=swap", f"--filename={path}", f"--size={size}", f"--rw={kind}",
            "--bs=1M", "--iodepth=32", "--ioengine=libaio", "--direct=1",
        )  # fmt: skip
        found[f"{kind}_bytes_per_second"] = size / seconds
    return found


def _seconds(*command: str) -> float:
    started = time.perf_counter()
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise CaseRefused(f"{command[0]}: {outcome.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - started


def one_run(settings: Mapping[str, Any], context: Context) -> Measured:
    """Begin, write the files, end: only beginning and end are timed."""
    from zerotune.offload import OffloadManager

    root = context.scratch / "root"
    manager, plan = OffloadManager(root=root), _swapping_plan()

    def ours() -> dict[str, float]:
        with ExitStack() as stack:
            started = time.perf_counter()
            lease = stack.enter_context(manager.lease(plan))
            begun = time.perf_counter() - started
            _fill(lease.path, settings)
            ending = time.perf_counter()
        return {"begin_seconds": begun, "end_seconds": time.perf_counter() - ending}

    def by_hand() -> dict[str, float]:
        started = time.perf_counter()
        folder = root / "by-hand" / "zero_stage_3"
        folder.mkdir(parents=True)
        begun = time.perf_counter() - started
        _fill(folder, settings)
        ending = time.perf_counter()
        shutil.rmtree(folder.parent)
        return {"begin_seconds": begun, "end_seconds": time.perf_counter() - ending}

    samples = alternate({BY_HAND: by_hand, LEASE: ours}, rounds=settings["rounds"])
    return Measured(samples=samples, baseline=BY_HAND)


def dead_run(settings: Mapping[str, Any], context: Context) -> Measured:
    """Remove what a killed process had leased."""
    from zerotune.offload import cleanup_stale_swap

    root = context.scratch / "root"

    def ours() -> dict[str, float]:
        _die(root, settings)
        started = time.perf_counter()
        report = cleanup_stale_swap(root)
        seconds = time.perf_counter() - started
        if len(report.removed) != 1 or report.freed < settings["files"] * settings["bytes"]:
            raise RuntimeError(f"not cleaned up: {report}")
        return {"seconds": seconds}

    def by_hand() -> dict[str, float]:
        _die(root, settings)
        (folder,) = (path for path in root.iterdir() if path.is_dir())
        started = time.perf_counter()
        shutil.rmtree(folder)
        return {"seconds": time.perf_counter() - started}

    samples = alternate({RMTREE: by_hand, CLEAN: ours}, rounds=settings["rounds"])
    return Measured(
        samples=samples,
        baseline=RMTREE,
        notes=("rmtree neither asks whether the folder's owner is dead nor counts bytes.",),
    )


def starting(settings: Mapping[str, Any], context: Context) -> Measured:
    """Begin a lease where another run's files lie, and where none do."""
    from zerotune.offload import OffloadManager

    plan = _swapping_plan()
    busy = context.scratch / "busy"

    def begin(root: Path) -> dict[str, float]:
        started = time.perf_counter()
        with OffloadManager(root=root).lease(plan):
            return {"seconds": time.perf_counter() - started}

    with OffloadManager(root=busy).lease(plan) as lease:
        _fill(lease.path, settings)
        samples = alternate(
            {EMPTY: lambda: begin(context.scratch / "empty"), BESIDE: lambda: begin(busy)},
            rounds=settings["rounds"],
        )
    return Measured(samples=samples, baseline=EMPTY)


def _swapping_plan() -> Any:
    from zerotune import DeepSpeedPlan, OptimizerResolver, Platform

    plan = DeepSpeedPlan.build(
        stage=3, offload="nvme", nvme_path="unused", precision="bf16", micro_batch_size=1
    )
    return OptimizerResolver().apply(plan.resolve(platform=Platform.synthetic(), world_size=1))


def _fill(folder: Path, settings: Mapping[str, Any]) -> None:
    swap = folder / "zero_stage_3" / "optimizer" / "rank0"
    swap.mkdir(parents=True)
    content = b"\x5a" * settings["bytes"]
    for number in range(settings["files"]):
        (swap / f"{number}.tensor.swp").write_bytes(content)


class Doomed:
    """A run that is killed while it swaps."""

    def swap(self, root: str, settings: Mapping[str, Any]) -> None:
        """Lease, write and die."""
        from zerotune.offload import OffloadManager

        with OffloadManager(root=root).lease(_swapping_plan()) as lease:
            _fill(lease.path, settings)
            os.kill(os.getpid(), signal.SIGKILL)


def _die(root: Path, settings: Mapping[str, Any]) -> None:
    with Worker(Doomed) as doomed:
        try:
            doomed.call("swap", str(root), dict(settings))
        except WorkerError as error:
            if "died" not in str(error):
                raise


BENCHMARK = Benchmark(
    name="offload",
    title="swap bandwidth against dd and fio, and the cost of many swap files",
    cases=cases,
    ours=frozenset({CHOSEN, LEASE, CLEAN, BESIDE}),
    goals=(
        *(
            Goal(
                text=f"{what} at least 0.95 of dd's rate",
                case="bandwidth",
                contestant=CHOSEN,
                against=DD,
                quantity=quantity,
                limit=0.95,
            )
            for what, quantity in (
                ("swapping out reaches", "write_bytes_per_second"),
                ("swapping in reaches", "read_bytes_per_second"),
            )
        ),
        Goal(
            text="ending a run with 10,000 swap files takes at most 1.5 times rmtree",
            case="a run with many files",
            contestant=LEASE,
            against=BY_HAND,
            quantity="end_seconds",
            limit=1.5,
        ),
        Goal(
            text="removing a dead run's 10,000 swap files takes at most 1.5 times rmtree",
            case="what a dead run left",
            contestant=CLEAN,
            against=RMTREE,
            quantity="seconds",
            limit=1.5,
        ),
        Goal(
            text="starting beside a living run with 10,000 files takes at most 0.1 s",
            case="starting",
            contestant=BESIDE,
            quantity="seconds",
            limit=0.1,
        ),
    ),
)
