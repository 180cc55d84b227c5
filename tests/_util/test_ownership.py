"""Owner records on a full disk."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest

from zerotune._util import ownership
from zerotune.offload.lease import LeaseRecord


def test_a_full_disk_keeps_the_former_record_and_leaves_no_partial_file(tmp_path):
    record = LeaseRecord.for_this_process(
        run_id="a", rank=0, world_size=1, plan_digest="0" * 64, filesystem="ext4"
    )
    path = tmp_path / "record.json"
    record.write_to(path)
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(ownership, "sync_file", side_effect=full),
        pytest.raises(OSError, match="No space left"),
    ):
        record.write_to(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
