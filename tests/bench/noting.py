"""Pieces that only record that they ran, in sessions; imports are few, as each is a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu import Piece, Session

HERE = "tests.bench.noting"
MACHINE = {
    "hardware": {
        "devices": [{"name": "NVIDIA H100 80GB HBM3", "gib": 79.6}],
        "usable_cores": 16,
        "processor": "x",
        "host_gib": 128.0,
    },
    "versions": {
        "torch": "2.11.0+cu130",
        "deepspeed": "0.19.8",
        "accelerate": "1.15.0",
        "diffusers": "0.42.1",
    },
    "flux_depth": [6, 12],
}


def note(settings: Mapping[str, Any]) -> dict[str, Any]:
    with Path(settings["folder"], "ran").open("a") as file:
        file.write(settings["name"] + "\n")
    return {"seconds": [1.0, 2.0, 3.0], "device_bytes": 2**30, "name": settings["name"]}


def note_and_kill(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = note(settings)
    marker = Path(settings["folder"], "killed")
    if not marker.exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return found


def fail(settings: Mapping[str, Any]) -> dict[str, Any]:
    note(settings)
    raise ValueError("this is why")


def leave(settings: Mapping[str, Any]) -> dict[str, Any]:
    note(settings)
    raise SystemExit(0)


def grow(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield note(settings)
    if Path(settings["folder"], "ran").read_text().count(settings["name"]) > 1:
        os._exit(3)
    raise ValueError("this is why")


def last(settings: Mapping[str, Any]) -> dict[str, Any]:
    note(settings)
    Path(settings["folder"], "pid").write_text(str(os.getpid()))
    time.sleep(60)
    return {}


def piece(name: str, function: Any = note, **more: Any) -> Piece:
    settings = {"name": name}
    made = f"{HERE}:{function.__name__}"
    return Piece(name=name, made=made, settings=settings, **{"least_s": 0.0, **more})


def session(output: Path, *, left: float = 120.0, **more: Any) -> Session:
    until = time.monotonic() + left
    return Session(output / "machine.json", MACHINE, until=until, **more)


def run(output: Path, *pieces: Piece, **more: Any) -> tuple[bool, dict[str, Any]]:
    """Run a session; return whether nothing is left to run, and its entries."""
    made = session(output, **more)
    return made.run(pieces, lambda: None), made.entries


def chain(killing: int) -> list[Piece]:
    kinds = [note_and_kill if index == killing else note for index in range(3)]
    return [piece(f"p{index}", kind) for index, kind in enumerate(kinds)]
