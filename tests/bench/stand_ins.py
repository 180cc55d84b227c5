"""Stand-ins for the phases of ``bench.large``, which train nothing; workers import them by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from bench.full_size import Needs, Training


class Small:
    """Prepares a training that needs little."""

    memory = 2**20

    def __init__(self, _training: Training, scratch: Path) -> None:
        self._scratch = scratch

    def needs(self) -> Needs:
        memory_free = 2**30
        return Needs(
            memory=self.memory, memory_free=memory_free, swap=0, pipeline=0, checkpoint=2**20
        )

    def write(self) -> None:
        (self._scratch / "pipeline").mkdir()


class Huge(Small):
    """Prepares a training that needs more memory than there is."""

    memory = 2**40


class Quick:
    """Trains nothing, and succeeds."""

    def __init__(self, _training: Training, scratch: Path) -> None:
        self._scratch = scratch

    def start(self) -> dict[str, Any]:
        return {}

    def step(self) -> dict[str, float]:
        return {"loss": 1.0, "forward_seconds": 0.5}

    def save(self) -> int:
        (self._scratch / "checkpoint").mkdir()
        return 2**20

    def resume(self) -> None:
        pass

    def export(self, what: str) -> None:
        (self._scratch / f"export-{what}").mkdir()

    def read_back(self, _what: str) -> str:
        return "all finite"

    def finish(self) -> None:
        pass


class Killed(Quick):
    """Is killed in its first step, as by the kernel when memory runs out."""

    def step(self) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Broken(Quick):
    """Raises an error in its first step."""

    def step(self) -> dict[str, float]:
        raise ValueError("this is why")
