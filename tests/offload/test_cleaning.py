"""A clean-up removes stale folders and never touches anything else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from tests.offload.plans import swapping_plan
from zerotune._util.ownership import new_run_id
from zerotune.errors import OffloadError
from zerotune.offload import OffloadManager, cleaning, cleanup_stale_swap
from zerotune.offload.lease import (
    DRAFT_PREFIX,
    LOCK_FILE,
    find_leases,
    lease_name,
    making_in,
)
from zerotune.offload.record import LeaseRecord

CLEANER = """
import sys
from pathlib import Path
from zerotune.offload import cleanup_stale_swap
count = failed = told = 0
while not told:
    told = Path(sys.argv[2]).exists()  # Before the last time, which finds whatever is left.
    report = cleanup_stale_swap(sys.argv[1])
    if not count + failed:
        print(flush=True)
    count += len(report.removed); failed += len(report.failures)
print(count, failed)
"""


@pytest.fixture
def dead(tmp_path):
    """Return a function that creates the folder of a killed run."""

    def make(root=tmp_path):
        run_id = new_run_id()
        # Build it under another name: a real lease appears complete, with its record and its lock.
        folder = root / f"building-{run_id}"
        swap = folder / "zero_stage_3" / "optimizer" / "rank0"
        swap.mkdir(parents=True)
        (swap / "0.tensor.swp").write_bytes(b"x" * 40_000)
        (folder / LOCK_FILE).touch()
        record = LeaseRecord.for_this_process(
            run_id=run_id, rank=0, world_size=1, plan_digest="0" * 64, filesystem="ext4"
        )
        gone = attrs.evolve(record.owner, pid_start=record.owner.pid_start + 1)
        attrs.evolve(record, owner=gone).write(folder)
        return folder.rename(root / lease_name(run_id))

    return make


@pytest.fixture
def bare_swap(tmp_path):
    """Create a folder with DeepSpeed's own layout, last written a day ago."""
    root = tmp_path / "zero_stage_3"
    for part in ("bf16params", "optimizer"):
        (root / part / "rank0").mkdir(parents=True)
        (root / part / "rank0" / "0_1.tensor.swp").write_bytes(b"x" * 50_000)
    yesterday = time.time() - 86_400
    for path in (root, *root.rglob("*")):
        os.utime(path, (yesterday, yesterday))
    return root


def only(found):
    (one,) = found
    return one


def test_stale_folders_are_removed_and_live_ones_kept(tmp_path, dead):
    gone = dead()
    with OffloadManager(root=tmp_path, cleaner=nothing).lease(swapping_plan()) as lease:
        (lease.path / "alive.swp").write_bytes(b"x" * 5000)
        report = cleanup_stale_swap(tmp_path)
        assert (lease.path / "alive.swp").stat().st_size == 5000
        assert [one.path for one in report.removed] == [gone]
        assert only(report.kept).path == lease.path
    assert not gone.exists()
    assert 40_000 < report.freed < 80_000
    assert only(report.decisions).severity == "note"


def nothing(root):
    return cleaning.CleanupReport(root=root, dry_run=False)


def test_a_dry_run_changes_nothing_and_counts_the_same(tmp_path, dead):
    folder = dead()
    foretold = cleanup_stale_swap(tmp_path, dry_run=True)
    assert (folder / "zero_stage_3/optimizer/rank0/0.tensor.swp").exists()
    assert "would free" in only(foretold.decisions).reason
    assert cleanup_stale_swap(tmp_path).freed == pytest.approx(foretold.freed, abs=20_000)


def test_files_that_are_not_leases_are_kept(tmp_path, dead):
    dead()
    for name in ("precious.txt", "zerotune-notes", ".zerotune-newer", "zero_stage_three"):
        (tmp_path / name).write_text("keep")
    (tmp_path / "checkpoints" / lease_name(new_run_id())).mkdir(parents=True)
    report = cleanup_stale_swap(tmp_path)
    assert len(report.removed) == 1
    assert not report.kept
    assert {path.name for path in tmp_path.iterdir()} == {
        "precious.txt",
        "zerotune-notes",
        ".zerotune-newer",
        "zero_stage_three",
        "checkpoints",
    }


def test_links_inside_are_not_followed(tmp_path, dead):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("keep")
    folder = dead()
    (folder / "folder").symlink_to(outside)
    (folder / "zero_stage_3" / "file").symlink_to(outside / "file")
    cleanup_stale_swap(tmp_path)
    assert not folder.exists()
    assert (outside / "file").read_text() == "keep"


def test_a_linked_root_is_refused(tmp_path, dead):
    folder = dead()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OffloadError, match="is a symbolic link"):
        cleanup_stale_swap(link)
    assert folder.exists()


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_path_that_is_not_a_folder_is_refused(tmp_path, kind):
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    with pytest.raises(OffloadError, match="cannot be read"):
        cleanup_stale_swap(path)


def test_a_lease_that_is_a_mount_point_is_kept(tmp_path, mounted, dead):
    folder = dead()
    mounted(folder, "-t", "tmpfs", "none")
    (folder / "file").write_text("keep")
    assert "mounted here" in only(cleanup_stale_swap(tmp_path).kept).reason
    assert (folder / "file").read_text() == "keep"


