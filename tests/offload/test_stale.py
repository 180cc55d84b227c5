from __future__ import annotations

import inspect
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import attrs
import pytest

from zerotune._util.ownership import new_run_id
from zerotune.errors import OffloadError
from zerotune.offload import cleanup_stale_swap
from zerotune.offload import lease as stale
from zerotune.offload.lease import find_leases, lease_name
from zerotune.offload.record import LeaseRecord


@pytest.fixture
def dead(tmp_path):
    """Return a function that creates the folder of a killed run, with changes to its record."""

    def make(*, filesystem=None, **owner):
        run_id = new_run_id()
        folder = tmp_path / lease_name(run_id)
        folder.mkdir()
        (folder / "lease.lock").touch()
        (folder / "data.swp").write_bytes(b"x" * 10_000)
        record = LeaseRecord.for_this_process(
            run_id=run_id, rank=0, world_size=1, plan_digest="0" * 64, filesystem=filesystem
        )
        changed = {"pid_start": record.owner.pid_start + 1, **owner}
        attrs.evolve(record, owner=attrs.evolve(record.owner, **changed)).write(folder)
        return folder

    return make


def only(root):
    (found,) = find_leases(root)
    return found


def test_a_process_with_a_reused_pid_is_not_the_owner(tmp_path, dead):
    dead()
    assert only(tmp_path).state == "stale"


def test_a_process_ended_by_a_signal_removes_its_folder(tmp_path, hold):
    one = hold(tmp_path)
    folder = Path(one.read())
    one.process.terminate()
    assert one.process.wait(timeout=120) == -signal.SIGTERM
    assert not folder.exists()


def test_a_signal_handler_of_the_script_is_kept(monkeypatch):
    taken = []
    monkeypatch.setattr(stale.atexit, "register", lambda _: None)
    monkeypatch.setattr(stale.signal, "signal", lambda number, _: taken.append(number))
    handlers = iter([signal.SIG_IGN, signal.SIG_DFL])
    monkeypatch.setattr(stale.signal, "getsignal", lambda _: next(handlers))
    register = stale._when_processes_end.__wrapped__
    register()
    assert taken == []
    # Python allows signal handlers only in the main thread.
    thread = threading.Thread(target=register)
    thread.start()
    thread.join()
    assert taken == []
    register()
    assert taken == [signal.SIGTERM]


def test_a_live_owner_without_its_lock_is_left_alone(tmp_path, dead):
    record = LeaseRecord.for_this_process(run_id="", rank=0, world_size=1, plan_digest="")
    dead(pid_start=record.owner.pid_start)
    assert only(tmp_path).state == "unknown"
    assert f"process {os.getpid()} of rank 0 is alive" in only(tmp_path).reason


ANOTHER_BOOT = {"host": "elsewhere", "boot_id": "another"}
ANOTHER_CONTAINER = {"host": "another-container", "pid_namespace": 1}


@pytest.mark.parametrize(
    ("owner", "kind", "owners", "state"),
    [
        (ANOTHER_BOOT, "ext4", "ext4", "stale"),
        (ANOTHER_BOOT, "overlay", "overlay", "stale"),
        (ANOTHER_BOOT, "nfs4", "nfs4", "unknown"),
        # An NFS server sees its disk as local but cannot see its clients' locks.
        (ANOTHER_BOOT, "ext4", "nfs4", "unknown"),
        (ANOTHER_BOOT, "ext4", "virtiofs", "unknown"),
        (ANOTHER_BOOT, "ext4", None, "unknown"),
        (ANOTHER_BOOT, None, None, "unknown"),
        (ANOTHER_CONTAINER, "ext4", "ext4", "stale"),
        (ANOTHER_CONTAINER, "nfs4", "nfs4", "unknown"),
        ({}, "nfs4", "nfs4", "stale"),
    ],
)
def test_records_of_other_boots_and_containers_are_trusted_only_on_local_disks(
    tmp_path, dead, monkeypatch, owner, kind, owners, state
):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: kind)
    dead(filesystem=owners, **owner)
    assert only(tmp_path).state == state


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "\x00"])
def test_a_folder_with_a_damaged_record_has_an_unknown_state(tmp_path, dead, text):
    (dead() / "rank0.json").write_text(text)
    assert only(tmp_path).state == "unknown"
    assert "damaged record" in only(tmp_path).reason


def record_gone(folder):
    (folder / "rank0.json").unlink()


def lock_gone(folder):
    (folder / "lease.lock").unlink()


def lock_linked(folder):
    (folder / "lease.lock").rename(folder.parent / "other.lock")
    (folder / "lease.lock").symlink_to(folder.parent / "other.lock")


def folder_linked(folder):
    folder.symlink_to(folder.rename(folder.parent / "moved"))


@pytest.mark.parametrize(
    ("change", "state"),
    # The first is the state of an interrupted removal.
    [(record_gone, "stale"), (lock_gone, "unknown"), (lock_linked, "unknown"),
     (folder_linked, "unknown")],
)  # fmt: skip
def test_only_folders_with_a_lock_of_their_own_are_stale(tmp_path, dead, change, state):
    change(dead())
    assert only(tmp_path).state == state


@pytest.mark.parametrize(("kind", "state"), [("ext4", "stale"), ("nfs4", "unknown")])
def test_files_without_a_record_prove_nothing_on_a_shared_disk(
    tmp_path, dead, monkeypatch, kind, state
):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: kind)
    folder = dead()
    record_gone(folder)
    assert only(tmp_path).state == state
    # The rest of a removal.
    (folder / "data.swp").unlink()
    assert only(tmp_path).state == "stale"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="os.fwalk is recursive before Python 3.13")
def test_a_too_deeply_nested_folder_is_kept_with_the_reason(tmp_path, dead):
    folder = dead()
    folder.joinpath(*["deep"] * 300).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 250)
    try:
        (kept,) = cleanup_stale_swap(tmp_path).kept
    finally:
        sys.setrecursionlimit(limit)
    assert (kept.path, kept.reason) == (folder, "has too deeply nested folders")


@pytest.mark.parametrize(
    "name", ["zero_stage_3", "zerotune-swap-0", "zerotune-", "zerotune-20250101T000000-xyz", "x"]
)
def test_other_folders_are_not_leases(tmp_path, dead, name):
    dead().rename(tmp_path / name)
    assert find_leases(tmp_path) == ()


def test_a_missing_root_is_an_error(tmp_path):
    with pytest.raises(OffloadError, match="cannot be listed"):
        find_leases(tmp_path / "missing")


@pytest.mark.parametrize("folder_stays", [False, True])
def test_a_lease_removed_during_the_scan_is_not_listed(tmp_path, dead, monkeypatch, folder_stays):
    folder = dead()
    opened = stale.open_folder

    def open_then_remove(path):
        descriptor = opened(path)
        shutil.rmtree(folder)
        if folder_stays:
            # This is the state between the last two steps of a removal.
            folder.mkdir()
        return descriptor

    monkeypatch.setattr(stale, "open_folder", open_then_remove)
    assert "stale" not in [one.state for one in find_leases(tmp_path)]


def test_a_rank_that_is_leaving_is_not_considered_dead(tmp_path, dead, monkeypatch):
    """Record and lock are read under one lock, so that no rank can remove the record in between."""
    folder = dead()
    read = stale._read_records

    def lock_of_leaving_rank(descriptor):
        with (folder / "lease.lock").open() as lock:
            assert not stale.try_lock(lock.fileno(), exclusive=True)
        return read(descriptor)

    monkeypatch.setattr(stale, "_read_records", lock_of_leaving_rank)
    assert only(tmp_path).state == "stale"
