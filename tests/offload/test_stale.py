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
from zerotune.offload.lease import LeaseRecord, find_leases, lease_name


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


@pytest.mark.parametrize(
    ("kind", "owners", "state"),
    [
        ("ext4", "ext4", "stale"),
        ("overlay", "overlay", "stale"),
        ("nfs4", "nfs4", "unknown"),
        # An NFS server sees its disk as local but cannot see its clients' locks.
        ("ext4", "nfs4", "unknown"),
        ("ext4", "virtiofs", "unknown"),
        ("ext4", None, "unknown"),
        (None, None, "unknown"),
    ],
)
def test_a_record_of_another_boot_is_trusted_only_on_local_disks(
    tmp_path, dead, monkeypatch, kind, owners, state
):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: kind)
    dead(host="elsewhere", boot_id="another", filesystem=owners)
    assert only(tmp_path).state == state


@pytest.mark.parametrize(("kind", "state"), [("ext4", "stale"), ("nfs4", "unknown")])
def test_a_record_of_another_container_is_trusted_only_on_local_disks(
    tmp_path, dead, monkeypatch, kind, state
):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: kind)
    dead(host="another-container", pid_namespace=1, filesystem=kind)
    assert only(tmp_path).state == state


def test_the_record_of_a_dead_local_process_is_trusted_on_any_file_system(
    tmp_path, dead, monkeypatch
):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: "nfs4")
    dead(filesystem="nfs4")
    assert only(tmp_path).state == "stale"


def test_without_a_record_a_free_lock_on_a_network_disk_proves_nothing(tmp_path, dead, monkeypatch):
    monkeypatch.setattr(stale, "filesystem_kind", lambda _: "nfs4")
    (dead() / "rank0.json").unlink()
    assert only(tmp_path).state == "unknown"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "\x00"])
def test_a_folder_with_a_damaged_record_has_an_unknown_state(tmp_path, dead, text):
    (dead() / "rank0.json").write_text(text)
    assert only(tmp_path).state == "unknown"
    assert "damaged record" in only(tmp_path).reason


def test_an_interrupted_removal_is_recognised(tmp_path, dead):
    folder = dead()
    (folder / "rank0.json").unlink()
    assert only(tmp_path).state == "stale"


def test_a_folder_without_its_lock_file_is_not_stale(tmp_path, dead):
    (dead() / "lease.lock").unlink()
    assert only(tmp_path).state == "unknown"


def test_a_linked_lock_file_is_not_followed(tmp_path, dead):
    lock = dead() / "lease.lock"
    lock.unlink()
    (tmp_path / "other.lock").touch()
    lock.symlink_to(tmp_path / "other.lock")
    assert only(tmp_path).state == "unknown"


def test_a_link_named_like_a_lease_is_not_followed(tmp_path, dead):
    folder = dead()
    moved = folder.rename(tmp_path / "moved")
    folder.symlink_to(moved)
    assert only(tmp_path).state == "unknown"


@pytest.mark.parametrize(
    "name", ["zero_stage_3", "zerotune-swap-0", "zerotune-", "zerotune-20250101T000000-xyz", "x"]
)
def test_other_folders_are_not_leases(tmp_path, dead, name):
    dead().rename(tmp_path / name)
    assert find_leases(tmp_path) == ()


def test_targets_of_links_are_not_counted(tmp_path, dead):
    folder = dead()
    before = only(tmp_path).size
    big = tmp_path / "big"
    big.mkdir()
    (big / "file").write_bytes(b"x" * 1_000_000)
    (folder / "folder").symlink_to(big)
    (folder / "file").symlink_to(big / "file")
    assert before >= 10_000
    assert only(tmp_path).size < before + 100_000


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


def test_a_folder_whose_lock_file_vanished_before_locking_is_not_stale(tmp_path, dead, monkeypatch):
    folder = dead()
    lock = stale.try_lock

    def lock_too_late(descriptor, **options):
        (folder / "rank0.json").unlink()
        (folder / "lease.lock").unlink()
        return lock(descriptor, **options)

    monkeypatch.setattr(stale, "try_lock", lock_too_late)
    assert only(tmp_path).state == "unknown"


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


@pytest.mark.parametrize("name", ["rank0.json", "rank7.json", "lease.lock"])
def test_a_named_pipe_as_record_or_lock_does_not_block(tmp_path, dead, name):
    folder = dead()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert only(tmp_path).state == "unknown"
    assert "is not a regular file" in only(tmp_path).reason


def test_a_too_deeply_nested_folder_is_kept_with_the_reason(tmp_path, dead):
    folder = dead()
    folder.joinpath(*["deep"] * 300).mkdir(parents=True)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 250)
    try:
        report = cleanup_stale_swap(tmp_path)
    finally:
        sys.setrecursionlimit(usual)
    assert report.removed == ()
    assert [(one.path, one.reason) for one in report.kept] == [
        (folder, "has too deeply nested folders")
    ]
    assert [one.path for one in cleanup_stale_swap(tmp_path).removed] == [folder]