@pytest.mark.parametrize("name", [None, f"{DRAFT_PREFIX}x"])
def test_a_folder_of_another_user_is_not_a_failure(tmp_path, dead, monkeypatch, name):
    folder = dead()
    if name is not None:
        folder = folder.rename(tmp_path / name)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cleaning, "open_folder", OnlyTheRoot(cleaning.open_folder))
    monkeypatch.setattr(cleaning, "remove_entry", refused)
    mine = cleanup_stale_swap(tmp_path)
    assert [one.reason for one in mine.failures] == ["Permission denied"]
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    report = cleanup_stale_swap(tmp_path)
    assert report.failures == ()
    assert report.decisions == ()
    (kept,) = report.kept
    assert kept.path == folder
    assert f"belongs to user {owner}" in kept.reason


class OnlyTheRoot:
    """Opens folders given by their path, and refuses those inside, as if another user's."""

    def __init__(self, usual):
        self.usual = usual

    def __call__(self, path, *, within=None):
        if within is not None:
            raise PermissionError(errno.EACCES, "Permission denied")
        return self.usual(path)


@pytest.mark.parametrize("moment", range(1, 8))
def test_an_interrupted_clean_up_is_finished_by_the_next(tmp_path, dead, monkeypatch, moment):
    folder = dead()
    left = [moment]

    def interrupted(real):
        def act(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(*args, **options)

        return act

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, interrupted(getattr(os, name)))
    with pytest.raises(KeyboardInterrupt):
        cleanup_stale_swap(tmp_path)
    monkeypatch.undo()
    assert folder.exists()
    assert [one.path for one in cleanup_stale_swap(tmp_path).removed] == [folder]
    assert list(tmp_path.iterdir()) == []


class TestUnfinished:
    def test_an_unfinished_folder_of_a_dead_process_is_removed(self, tmp_path):
        (tmp_path / f"{DRAFT_PREFIX}abc").mkdir()
        (tmp_path / f"{DRAFT_PREFIX}abc" / "file").write_bytes(b"x" * 5000)
        report = cleanup_stale_swap(tmp_path)
        assert only(report.removed).kind == "unfinished"
        assert report.freed >= 5000
        assert list(tmp_path.iterdir()) == []

    def test_an_unfinished_folder_of_a_live_process_is_kept(self, tmp_path):
        (tmp_path / f"{DRAFT_PREFIX}abc").mkdir()
        with making_in(tmp_path):
            report = cleanup_stale_swap(tmp_path)
        assert "currently creating a folder" in only(report.kept).reason
        assert (tmp_path / f"{DRAFT_PREFIX}abc").is_dir()

    def test_a_link_named_like_a_draft_and_its_target_are_kept(self, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
        (tmp_path / f"{DRAFT_PREFIX}abc").symlink_to(tmp_path / "folder")
        cleanup_stale_swap(tmp_path)
        assert (tmp_path / "folder" / "file").exists()


def test_a_folder_of_deepspeed_itself_is_reported_and_kept(tmp_path, bare_swap):
    report = cleanup_stale_swap(tmp_path)
    assert only(report.kept).kind == "bare"
    assert only(report.kept).nbytes >= 100_000
    assert only(report.decisions).severity == "warning"
    assert len(list(bare_swap.rglob("*.swp"))) == 2


@contextmanager
def two_cleaners(root):
    """Run two processes that clean until the block ends; count their removals and failures."""
    over, counts = root.with_name(f"{root.name}-over"), []
    with cleaner(root, over) as first, cleaner(root, over) as second:
        try:
            for process in (first, second):
                assert process.stdout.readline() == "\n", "it cleans"
            yield counts
        finally:
            over.touch()
        counts += [tuple(map(int, p.communicate()[0].split())) for p in (first, second)]


def cleaner(root, over):
    return subprocess.Popen(
        [sys.executable, "-c", CLEANER, str(root), str(over)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cleaning.__file__).parents[2])},
    )


def test_two_concurrent_cleaners_free_everything_without_failures(tmp_path, dead):
    made = 120
    with two_cleaners(tmp_path) as counts:
        for _ in range(made):
            dead()
    assert [failed for _, failed in counts] == [0, 0]
    # Both cleaners may count a folder of which each removed a part.
    assert sum(count for count, _ in counts) >= made
    assert list(tmp_path.iterdir()) == []


def test_two_concurrent_cleaners_never_touch_live_runs(tmp_path, hold):
    holders = [hold(tmp_path) for _ in range(3)]
    paths = [Path(holder.read()) for holder in holders]
    with two_cleaners(tmp_path) as counts:
        for holder in holders:
            holder.tell("churn 12")
        holders[0].tell("leave")
        assert holders[0].read() == "left"
    assert [failed for _, failed in counts] == [0, 0]
    for path in paths[1:]:
        assert (path / "rank0.swp").stat().st_size == 65536
    assert {one.state for one in find_leases(tmp_path)} == {"live"}
    for holder in holders[1:]:
        holder.leave()
    assert list(tmp_path.iterdir()) == []
