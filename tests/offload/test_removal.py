from __future__ import annotations

import os

import pytest

from zerotune.offload.lease import dismantle, folder_bytes, open_folder


@pytest.fixture
def opened(tmp_path):
    folder = tmp_path / "swap"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_bytes(b"x" * 8192)
    (folder / "keep").write_bytes(b"x")
    descriptor = open_folder(folder)
    yield folder, descriptor
    os.close(descriptor)


def test_the_freed_bytes_equal_the_counted_ones(opened):
    folder, descriptor = opened
    counted = folder_bytes(descriptor)
    assert counted >= 8192
    assert dismantle(descriptor) == counted
    assert list(folder.iterdir()) == []


def test_a_file_with_another_hard_link_frees_no_bytes(opened, tmp_path):
    folder, descriptor = opened
    os.link(folder / "a" / "b" / "file", tmp_path / "other")
    assert dismantle(descriptor) < 8192
    assert (tmp_path / "other").stat().st_size == 8192


@pytest.mark.parametrize("bind", [True, False])
def test_a_mount_is_not_crossed(opened, tmp_path, mounted, bind):
    folder, descriptor = opened
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    point = folder / "a" / "b"
    options = ("--bind", str(precious)) if bind else ("-t", "tmpfs", "none")
    mounted(point, *options)
    (point / "file").write_text("keep")
    with pytest.raises(OSError, match="another file system is mounted here"):
        dismantle(descriptor)
    assert (point / "file").read_text() == "keep"
