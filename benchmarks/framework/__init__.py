"""What all benchmarks share: alternation, statistics, results that resume, tables and plots."""

from __future__ import annotations

from benchmarks.framework.running import alternate, run, timed
from benchmarks.framework.values import (
    Benchmark,
    Case,
    CaseRefused,
    Context,
    Goal,
    Measured,
    TimeIsUp,
)
from benchmarks.framework.workers import (
    AnonPeak,
    FreshWorker,
    Worker,
    WorkerError,
    anon_bytes,
    device_bytes,
)

__all__ = [
    "Benchmark",
    "Case",
    "CaseRefused",
    "Context",
    "Goal",
    "Measured",
    "TimeIsUp",
    "alternate",
    "run",
    "timed",
    "FreshWorker",
    "Worker",
    "WorkerError",
    "AnonPeak",
    "anon_bytes",
    "device_bytes",
]
