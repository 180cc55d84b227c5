"""The output and the exit status of ``zerotune offload``."""

from __future__ import annotations

import json
import os

import attrs
import pytest

from tests.offload.plans import swapping_plan
from zerotune._util.ownership import new_run_id
from zerotune.cli import main
from zerotune.offload import OffloadManager
from zerotune.offload.lease import lease_name
from zerotune.offload.record import LeaseRecord


@pytest.fixture
def dead(tmp_path):
    run_id = new_run_id()
    folder = tmp_path / lease_name(run_id)
    folder.mkdir()
    (folder / "lease.lock").touch()
    (folder / "0.tensor.swp").write_bytes(b"x" * 3_000_000)
    record = LeaseRecord.for_this_process(run_id=run_id, rank=0, world_size=1, plan_digest="")
    gone = attrs.evolve(record.owner, pid_start=record.owner.pid_start + 1)
    attrs.evolve(record, owner=gone).write(folder)
    return folder


def run(capsys, *arguments):
    code = main(["offload", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_status_of_an_empty_root_says_so(tmp_path, capsys):
    assert run(capsys, "status", tmp_path)[:2] == (
        0,
        "nothing here\n0 B can be freed by `zerotune offload clean`\n",
    )


def test_status_lists_stale_and_live_folders(tmp_path, dead, capsys):
    with OffloadManager(root=tmp_path, cleaner=_only_look).lease(swapping_plan()) as lease:
        code, out, _ = run(capsys, "status", tmp_path)
        assert code == 1
        (line,) = [line for line in out.splitlines() if line.startswith(lease.path.name)]
        assert f":{os.getpid()} (rank 0)" in line
        assert "live" in line
        (line,) = [line for line in out.splitlines() if line.startswith(dead.name)]
        assert "stale" in line
        assert "2.87 MiB" in line
    assert dead.exists()


def _only_look(root):
    from zerotune.offload import cleanup_stale_swap

    return cleanup_stale_swap(root, dry_run=True)


def test_status_can_print_json(tmp_path, dead, capsys):
    (tmp_path / "zero_stage_3").mkdir()
    code, out, _ = run(capsys, "status", tmp_path, "--json")
    data = json.loads(out)
    assert code == 1
    assert [one["path"] for one in data["leases"]] == [str(dead)]
    assert data["leases"][0]["records"][0]["rank"] == 0
    assert [one["kind"] for one in data["others"]] == ["bare"]
    assert data["reclaimable"] >= 3_000_000


def test_clean_removes_the_folders_of_dead_runs(tmp_path, dead, capsys):
    code, out, _ = run(capsys, "clean", tmp_path)
    assert code == 0
    assert "MiB freed" in out
    assert not dead.exists()


def test_clean_returns_status_1_for_deepspeeds_own_folders(tmp_path, capsys):
    (tmp_path / "zero_stage_3").mkdir()
    code, out, _ = run(capsys, "clean", tmp_path, "--json")
    assert code == 1
    assert [one["kind"] for one in json.loads(out)["kept"]] == ["bare"]
    assert (tmp_path / "zero_stage_3").exists()


@pytest.mark.parametrize("command", ["status", "clean"])
def test_a_missing_root_is_an_error(tmp_path, capsys, command):
    code, out, err = run(capsys, command, tmp_path / "missing")
    assert (code, out) == (2, "")
    assert "cannot be read" in err
