"""Leases of real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.offload.plans import swapping_plan
from tests.support.waiting import wait_for
from zerotune.offload import OffloadManager, cleanup_stale_swap
from zerotune.offload.lease import find_leases, run_id_of


def states(root):
    return {found.path: found.state for found in find_leases(root)}


def test_a_killed_run_is_stale_before_its_parent_reaps_it(tmp_path, hold):
    holder = hold(tmp_path)
    dead = Path(holder.read())
    os.kill(holder.process.pid, signal.SIGKILL)
    stat = Path(f"/proc/{holder.process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert states(tmp_path) == {dead: "stale"}


def test_a_new_lease_removes_leftovers_of_a_killed_run_and_records_it(tmp_path, hold, caplog):
    caplog.set_level("INFO")
    killed, living = hold(tmp_path), hold(tmp_path)
    dead, alive = Path(killed.read()), Path(living.read())
    killed.kill()
    with OffloadManager(root=tmp_path).lease(swapping_plan()) as lease:
        (report,) = [one for one in lease.decisions if one.key == "offload.stale_swap"]
        assert report.severity == "note"
        assert (report.before, report.after) == (str(dead), None)
        assert "freed " in report.reason
        assert not dead.exists()
        assert (alive / "rank0.swp").stat().st_size == 65536
    assert str(dead) in caplog.text


def test_a_custom_cleaner_decides_what_is_removed(tmp_path, hold):
    killed = hold(tmp_path)
    dead = Path(killed.read())
    killed.kill()
    only_report = partial(cleanup_stale_swap, dry_run=True)
    with OffloadManager(root=tmp_path, cleaner=only_report).lease(swapping_plan()) as lease:
        (report,) = [one for one in lease.decisions if one.key == "offload.stale_swap"]
        assert report.severity == "warning"
        assert (report.before, report.after) == (str(dead), str(dead))
        assert "would free" in report.reason
    assert (dead / "rank0.swp").exists()


def test_a_lease_lives_as_long_as_any_of_its_ranks(tmp_path, hold):
    first = hold(tmp_path, 0, 2, "")
    path = Path(first.read() and first.read())
    second = hold(tmp_path, 1, 2, run_id_of(path.name))
    assert Path(second.read()) == path
    first.kill()
    assert states(tmp_path) == {path: "live"}
    second.kill()
    assert states(tmp_path) == {path: "stale"}


def test_a_forked_worker_does_not_keep_a_dead_lease_alive(tmp_path, hold):
    holder = hold(tmp_path)
    path = Path(holder.read())
    holder.tell("fork")
    worker = int(holder.read())
    try:
        holder.kill()
        os.kill(worker, 0)
        # The worker's pid is printed before its first instruction, which releases the lock.
        wait_for(lambda: states(tmp_path) == {path: "stale"})
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_that_leaves_the_block_removes_nothing(tmp_path):
    with OffloadManager(root=tmp_path).lease(swapping_plan(), barrier=lambda: None) as lease:
        child = os.fork()
        if child == 0:
            # The child leaves as a worker would: out of the block, then out of the process.
            lease_of_parent = lease
        else:
            assert os.waitpid(child, 0)[1] == 0
            assert lease.path.exists()
            assert states(tmp_path) == {lease.path: "live"}
    if child == 0:
        os._exit(0 if lease_of_parent.path.exists() else 1)
    assert not lease.path.exists()


@pytest.mark.parametrize("runs", [4])
def test_a_live_run_is_never_considered_dead(tmp_path, hold, runs):
    holders = [hold(tmp_path) for _ in range(runs)]
    for holder in holders:
        holder.read()
        holder.tell("churn 15")
        holder.tell("leave")
    seen = 0
    while any(holder.process.poll() is None for holder in holders):
        found = find_leases(tmp_path)
        seen += len(found)
        assert [one for one in found if one.state == "stale"] == []
    assert [holder.process.returncode for holder in holders] == [0] * runs
    assert seen >= runs
    assert list(tmp_path.iterdir()) == []
