from __future__ import annotations

from zerotune.plan.write import write_whole


def test_a_file_is_created_with_its_folder(tmp_path):
    path = write_whole(tmp_path / "a" / "b.json", b"content")

    assert path.read_bytes() == b"content"


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("real.json")

    write_whole(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"
