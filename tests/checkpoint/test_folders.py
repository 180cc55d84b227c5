"""Names, replacement, leftovers and pruning, on small checkpoints made without an engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.crafted import sign
from tests.checkpoint.samples import fill, publish
from zerotune.checkpoint import latest_checkpoint
from zerotune.checkpoint import manifest as manifests
from zerotune.checkpoint.folders import (
    checked_path,
    find_checkpoint,
    prune,
    step_folder,
    verify_checkpoint,
)
from zerotune.checkpoint.manifest import MANIFEST
from zerotune.checkpoint.staging import Staging, check_space
from zerotune.errors import CheckpointError


def names(root):
    return sorted(path.name for path in root.iterdir())


def steps(root, *numbers):
    return [publish(step_folder(root, number)) for number in numbers]


def test_a_checkpoint_appears_only_once_it_is_complete(tmp_path):
    final = tmp_path / "deep" / "run" / "step-00000001"
    staging = Staging(final)
    assert not final.exists()
    fill(staging.path)
    staging.publish()
    assert names(final.parent) == ["step-00000001"]
    assert verify_checkpoint(final).extra == {"epoch": 1}


def test_a_former_checkpoint_is_replaced(tmp_path):
    final = publish(tmp_path / "last", extra={"number": 1})
    assert publish(final, extra={"number": 2}) == final
    assert names(tmp_path) == ["last"]
    assert verify_checkpoint(final).extra == {"number": 2}


def test_abandoning_a_save_keeps_the_former_checkpoint(tmp_path):
    final = publish(tmp_path / "last", extra={"number": 1})
    staging = Staging(final)
    fill(staging.path)
    staging.abandon()
    assert names(tmp_path) == ["last"]
    assert verify_checkpoint(final).extra == {"number": 1}


def test_an_empty_folder_may_become_a_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    assert names(tmp_path) == ["empty"]


@pytest.mark.parametrize("name", ["a.tmp-0123456789ab", "a.old-0123456789ab", "/"])
def test_names_reserved_for_saving_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be the name"):
        checked_path(tmp_path / name)


def test_the_newest_complete_checkpoint_is_the_latest(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    # 100,000,000 steps need nine digits: the newest, although it sorts first as text.
    ordered = steps(tmp_path, 5, 20, 99_999_999, 100_000_000)
    assert latest_checkpoint(tmp_path) == ordered[-1]
    assert ordered[0].name == "step-00000005"


def test_the_manifest_and_not_the_folders_name_tells_the_step(tmp_path):
    for name, step in (("step-1000", 7), ("checkpoint-2", 8), ("last", 9), ("step_3", 6)):
        publish(tmp_path / name, step=step)
    (tmp_path / "images").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "last"
    assert prune(tmp_path, keep=1) == (tmp_path / "step-1000", tmp_path / "step_3")
    assert names(tmp_path) == ["checkpoint-2", "images", "last"]


def test_broken_and_foreign_folders_are_skipped(tmp_path, caplog):
    good, truncated, headless = steps(tmp_path, 1, 2, 3)
    os.truncate(truncated / "rank-0.safetensors", 10)
    (headless / "manifest.json").write_text("{}")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "notes.txt").write_text("step-00000010")
    assert latest_checkpoint(tmp_path) == good
    assert "rank-0.safetensors: has 10 bytes" in caplog.text
    assert "not the manifest of a zerotune checkpoint" in caplog.text


def test_a_complete_folder_stands_in_until_it_is_renamed(tmp_path, caplog):
    final = tmp_path / "step-00000004"
    publish(final, extra={"number": 1})
    final.rename(tmp_path / "step-00000004.old-000000000001")
    assert find_checkpoint(final)[1].extra == {"number": 1}
    newer = tmp_path / "step-00000004.tmp-000000000002"
    newer.mkdir()
    assert find_checkpoint(final)[1].extra == {"number": 1}
    fill(newer, extra={"number": 2})
    assert find_checkpoint(final) == (newer, verify_checkpoint(newer.parent / "step-00000004"))
    assert latest_checkpoint(tmp_path) == final
    assert "was not completely saved" in caplog.text


def test_a_finished_save_deletes_the_leftovers_of_killed_ones(tmp_path):
    final = publish(tmp_path / "a")
    for name in ("a.tmp-000000000001", "a.old-000000000002", "b.tmp-000000000003"):
        (tmp_path / name).mkdir()
    publish(final)
    assert names(tmp_path) == ["a", "b.tmp-000000000003"]


def test_saves_in_progress_are_not_deleted(tmp_path):
    steps(tmp_path, 1)
    other = Staging(step_folder(tmp_path, 2))
    fill(other.path)
    publish(step_folder(tmp_path, 2))
    assert prune(tmp_path, keep=1) == (step_folder(tmp_path, 1),)
    assert names(tmp_path) == ["step-00000002", other.path.name]
    other.abandon()
    assert names(tmp_path) == ["step-00000002"]


def test_prune_keeps_the_newest_complete_checkpoints(tmp_path):
    made = steps(tmp_path, 1, 2, 3, 4, 5)
    os.truncate(made[3] / "rank-0.safetensors", 10)
    (tmp_path / "mine").mkdir()
    (tmp_path / "step-00000007").mkdir()
    assert prune(tmp_path, keep=2) == (made[1], made[0])
    # The truncated one is neither counted nor removed, so that the user can inspect it.
    assert names(tmp_path) == [
        "mine",
        "step-00000003",
        "step-00000004",
        "step-00000005",
        "step-00000007",
    ]
    assert prune(tmp_path, keep=2) == ()


def test_prune_deletes_dead_leftovers_but_no_stand_in(tmp_path):
    publish(step_folder(tmp_path, 8)).rename(tmp_path / "step-00000008.old-000000000001")
    steps(tmp_path, 7)
    for name in ("step-00000007.tmp-000000000002", "step-00000003.trash-000000000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"half")
    prune(tmp_path, keep=3)
    assert names(tmp_path) == ["step-00000007", "step-00000008.old-000000000001"]
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 8)


def test_a_complete_folder_of_a_save_in_progress_is_not_pruned(tmp_path):
    steps(tmp_path, 4, 5)
    other = Staging(step_folder(tmp_path, 3))
    fill(other.path)
    assert prune(tmp_path, keep=2) == ()
    other.publish()
    assert names(tmp_path)[0] == "step-00000003"


def test_links_are_never_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("text")
    root = tmp_path / "root"
    steps(root, 1)
    (root / "step-00000001.tmp-000000000001").symlink_to(precious)
    publish(step_folder(root, 1))
    prune(root, keep=1)
    assert (precious / "thesis.txt").read_text() == "text"


def test_prune_does_not_delete_a_checkpoint_that_was_moved_and_linked_back(tmp_path):
    archive, root = tmp_path / "archive", tmp_path / "root"
    archive.mkdir()
    steps(root, 1, 2, 3)
    step_folder(root, 1).rename(archive / "first")
    step_folder(root, 1).symlink_to(archive / "first")
    assert prune(root, keep=1) == (step_folder(root, 2),)
    assert verify_checkpoint(archive / "first").extra == {"epoch": 1}
    assert names(root) == ["step-00000001", "step-00000003"]


def test_a_leftover_that_cannot_be_deleted_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    older, newer = steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002.tmp-000000000001").mkdir()
    usual = shutil.rmtree

    def removing(path, *arguments, **options):
        if Path(path).name == "step-00000002.tmp-000000000001":
            raise PermissionError(errno.EACCES, "denied")
        usual(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", removing)
    publish(newer)
    assert prune(tmp_path, keep=1) == (older,)
    assert names(tmp_path) == ["step-00000002", "step-00000002.tmp-000000000001"]
    assert "cannot be deleted" in caplog.text
    assert "step-00000002.tmp-000000000001" in caplog.text


def test_the_users_files_in_a_checkpoint_are_kept(tmp_path):
    final = publish(tmp_path / "last", extra={"number": 1})
    (final / "notes.txt").write_text("the good one")
    (final / "samples").mkdir()
    (final / "samples" / "1.png").write_bytes(b"image")
    publish(final, extra={"number": 2})
    assert verify_checkpoint(final).extra == {"number": 2}
    assert (final / "notes.txt").read_text() == "the good one"
    assert (final / "samples" / "1.png").read_bytes() == b"image"
    assert names(tmp_path) == ["last"]


def test_the_users_files_survive_a_kill_before_the_former_checkpoint_is_deleted(tmp_path):
    final = publish(tmp_path / "last")
    (final / "notes.txt").write_text("text")
    final.rename(tmp_path / "last.old-000000000001")
    publish(final)
    assert (final / "notes.txt").read_text() == "text"
    assert names(tmp_path) == ["last"]


def test_only_files_that_saving_writes_are_deleted_from_a_damaged_checkpoint(tmp_path):
    final = publish(tmp_path / "last")
    (final / "manifest.json").write_text("{")
    (final / "weights-00001-of-00001.safetensors").write_bytes(b"old")
    (final / "notes.txt").write_text("text")
    publish(final)
    assert "notes.txt" in names(final)
    assert "weights-00001-of-00001.safetensors" not in names(final)


def test_an_unreadable_or_invalid_manifest_is_skipped(tmp_path, caplog, monkeypatch):
    good, nan, zeros, null, closed = steps(tmp_path, 1, 2, 3, 4, 5)
    text = (nan / MANIFEST).read_text()
    (nan / MANIFEST).write_text(text.replace('"global_step": 2', '"global_step": NaN'))
    (zeros / MANIFEST).write_bytes(bytes(len(text)))
    content = json.loads(text)
    content["files"][0]["name"] = "a\0b"
    sign(null, content)
    real = manifests.reading_regular

    def refusing(path):
        if path.parent == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(manifests, "reading_regular", refusing)
    assert latest_checkpoint(tmp_path) == good
    assert prune(tmp_path, keep=1) == ()
    for path, why in {
        nan: "NaN is not valid JSON",
        zeros: "is not JSON",
        null: "is not a plain file name",
        closed: "Permission denied",
    }.items():
        (line,) = [each for each in caplog.messages if f"{path / MANIFEST}: " in each]
        assert why in line


def test_a_name_with_a_null_byte_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be the name"):
        find_checkpoint(f"{tmp_path}/a\0b")


@pytest.mark.parametrize("keep", [0, -1])
def test_pruning_every_checkpoint_is_refused(tmp_path, keep):
    steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match="1 or more"):
        prune(tmp_path, keep=keep)
    assert names(tmp_path) == ["step-00000001"]


def test_too_little_disk_space_is_refused_with_the_size_needed(tmp_path):
    check_space(tmp_path, 1000)
    with pytest.raises(CheckpointError, match=r"needs 1048576\.00 GiB of disk space, but"):
        check_space(tmp_path, 2**50)


def test_deepspeed_checkpoints_are_recognised(tmp_path):
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(CheckpointError, match="convert DeepSpeed's checkpoint"):
        find_checkpoint(tmp_path)
