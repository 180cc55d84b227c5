from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ranks import run_ranks
from zerotune._util import proc
from zerotune._util.proc import filesystem_kind, locality_of

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


def test_the_mount_with_the_longest_matching_path_wins(tmp_path):
    assert kind(tmp_path, "/home") == "ext4"
    assert kind(tmp_path, "/mnt/my disk/swap") == "xfs"


def test_the_later_of_two_mounts_on_one_folder_wins(tmp_path):
    assert kind(tmp_path, "/mnt/other") == "nfs4"


def test_a_mount_does_not_match_a_path_that_only_begins_with_its_name(tmp_path):
    assert kind(tmp_path, "/mnt2") == "ext4"


@pytest.mark.parametrize(
    ("kind", "locality"),
    [
        ("ext4", "local"),
        ("tmpfs", "memory"),
        ("overlay", "overlay"),
        ("lustre", "network"),
        ("cifs", "network"),
        ("ceph", "network"),
        ("fuse.s3fs", "network"),
        ("fuseblk", "network"),
        ("zonefs", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_locality_follows_from_the_kind_of_file_system(kind, locality):
    assert locality_of(kind) == locality


def test_the_file_system_kind_is_none_without_a_mount_table(tmp_path):
    assert filesystem_kind(tmp_path, mount_table=tmp_path / "missing") is None


@settings(deadline=None)
@given(text=st.text())
def test_malformed_mount_tables_raise_no_error(tmp_path_factory, text):
    table = tmp_path_factory.mktemp("table") / "mountinfo"
    table.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert filesystem_kind(Path("/"), mount_table=table) is None or " - " in text


def faults_of(kept: bool) -> int:
    import torch

    # By default, glibc returns these blocks only if nothing lies above them.
    set_up = proc.keep_freed_memory if kept else proc.return_large_blocks
    set_up()
    for _ in range(3):
        _ = [torch.ones(2**22) for _ in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        _ = [torch.ones(2**22) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_that_is_kept_causes_no_page_faults_when_it_is_used_again():
    (kept,), (returned,) = (run_ranks(faults_of, kept) for kept in (True, False))
    assert kept < 1000 < returned, "each tensor has 4,096 pages"


def grown_by(returned: bool) -> float:
    """Allocate and free large blocks between small ones that stay, in a thread of their own."""
    import torch

    if returned:
        proc.return_large_blocks()
    kept, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def update() -> None:
        for index in range(30):
            blocks = [torch.ones((3 + index % 5) * 2**20) for _ in range(4)]
            kept.append([torch.ones(2**13) for _ in range(4)])
            del blocks

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def test_large_blocks_that_are_returned_do_not_pile_up_between_small_ones():
    (returned,), (piled,) = (run_ranks(grown_by, each) for each in (True, False))
    assert returned < 200 < piled, "MiB; four blocks have at most 112"
