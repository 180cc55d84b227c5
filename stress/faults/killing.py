"""SIGKILL real runs at random moments, clean up, and resume: no difference may remain.

The runs share a swap root with two living runs, whose folders must not change, and with a process
that cleans it in a loop. Killed runs are resumed to the end, and their losses must be bit-identical
to those of a run that was never killed. Every third run has its parameters on NVMe too.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stress.faults.campaign import Found, NotHere
from stress.faults.trainee import IN_HOST_MEMORY, STEPS, tell_and_train
from stress.faults.workers import wait_for
from tests.offload.conftest import Holder
from tests.support.ranks import _fork_server, compile_io
from zerotune.offload import cleanup_stale_swap
from zerotune.offload.lease import find_leases

PHASES = ("start", "ready", *(f"{what} {n}" for n in range(STEPS) for what in ("step", "saving")))

CLEANER = """
import sys, time
from zerotune.offload import cleanup_stale_swap
while True:
    if cleanup_stale_swap(sys.argv[1]).failures:
        sys.exit(3)
    time.sleep(0.05)
"""


def libaio() -> bool:
    """Return whether DeepSpeed's async I/O can be built."""
    return Path("/usr/include/libaio.h").exists()


class Victim:
    """A training run in its own process."""

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
        """Return when the run has reached ``phase`` or has ended."""
        with contextlib.suppress(EOFError):
            while not self.said or self.said[-1] != phase:
                assert self._pipe.poll(240), f"the run says nothing after {self.said[-1:]}"
                self.said.append(self._pipe.recv())

    def kill_after(self, phase: str, delay: float = 0.0) -> None:
        """SIGKILL the run ``delay`` seconds after it has reached ``phase``."""
        self.await_phase(phase)
        time.sleep(delay)
        self.process.kill()
        self.process.join(60)

    def losses(self) -> dict[int, float]:
        """Wait for the end and return the losses by step."""
        self.await_phase("end")
        result = self._pipe.recv()
        self.process.join(60)
        return dict(result)


def digest_of(folder: Path) -> str:
    """Return a digest of all files in a folder, names included."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


class Kills:
    """Kills of runs next to two living runs and a cleaner."""

    def __init__(self) -> None:
        if libaio():
            compile_io()
        self._work = tempfile.TemporaryDirectory(prefix="faults-kills-")
        self._root = Path(self._work.name, "swap")
        self._root.mkdir()
        self._neighbours = [Holder(self._root) for _ in range(2)]
        self._folders = [Path(neighbour.read()) for neighbour in self._neighbours]
        self._before = [digest_of(one) for one in self._folders]
        self._cleaner = subprocess.Popen([sys.executable, "-c", CLEANER, str(self._root)])
        self._expected: dict[str, dict[int, float]] = {}

    def inject(self, work: Path, chance: random.Random) -> None:
        if not libaio():
            raise NotHere("swapping needs libaio")
        param = "nvme" if chance.randrange(3) == 0 else "cpu"
        if param not in self._expected:
            alone = Victim(work / "apart", work / "alone", param=param)
            self._expected[param] = alone.losses()
        several = 2 if chance.randrange(4) == 0 else 1
        victims = [Victim(self._root, work / str(n), param=param) for n in range(several)]
        for victim in victims:
            phase = chance.choice(PHASES)
            victim.kill_after(phase, chance.random() * (1.0 if phase == "start" else 0.15))
        if report := cleanup_stale_swap(self._root).failures:
            raise Found("lost", f"the cleaning failed: {report}")
        # The other cleaner may still be removing leases that this one skipped.
        living = set(self._folders)
        wait_for(
            lambda: {lease.path for lease in find_leases(self._root)} <= living,
            seconds=30,
            what="the removal of what the dead left",
        )
        for number in range(several):
            losses = Victim(self._root, work / str(number), param=param).losses()
            if losses != {step: self._expected[param][step] for step in losses}:
                raise Found("lost", f"other losses: {losses} for {self._expected[param]}")
        if [digest_of(one) for one in self._folders] != self._before:
            raise Found("lost", "a living run's folder was touched")
        if self._cleaner.poll() is not None:
            raise Found("foreign", f"the cleaner ended with code {self._cleaner.returncode}")

    def close(self) -> None:
        self._cleaner.kill()
        self._cleaner.wait(30)
        for neighbour in self._neighbours:
            neighbour.close()
        self._work.cleanup()


class HostKills:
    """Kills of runs whose optimizer and EMA step in host memory in one pass.

    Args:
        kinds: Kinds of runs, as ``param`` of ``train``.
    """

    def __init__(self, kinds: Sequence[str] = tuple(IN_HOST_MEMORY)) -> None:
        self._kinds = kinds
        self._expected: dict[str, dict[int, float]] = {}

    def inject(self, work: Path, chance: random.Random) -> None:
        kind = chance.choice(self._kinds)
        if kind not in self._expected:
            self._expected[kind] = Victim(work / "swap", work / "alone", param=kind).losses()
        phase = chance.choice(PHASES)
        delay = chance.random() * (1.0 if phase == "start" else 0.05)
        Victim(work / "swap", work / "run", param=kind).kill_after(phase, delay)
        losses = Victim(work / "swap", work / "run", param=kind).losses()
        if losses != {step: self._expected[kind][step] for step in losses}:
            raise Found("lost", f"{kind}: other losses: {losses} for {self._expected[kind]}")

    def close(self) -> None:
        """Do nothing: no process is left."""
