"""Collect the errors of all code that reads or writes a path when the system refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.offload.plans import swapping_plan
from tests.training.faulty import small
from zerotune.checkpoint import RootHold, export_pipeline
from zerotune.checkpoint.export.model import export_checkpoint
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.diffusion.data import ImageFolder
from zerotune.diffusion.data.cache import CacheSettings, TensorCache
from zerotune.ema import EMAShadow, FileStore
from zerotune.errors import ZeroTuneError
from zerotune.offload import OffloadManager, cleanup_stale_swap
from zerotune.offload.lease import find_leases
from zerotune.training import SaveEvery, SaveEveryInBackground, Trainer
from zerotune.training.events import read_metrics

Work = Callable[[Path], Any]


def reading(trainer: Trainer, root: Path) -> dict[str, Work]:
    """Return the operations that read a path."""
    engine = trainer.engine
    return {
        "resume": trainer.resume,
        "roll back": lambda path: trainer.roll_back(path, reason="a test"),
        "verify": verify_checkpoint,
        "export a checkpoint": lambda path: export_checkpoint(path, root / "1"),
        "base": lambda path: export_pipeline(root / "4", engine=engine, base=path),
        "metrics": read_metrics,
        "images": ImageFolder,
        "cache": lambda path: TensorCache(path, settings=CACHE).read("0" * 40),
        "leases": find_leases,
        "clean": cleanup_stale_swap,
    }


def writing(trainer: Trainer, root: Path) -> dict[str, Work]:
    """Return the operations that write to a path."""
    engine, report = trainer.engine, trainer.report()
    return {
        "save": trainer.save,
        "export": trainer.export,
        "export a file": lambda path: trainer.export(f"{path}.safetensors"),
        "export a checkpoint": lambda path: export_checkpoint(root / "good", path),
        "hold": lambda path: RootHold(path).close(),
        "save every": lambda path: saving(SaveEvery(steps=1, root=path, keep=1)),
        "in the background": lambda path: saving(SaveEveryInBackground(steps=1, root=path)),
        "report": report.save,
        "a shadow": lambda path: EMAShadow(store=FileStore(folder=path)).attach(engine),
        "cache": cached,
        "swap": swapping,
    }


CACHE = CacheSettings(kind="latents", model="none", dtype="float32")


def cached(path: Path) -> None:
    TensorCache(path, settings=CACHE).write({"0" * 40: {"latents": torch.zeros(200_000)}})


def swapping(path: Path) -> None:
    with OffloadManager(root=path).lease(swapping_plan()):
        pass


def saving(callback: Any) -> None:
    with small(callbacks=[callback]) as trainer:
        trainer.fit(steps=1)


def refused(root: str, places: dict[str, str]) -> dict[str, str]:
    """Return each operation's error for each place; empty if it succeeds."""
    found = {}
    with small(ema=EMAShadow(decay=0.9)) as trainer:
        trainer.fit(steps=1)
        trainer.save(Path(root) / "good")
        works = {
            **{f"read {name}": work for name, work in reading(trainer, Path(root)).items()},
            **{f"write {name}": work for name, work in writing(trainer, Path(root)).items()},
        }
        for name, work in works.items():
            for place, path in places.items():
                found[f"{name}: {place}"] = told(work, Path(path))
    return found


def told(work: Work, path: Path) -> str:
    try:
        work(path)
    except ZeroTuneError as error:
        where = os.fspath(path)[:60]
        thin = "" if where in str(error).replace("\\x00", "\0") and error.fix else "THIN "
        return f"{thin}{error}"
    except Exception as error:  # noqa: BLE001 - what must not happen is told
        return f"FOREIGN {type(error).__name__}: {error}"
    return ""
