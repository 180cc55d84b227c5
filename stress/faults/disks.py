"""A disk that becomes full or read-only during a write.

Every error is a zerotune error, existing files stay intact, no partial file is left, and writing
works again once there is room.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from stress.faults.campaign import Found
from stress.faults.resuming import batches, trainer
from stress.faults.workers import Team
from tests.checkpoint.runs import everything
from tests.offload.plans import swapping_plan
from zerotune.checkpoint import BackgroundSaver, latest_checkpoint
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.diffusion.data import ImageTensors
from zerotune.diffusion.data.cache import CacheSettings, TensorCache
from zerotune.errors import ZeroTuneError
from zerotune.offload import OffloadManager
from zerotune.training import MetricsFile, SaveEvery

SIZE = 2**20


_RAW: Final = re.compile(r"\b(?!OSError)\w*Error: |OSError: (?!.*: '/)")
"""Matches foreign errors, except a rank's report of an ``OSError`` with its path."""


class Writer:
    """A trainer that writes everything it can to one folder.

    Args:
        folder: Target folder; its own file system if one could be mounted.
        mounted: Whether ``folder`` is its own file system.
    """

    def __init__(self, folder: str, mounted: bool) -> None:
        # By default, SIGXFSZ kills the process when a file exceeds the limit.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self._disk, self._mounted = Path(folder), mounted
        self._trainer = trainer(ImageTensors(images=torch.cat([b["images"] for b in batches()])))
        self._around = self._trainer.callbacks
        self._trainer.fit(steps=1)
        self._good = self._trainer.save(self._disk / "checkpoints" / "step-00000001")
        self._writes: dict[str, Callable[[], Any]] = {
            "save": self._save,
            "save over": lambda: self._trainer.save(self._good),
            "save in the background": self._save_in_background,
            "train and save": self._train,
            "export": lambda: self._trainer.export(self._disk / "export"),
            "cache": self._cache,
            "lease": self._lease,
        }

    @property
    def names(self) -> list[str]:
        return list(self._writes)

    def attack(self, seed: float) -> str:
        """Write something to a failing disk, and return a description of the outcome."""
        chance = random.Random(seed)
        name = chance.choice(self.names)
        way = chance.choice(["full", "read-only"]) if self._mounted else "limit"
        room = int(2 ** chance.uniform(0, 16))
        said, error = f"{way}, {name}, {room} bytes left", None
        with {"full": self._full, "read-only": self._read_only, "limit": self._limit}[way](room):
            try:
                self._writes[name]()
            except ZeroTuneError as caught:
                error = caught
        said = f"{said}: {type(error).__name__}: {error}"
        named = error is None or (error.key is not None and error.fix is not None)
        if not named or _RAW.search(str(error)):
            raise Found("foreign", f"no path, no fix, or a raw error: {said}")
        self._look(said)
        self._trainer.callbacks = self._around
        if error is None:
            self._tidy()
        try:
            self._writes[name]()
        except Exception as caught:
            raise Found(
                "lost", f"with room again: {type(caught).__name__}: {caught}; {said}"
            ) from caught
        self._tidy()
        return said

    def _look(self, said: str) -> None:
        """Check that existing files are intact, and that no partial file is published or left."""
        verify_checkpoint(self._good)
        if latest_checkpoint(self._disk / "checkpoints") is None:
            raise Found("lost", f"no checkpoint is left; {said}")
        for path in (self._disk / "checkpoints").iterdir():
            half = re.search(r"\.tmp|\.draft|\.old-", path.name)
            if half and not said.startswith("read-only"):
                raise Found("lost", f"{path.name} is left; {said}")
            if path.name.startswith("step-") and not half:
                verify_checkpoint(path)
        if not all(
            bool(f.value.isfinite().all()) for f in self._trainer.engine.master_weights.read()
        ):
            raise Found("lost", f"the weights are spoiled; {said}")
        everything(self._trainer.engine, self._trainer.emas.shadows["ema"])

    def _tidy(self) -> None:
        for path in self._disk.iterdir():
            if path.name != "checkpoints":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (self._disk / "checkpoints").iterdir():
            if path != self._good:
                shutil.rmtree(path)
        self._trainer.callbacks = self._around
        self._trainer.resume(self._good)

    # -- Writes.

    def _save(self) -> None:
        self._trainer.save(self._disk / "checkpoints" / "step-00000002")

    def _save_in_background(self) -> None:
        with BackgroundSaver(engine=self._trainer.engine) as saver:
            saver.save(self._disk / "checkpoints" / "step-00000003").wait()

    def _train(self) -> None:
        saver = SaveEvery(steps=2, root=self._disk / "checkpoints", keep=9)
        self._trainer.callbacks = (*self._around, MetricsFile(self._disk / "metrics.jsonl"), saver)
        self._trainer.fit(steps=self._trainer.step + 4)

    def _cache(self) -> None:
        settings = CacheSettings(kind="latents", model="none", dtype="float32")
        cache = TensorCache(self._disk / "cache", settings=settings)
        tensors = {f"{key:040x}": {"latents": torch.randn(8, 8, 8)} for key in range(8)}
        cache.write(tensors)
        again = TensorCache(self._disk / "cache", settings=settings)
        for key, named in tensors.items():
            if not torch.equal(again.read(key)["latents"], named["latents"]):
                raise Found("lost", "other tensors than were written")

    def _lease(self) -> None:
        with OffloadManager(root=self._disk / "swap").lease(swapping_plan()):
            pass

    # -- Disk failures.

    @contextmanager
    def _full(self, room: int) -> Iterator[None]:
        """Fill the disk, but report free space, as if another process filled it after the check."""
        ballast = self._disk / "ballast"
        free = shutil.disk_usage(self._disk).free
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - room))
        plenty = shutil.disk_usage(self._disk)._replace(free=2**40)
        try:
            with mock.patch("shutil.disk_usage", return_value=plenty):
                yield
        finally:
            ballast.unlink()

    @contextmanager
    def _read_only(self, room: int) -> Iterator[None]:  # noqa: ARG002 - there is none
        remount(self._disk, "ro")
        try:
            yield
        finally:
            remount(self._disk, "rw")

    @contextmanager
    def _limit(self, room: int) -> Iterator[None]:
        """Limit the file size."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mounted(point: Path) -> bool:
    """Mount a small file system at ``point``; return whether that succeeded."""
    options = ("-t", "tmpfs", "-o", f"size={64 * SIZE}", "none", str(point))
    if shutil.which("mount") is None:
        return False
    return not subprocess.run(["mount", *options], capture_output=True, check=False).returncode


def remount(point: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(point)], check=True)


class Disks:
    """Failing disks under one trainer; on a tmpfs if one can be mounted."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="faults-disks-", ignore_cleanup_errors=True
        )
        self._mounts: list[Path] = []
        self._team: Team | None = None

    def inject(self, work: Path, chance: random.Random) -> None:  # noqa: ARG002 - has its own
        if self._team is None or not self._team.alive:
            disk = Path(self._folder.name, str(len(self._mounts)))
            disk.mkdir()
            self._mounts.append(disk)
            self._team = Team(Writer, str(disk), mounted(disk))
        self._team.ask("attack", chance.random())

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
        for disk in self._mounts:
            subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)
        self._folder.cleanup()
