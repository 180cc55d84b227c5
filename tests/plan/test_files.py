from __future__ import annotations

import os

import pytest

from zerotune.errors import PlanFileError
from zerotune.plan.write import write_whole


def test_a_file_is_created_with_its_folder(tmp_path):
    path = write_whole(tmp_path / "a" / "b.json", b"content")

    assert path.read_bytes() == b"content"


def test_an_existing_file_is_replaced(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"something much longer")

    write_whole(tmp_path / "plan.json", b"new")
    assert (tmp_path / "plan.json").read_bytes() == b"new"


def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_bytes(b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanFileError, match="No space left on device"):
        write_whole(tmp_path / "plan.json", b"new")

    assert (tmp_path / "plan.json").read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("real.json")

    write_whole(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"
