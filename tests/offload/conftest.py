"""Fixtures of the swap lease's tests: real processes that hold a lease, and real mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerotune.decisions

HOLDER = Path(__file__).with_name("holder.py")


class Holder:
    """A living process with a lease."""

    def __init__(self, *arguments):
        source = str(Path(zerotune.decisions.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )

    def read(self):
        line = self.process.stdout.readline().strip()
        assert line, "the holder ended early; its traceback is on standard error"
        return line

    def tell(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def leave(self):
        self.tell("leave")
        assert self.read() == "left"
        assert self.process.wait(timeout=120) == 0

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=120)

    def close(self):
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def hold():
    """Return a function that starts a process with a lease; end those still running."""
    holders = []

    def start(*arguments):
        holders.append(Holder(*arguments))
        return holders[-1]

    yield start
    for holder in holders:
        holder.close()


@pytest.fixture(autouse=True)
def _no_root_from_outside(monkeypatch):
    monkeypatch.delenv("ZEROTUNE_SWAP_ROOT", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(zerotune.decisions, "_announced", set())
