from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.offload.filesystem import filesystem_kind

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 25 0:27 / /mnt/my\040disk rw,relatime shared:1 master:2 - xfs /dev/sda rw
31 27 0:40 / /mnt rw - tmpfs none rw
32 27 0:41 / /mnt rw - nfs4 server:/x rw
not a mount
"""


def kind(tmp_path, path):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    return filesystem_kind(Path(path), mount_table=table)


def test_the_longest_mount_wins(tmp_path):
    assert kind(tmp_path, "/home") == "ext4"
    assert kind(tmp_path, "/mnt/my disk/swap") == "xfs"


def test_the_later_of_two_mounts_on_one_folder_wins(tmp_path):
    assert kind(tmp_path, "/mnt/other") == "nfs4"


def test_a_mounts_name_is_not_a_prefix_of_its_neighbours(tmp_path):
    assert kind(tmp_path, "/mnt2") == "ext4"


def test_without_a_table_it_is_unknown(tmp_path):
    assert filesystem_kind(tmp_path, mount_table=tmp_path / "missing") is None


@settings(deadline=None)
@given(text=st.text())
def test_any_table_is_survived(tmp_path_factory, text):
    table = tmp_path_factory.mktemp("table") / "mountinfo"
    table.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert filesystem_kind(Path("/"), mount_table=table) is None or " - " in text
