from __future__ import annotations

import errno
import os

import pytest

from zerotune._util.files import drafted, sync, write_atomically, write_synced


def test_write_atomically_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    sync(tmp_path)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_raises_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "file.json"
    for write in (lambda: write_synced(path, b"new"), lambda: sync(path)):
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.filename == str(path)


def test_a_failed_draft_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    with pytest.raises(IsADirectoryError), drafted(path) as draft:
        draft.write_bytes(tmp_path.read_bytes())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
