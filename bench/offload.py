"""The cost of 10,000 swap files: beginning, ending and cleaning up beside makedirs and rmtree."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from bench.workers import Worker, WorkerError

BY_HAND, LEASE = "makedirs and rmtree", "OffloadManager.lease"
RMTREE, CLEAN = "rmtree", "cleanup_stale_swap"
EMPTY, BESIDE = "in an empty root", "beside a living run's files"
RUN, DEAD, START = "a run with many files", "what a dead run left", "starting"


def cases(quick: bool) -> Sequence[Case]:
    files = {"files": 50 if quick else 10_000, "bytes": 4096, "rounds": 2 if quick else 5}
    return Case(RUN, one_run, files), Case(DEAD, dead_run, files), Case(START, starting, files)


def lease(root: Path) -> AbstractContextManager[Any]:
    """A run's folder, as a plan with offload to NVMe gets it."""
    from zerotune import DeepSpeedPlan, OptimizerResolver, Platform
    from zerotune.offload import OffloadManager

    plan = DeepSpeedPlan.build(
        stage=3, offload="nvme", nvme_path="unused", precision="bf16", micro_batch_size=1
    )
    resolved = plan.resolve(platform=Platform.synthetic(), world_size=1)
    return OffloadManager(root=root).lease(OptimizerResolver().apply(resolved))


def fill(folder: Path, settings: Mapping[str, Any]) -> None:
    swap = folder / "zero_stage_3" / "optimizer" / "rank0"
    swap.mkdir(parents=True)
    for number in range(settings["files"]):
        (swap / f"{number}.tensor.swp").write_bytes(b"\x5a" * settings["bytes"])


@contextmanager
def by_hand(root: Path) -> Any:
    folder = root / "by-hand"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def one_run(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Begin, write the files, end: only beginning and end are timed."""

    def run(begun: Any) -> dict[str, float]:
        started = time.perf_counter()
        folder = begun(scratch / "root")
        held = folder.__enter__()
        begin = time.perf_counter() - started
        fill(getattr(held, "path", held), settings)
        ending = time.perf_counter()
        folder.__exit__(None, None, None)
        return {"begin_seconds": begin, "end_seconds": time.perf_counter() - ending}

    contestants = {BY_HAND: functools.partial(run, by_hand), LEASE: functools.partial(run, lease)}
    return Measured(samples=alternate(contestants, rounds=settings["rounds"]), baseline=BY_HAND)


class Doomed:
    """A run that is killed while it swaps."""

    def swap(self, root: str, settings: Mapping[str, Any]) -> None:
        with lease(Path(root)) as held:
            fill(held.path, settings)
            os.kill(os.getpid(), signal.SIGKILL)


def dead_run(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Remove what a killed process had leased."""
    from zerotune.offload import cleanup_stale_swap

    def die() -> None:
        with Worker(Doomed) as doomed:
            try:
                doomed.call("swap", str(scratch), dict(settings))
            except WorkerError as error:
                if "died" not in str(error):
                    raise

    def ours() -> None:
        report = cleanup_stale_swap(scratch)
        if len(report.removed) != 1 or report.freed < settings["files"] * settings["bytes"]:
            raise RuntimeError(f"not cleaned up: {report}")

    def theirs() -> None:
        (folder,) = (path for path in scratch.iterdir() if path.is_dir())
        shutil.rmtree(folder)

    contestants = {RMTREE: timed(theirs), CLEAN: timed(ours)}
    samples = alternate(contestants, rounds=settings["rounds"], before=die)
    note = "rmtree neither asks whether the folder's owner is dead nor counts bytes."
    return Measured(samples=samples, baseline=RMTREE, notes=(note,))


def starting(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Begin a lease where another run's files lie, and where none do."""

    def begin(root: Path) -> None:
        with lease(root):
            pass

    with lease(scratch / "busy") as held:
        fill(held.path, settings)
        places = {EMPTY: scratch / "empty", BESIDE: scratch / "busy"}
        contestants = {name: timed(functools.partial(begin, root)) for name, root in places.items()}
        samples = alternate(contestants, rounds=settings["rounds"])
    return Measured(samples=samples, baseline=EMPTY)


BENCHMARK = Benchmark(
    name="offload",
    title="the cost of many swap files against makedirs and rmtree",
    cases=cases,
    ours=(LEASE, CLEAN, BESIDE),
    goals=(
        Goal("ending a run with 10,000 swap files takes at most 1.5 times rmtree", RUN, LEASE,
             "end_seconds", 1.5, BY_HAND),
        Goal("removing a dead run's 10,000 swap files takes at most 1.5 times rmtree", DEAD, CLEAN,
             "seconds", 1.5, RMTREE),
        Goal("starting beside a living run with 10,000 files takes at most 0.1 s", START, BESIDE,
             "seconds", 0.1),
    ),
)  # fmt: skip
