from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zerotune.errors import OffloadError
from zerotune.offload.root import RootChoice, check_root


def check(path):
    return check_root(RootChoice(path=str(path), key="OffloadManager.root"))


def refused(path):
    with pytest.raises(OffloadError) as caught:
        check(path)
    error = caught.value
    assert error.key == "OffloadManager.root"
    assert error.value == str(path)
    assert "a local disk" in error.fix
    return error.reason


def test_checking_a_usable_root_leaves_it_unchanged(tmp_path):
    root = check(tmp_path / "new" / "root")
    assert root.path == tmp_path / "new" / "root"
    assert list(root.path.iterdir()) == []


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check("~/swap").path == tmp_path / "swap"


def test_a_linked_root_is_refused_and_its_target_named(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with pytest.raises(OffloadError, match=r"is a symbolic link \(to disk\)") as caught:
        check(tmp_path / "link")
    assert caught.value.fix == f"write the path of the folder, {tmp_path / 'disk'}"
    assert list((tmp_path / "disk").iterdir()) == []


def test_links_above_the_root_are_resolved(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert check(tmp_path / "link" / "swap").path == tmp_path / "disk" / "swap"


def folder_with(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "unmounted")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("file", "is a file, not a folder"),
        ("file/swap", "Not a directory"),
        ("dangling", "symbolic link to a missing target"),
        ("loop", "symbolic link"),
        ("x" * 300, "File name too long"),
        ("\0swap", "null"),
    ],
)
def test_paths_that_are_no_folder_are_refused(tmp_path, path, reason):
    folder_with(tmp_path)
    assert reason in refused(f"{tmp_path}/{path}")
    assert not (tmp_path / "unmounted").exists()


def test_a_path_that_leaves_no_room_for_swap_file_names_is_refused(tmp_path):
    room = 4096 - len(str(tmp_path)) - 224
    assert "is too long" in refused(tmp_path.joinpath(*["x" * 99] * (room // 100 + 1)))
    assert list(tmp_path.iterdir()) == []
    assert check(tmp_path.joinpath(*["x" * 99] * (room // 100))).path.is_dir()


def test_an_unwritable_folder_is_refused():
    folder = Path("/proc/self/task")
    if not folder.is_dir():
        pytest.skip("no /proc here")
    assert "cannot be used" in refused(folder)


def test_a_full_disk_is_refused(tmp_path, mounted):
    root = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64k", "none")
    with pytest.raises(OSError, match="No space left"):
        (root / "full").write_bytes(b"x" * 1_000_000)
    assert "No space left on device" in refused(root)
    assert [file.name for file in root.iterdir()] == ["full"]


def test_a_failing_sync_is_refused_and_no_probe_is_left(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("zerotune.offload.root.os.fsync", fail)
    assert os.strerror(errno.EIO) in refused(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tmpfs", "in RAM"),
        ("overlay", "writable layer"),
        ("nfs4", "shared file system"),
        ("lustre", "shared file system"),
        ("fuse.sshfs", "shared file system"),
        ("zonefs", "may not be a local"),
        ("ext4", None),
    ],
)
def test_unsuitable_file_systems_give_a_warning(tmp_path, monkeypatch, kind, says):
    monkeypatch.setattr("zerotune.offload.root.filesystem_kind", lambda _: kind)
    warnings = [one.reason for one in check(tmp_path).decisions if one.severity == "warning"]
    assert (says is None) == (warnings == [])
    assert says is None or says in warnings[0]


def warnings_of(root):
    return {one.key: one.reason for one in root.decisions if one.severity == "warning"}


def test_a_folder_that_others_may_empty_gives_a_warning(tmp_path):
    tmp_path.chmod(0o777)
    assert "chmod +t" in warnings_of(check(tmp_path))["offload.owner"]
    tmp_path.chmod(0o1777)
    assert "offload.owner" not in warnings_of(check(tmp_path))


def test_a_folder_of_another_user_gives_a_warning(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    os.chown(tmp_path, 12345, -1)
    assert "belongs to user 12345" in warnings_of(check(tmp_path))["offload.owner"]
