"""Locks of build folders, held by live, dead and remote processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zerotune.backend import op_builds
from zerotune.backend.op_builds import FOLDER, LivingLock, building
from zerotune.errors import PlatformError

HOLD = """
import sys, time
from zerotune.backend.op_builds import LivingLock
assert LivingLock(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    return folder / "lock"


def test_a_lock_is_acquired_once_and_released(lock: Path) -> None:
    held = LivingLock(str(lock))
    assert held.try_acquire()
    assert lock.read_text().split()[1] == str(os.getpid())
    held.release()
    held.release()
    assert not lock.exists()


def test_a_killed_build_does_not_block_the_next_one(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "held"
        process.send_signal(signal.SIGKILL)
    assert lock.exists()
    with caplog.at_level(logging.WARNING, logger="zerotune"):
        next_one = LivingLock(str(lock))
        assert next_one.try_acquire()
    assert f"process {process.pid} ended while compiling" in caplog.text
    next_one.release()


def test_waiting_for_a_lock_is_logged(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op_builds, "SILENT_FOR", 0.0)
    first, second = LivingLock(str(lock)), LivingLock(str(lock), wait_seconds=0.01)
    assert first.try_acquire()
    taken = threading.Event()

    def wait() -> None:
        second.try_acquire()
        taken.set()

    with caplog.at_level(logging.WARNING, logger="zerotune"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while "waiting for its lock" not in caplog.text:
            time.sleep(0.01)
        assert not taken.is_set()
        first.release()
        waiting.join()
    assert taken.is_set()
    assert f"process {os.getpid()} has been compiling the op" in caplog.text
    assert str(lock) in caplog.text
    second.release()


TORCHS = """
import os, sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
os.utime(sys.argv[1], (0, time.time() - 60))
print("held", flush=True)
time.sleep(60)
"""
LIKE_TORCH = TORCHS.replace("from torch.utils.file_baton import FileBaton\n", "").replace(
    "assert FileBaton(sys.argv[1]).try_acquire()", "os.open(sys.argv[1], os.O_CREAT)"
)
"""Do as FileBaton does, without importing torch."""


def _with_torchs_lock(lock: Path, code: str = LIKE_TORCH) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    return process


def test_a_killed_build_of_plain_torch_does_not_block_the_next_one(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _with_torchs_lock(lock, TORCHS) as process:
        op_builds.remove_if_dead(lock)
        assert lock.exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
    assert lock.read_bytes() == b"", "torch says nothing about whose it is"
    with caplog.at_level(logging.WARNING, logger="zerotune"):
        next_one = LivingLock(str(lock))
        assert next_one.try_acquire()
    assert "a process ended while compiling the op; its lock has been removed" in caplog.text
    next_one.release()


def test_before_a_build_the_locks_of_dead_processes_are_removed_from_all_ops(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    dead, of_zerotune = (tmp_path / name / "lock" for name in ("deepspeed_shm_comm", "own"))
    for each in (dead, of_zerotune):
        each.parent.mkdir()
    of_zerotune.write_text(f"{socket.gethostname()} 999999")
    with _with_torchs_lock(dead) as process:
        process.send_signal(signal.SIGKILL)
    with _with_torchs_lock(lock) as process:
        with caplog.at_level(logging.WARNING, logger="zerotune"), building():
            assert lock.exists(), "its process lives"
            assert not dead.exists()
            assert not of_zerotune.exists()
        process.send_signal(signal.SIGKILL)
    assert "op deepspeed_shm_comm: a process ended while compiling" in caplog.text
    assert "op own: process 999999 ended while compiling" in caplog.text


def test_a_lock_of_another_machine_raises_an_error_that_names_it(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_builds, "filesystem_kind", lambda _folder: "nfs4")
    lock.touch()
    os.utime(lock, (0, time.time() - 3600))
    with pytest.raises(PlatformError, match=f"delete {lock}"):
        LivingLock(str(lock)).try_acquire()
    assert lock.exists()


def test_torch_compiles_extensions_under_our_lock() -> None:
    from torch.utils import cpp_extension

    before = cpp_extension.FileBaton
    with building():
        assert cpp_extension.FileBaton is LivingLock
    assert cpp_extension.FileBaton is before


def test_a_compilation_says_that_it_goes_on_until_it_ends(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op_builds, "SAID_EVERY", 0.01)
    held = LivingLock(str(lock))
    with caplog.at_level("WARNING", logger="zerotune"):
        assert held.try_acquire()
        while "compiling for" not in caplog.text:
            time.sleep(0.01)
        held.release()
    assert "compiling it once" in caplog.text
