"""Saving and resuming: time, memory and disk, against DeepSpeed's and accelerate's own."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.ema import WIDTH
from bench.loops import BY_HAND, LOOPS, OURS
from bench.overhead import PLANS
from bench.runner import Benchmark, Case, Goal, Measured, alternate
from bench.workers import Worker, together

PAGE = 4096
"""Smaller growth is reported as one page, so that ratios never divide by zero."""
NOTES = (
    (
        "`save` is the time until the call returns, and `save to disk` the time until the files "
        "are on the disk (`fsync`). zerotune's call returns only when every byte is on the disk "
        "and has been read back. "
        "`resume` reads files from the page cache."
    ),
    (
        "`memory growth` is the growth of anonymous memory during the save or during the resume; "
        "the table gives the larger of the two."
    ),
)


def cases(quick: bool) -> Sequence[Case]:
    size = (
        {"layers": 2, "width": 256, "rounds": 1, "warm_up": 0}
        if quick
        else {"layers": 20, "width": WIDTH, "rounds": 15, "warm_up": 1}
    )
    names = list(PLANS)[:1] if quick else list(PLANS)
    return tuple(
        Case(name, measure, {"plan": dict(PLANS[name]), "model": "stack", **size}) for name in names
    )


def measure(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Start the three, train a little, then let them save and resume in turns."""
    with together({name: (loop, settings) for name, loop in LOOPS.items()}) as workers:
        parameters = 0
        for worker in workers.values():
            parameters = worker.call("start")
            worker.call("steps", 1)
        samples = alternate(
            {
                name: functools.partial(_save_and_load, worker, scratch / "checkpoint")
                for name, worker in workers.items()
            },
            rounds=settings["rounds"],
            warm_up=settings["warm_up"],
            # Otherwise one contestant's dirty pages would be written during the next one's turn.
            before=os.sync,
        )
    return Measured(
        samples=samples,
        baseline=BY_HAND,
        facts={
            "parameters": parameters,
            "state in bytes": 12 * parameters,
        },
        notes=NOTES,
    )


def _save_and_load(worker: Worker, folder: Path) -> dict[str, float]:
    held = worker.call("bytes_now")
    started = time.perf_counter()
    _, save_peak = worker.peak("save", str(folder))
    returned = time.perf_counter()
    nbytes = _bring_to_disk(folder)
    synced = time.perf_counter()
    _, load_peak = worker.peak("load", str(folder))
    loaded = time.perf_counter()
    shutil.rmtree(folder)
    return {
        "save_seconds": returned - started,
        "save_to_disk_seconds": synced - started,
        "resume_seconds": loaded - synced,
        "memory_bytes": max(PAGE, save_peak - held, load_peak - held),
        "on_disk_bytes": nbytes,
    }


def _bring_to_disk(folder: Path) -> int:
    """Flush all files to disk and return their total bytes."""
    nbytes = 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        nbytes += path.stat().st_size
    return nbytes


BENCHMARK = Benchmark(
    name="checkpoint",
    title="saving and resuming, compared with DeepSpeed's and accelerate's own checkpoints",
    cases=cases,
    ours=(OURS,),
    goals=tuple(
        Goal(f"{case}: {what}", case, OURS, quantity, limit, BY_HAND)
        for case in PLANS
        for what, quantity, limit in (
            ("a save reaches the disk no later than DeepSpeed's", "save_to_disk_seconds", 1.0),
            ("a resume takes no longer than DeepSpeed's", "resume_seconds", 1.0),
            ("saving and resuming need at most half of the additional memory that DeepSpeed needs",
             "memory_bytes", 0.5),
        )
    ),
)  # fmt: skip
