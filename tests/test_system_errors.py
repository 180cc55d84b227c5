"""System errors name the path and a fix in all code that reads or writes paths."""

from __future__ import annotations

import pytest

from tests.refused import refused
from tests.support.ranks import run_ranks


def judged(found):
    """Return errors that are not ours, and those without a path or a fix."""
    return {name: text for name, text in found.items() if text.startswith(("FOREIGN", "THIN"))}


def test_an_impossible_path_gives_an_error_with_a_fix(tmp_path):
    (tmp_path / "file").touch()
    places = {
        "under a file": str(tmp_path / "file" / "x"),
        "too long": str(tmp_path / ("x" * 300)),
        "a null byte": str(tmp_path / "a\0b"),
    }
    (found,) = run_ranks(refused, str(tmp_path), places)
    assert len(found) > 60
    assert judged(found) == {}
    assert [name for name, text in found.items() if not text] == []


def test_a_read_only_or_full_disk_gives_an_error_with_a_fix(tmp_path, mounted):
    for name, option in (("read-only", "ro"), ("full", "size=64k")):
        mounted(tmp_path / name, "-t", "tmpfs", "-o", option, "none")
    with pytest.raises(OSError, match="No space"):
        (tmp_path / "full" / "other").write_bytes(b"x" * 2**17)
    places = {name: str(tmp_path / name / "x") for name in ("read-only", "full")}
    (found,) = run_ranks(refused, str(tmp_path), places)
    assert judged(found) == {}
    for name, text in found.items():
        # A full disk may not refuse an operation that only makes an empty folder.
        assert text or name.endswith(": full"), name
