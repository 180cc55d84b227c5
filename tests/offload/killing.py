"""SIGKILL at a random moment of a real run, clean up, start again: the parts of the fault tests."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from pathlib import Path
from typing import Any

import attrs

from tests.offload.trainee import STEPS, tell_and_train
from tests.support.ranks import _fork_server
from zerotune.offload import cleanup_stale_swap, find_leases

PHASES = ("start", "ready", *(f"{what} {n}" for n in range(STEPS) for what in ("step", "saving")))


@attrs.frozen(kw_only=True)
class Kill:
    """When a run was killed, and what it left."""

    phase: str
    """The last it said."""
    delay: float
    """Seconds it was let go on after that."""
    left: int
    """Bytes in its swap folder."""
    survived: bool = False
    """Whether it came to its end before the signal."""


class Victim:
    """A training run in a process of its own."""

    def __init__(self, root: Path, checkpoints: Path, **options: Any) -> None:
        context = _fork_server()
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=tell_and_train,
            args=(theirs, str(root), str(checkpoints)),
            kwargs=options,
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.said: list[Any] = []

    def await_phase(self, phase: str) -> None:
        """Return once the run has come as far as ``phase``, or has ended."""
        with contextlib.suppress(EOFError):
            while not self.said or self.said[-1] != phase:
                assert self._pipe.poll(120), f"the run says nothing after {self.said[-1:]}"
                self.said.append(self._pipe.recv())

    def kill_after(self, phase: str, delay: float = 0.0) -> None:
        """SIGKILL it so many seconds after it has come to ``phase``."""
        self.await_phase(phase)
        time.sleep(delay)
        self.process.kill()
        self.process.join(60)

    def losses(self) -> dict[int, float]:
        """What it gives at its end."""
        self.await_phase("end")
        result = self._pipe.recv()
        self.process.join(60)
        return dict(result)


def digest_of(folder: Path) -> str:
    """A digest of all a folder holds, names included."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def kill_and_start_again(
    root: Path, checkpoints: Path, chance: random.Random, *, phase: str, **options: Any
) -> tuple[Kill, dict[int, float]]:
    """One round: a run dies after ``phase``, its folder is cleaned up, a new run resumes it.

    Returns:
        What happened, and the losses of the run that came to the end.
    """
    before = {lease.path for lease in find_leases(root)}
    victim = Victim(root, checkpoints, **options)
    delay = chance.random() * (1.0 if phase == "start" else 0.15)
    victim.kill_after(phase, delay)
    left = sum(lease.size for lease in find_leases(root) if lease.path not in before)
    report = cleanup_stale_swap(root)
    assert not report.failures
    assert {lease.path for lease in find_leases(root)} == before, "more or less than the dead went"
    losses = Victim(root, checkpoints, **options).losses()
    return Kill(phase=phase, delay=delay, left=left, survived="end" in victim.said), losses
