"""Every benchmark by name. A module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from benchmarks.framework import Benchmark

CPU: Final = (
    "ema",
    "data",
    "loading",
    "offload",
    "memory",
    "checkpoint",
    "step",
    "overhead",
    "prediction",
    "fake_device",
)
"""Those that say something on a machine without a GPU, shortest first."""
GPU: Final = ("sdxl", "flux")
"""Those made for a GPU; elsewhere ``--quick`` shows that they work."""


def available() -> tuple[str, ...]:
    """The names of all that are here."""
    return tuple(name for name in (*CPU, *GPU) if find_spec(f"benchmarks.{name}") is not None)


def load(name: str) -> Benchmark:
    """The module's ``BENCHMARK``."""
    found = import_module(f"benchmarks.{name}").BENCHMARK
    if not isinstance(found, Benchmark) or found.name != name:
        raise TypeError(f"benchmarks.{name}.BENCHMARK is no Benchmark of that name")
    return found
