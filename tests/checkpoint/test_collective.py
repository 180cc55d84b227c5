"""On two ranks: no endless waits, and a failure on one is an error on both."""

from __future__ import annotations

import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint.refusals import failing_write, told
from tests.checkpoint.runs import hostile
from tests.support.ranks import RanksFailed, ranks, run_ranks
from tests.support.runs import PLAIN
from tests.support.waiting import wait_for


@pytest.mark.parametrize("saver", [1])
@ranks(2)
def test_saving_on_one_rank_only_raises_an_error_that_names_the_missing_rank(tmp_path, saver):
    from zerotune.checkpoint import save_checkpoint

    engine, began, over = hostile(PLAIN, seed=0), time.monotonic(), tmp_path / "over"
    if engine.group.rank != saver:
        wait_for(over.exists)
        return
    error = told(lambda: save_checkpoint(tmp_path / "step", engine=engine, timeout_s=2))
    seconds, left = time.monotonic() - began, list(tmp_path.iterdir())
    over.touch()
    assert error.startswith("CollectiveError: ")
    assert "saving checkpoint" in error
    assert "within 2 s" in error
    missing = rf"\(.*Ranks? {1 - saver} .*\)|\(.*[Rr]ank {1 - saver}.*\)"
    assert re.search(missing, error), "the missing rank must be named"
    assert "on every rank, not inside `if rank == 0`" in error
    assert seconds < 8
    assert left == []


def save_with_a_dying_rank(root: str) -> None:
    """Kill rank 1 while it writes; rank 0 records its error."""
    from zerotune.checkpoint import save_checkpoint
    from zerotune.checkpoint import tensors as tensorfile

    engine = hostile(PLAIN, seed=0)
    folder = Path(root) / "step"
    save_checkpoint(folder, engine=engine, extra={"number": 1})
    if engine.group.rank == 1:
        with mock.patch.object(tensorfile, "write_at", side_effect=lambda *_: os._exit(3)):
            save_checkpoint(folder, engine=engine)
    began = time.monotonic()
    error = told(lambda: save_checkpoint(folder, engine=engine))
    (Path(root) / "told.txt").write_text(f"{time.monotonic() - began:.1f} s: {error}")


def test_a_rank_that_dies_while_saving_is_named(tmp_path):
    from zerotune.checkpoint.folders import verify_checkpoint

    with pytest.raises(RanksFailed, match="rank 1: died with exit code 3"):
        run_ranks(save_with_a_dying_rank, str(tmp_path), world_size=2)
    seconds, error = (tmp_path / "told.txt").read_text().split(" s: ", maxsplit=1)
    assert float(seconds) < 30
    assert error.startswith("CollectiveError: ")
    assert "write the weights" in error
    assert re.search(r"[Rr]anks? 1\b", error)
    assert verify_checkpoint(tmp_path / "step").extra == {"number": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step", "told.txt"]


@ranks(2)
def test_an_error_on_one_rank_is_raised_on_both(tmp_path):
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    engine = hostile(PLAIN, seed=0)
    rank, folder = engine.group.rank, tmp_path / "step"

    def save(path: Path = folder, **arguments: Any) -> Path:
        return save_checkpoint(path, engine=engine, **arguments)

    extra = told(lambda: save(extra={"rank": rank}))
    assert "CollectiveError: arguments of save_checkpoint" in extra
    assert "{'rank': 0}" in extra
    assert "{'rank': 1}" in extra
    path = told(lambda: save(folder / str(rank)))
    assert "CollectiveError: arguments of save_checkpoint" in path
    bad = told(lambda: save(extra={"set": {1}} if rank else {}))
    reports = ("rank 1 reports: ", "")[rank]
    assert bad.startswith(f"CheckpointError: extra.set = {{1}}: {reports}cannot be saved as JSON")
    with failing_write(3_000) if rank else nullcontext():
        full = told(save)
    assert ("rank 1 reports: OSError", "No space left on device")[rank] in full
    with mock.patch("pathlib.Path.is_dir", return_value=False) if rank else nullcontext():
        shared = told(save)
    assert ("rank 1 reports: rank 0 created this folder", "does not see it")[rank] in shared
    # Rank 0 cleans up after the other ranks have the error.
    engine.group.barrier("looking at what is left")
    assert list(tmp_path.iterdir()) == []
    engine.group.barrier("looked at what is left")
    save()
    assert sorted(each.name for each in folder.iterdir()) == [
        "manifest.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "weights-00001-of-00001.safetensors",
    ]
    engine.group.barrier("damaging a file")
    file = folder / "rank-00001-of-00002.safetensors"
    if rank == 0:
        file.write_bytes(b"x" * file.stat().st_size)
    engine.group.barrier("damaged a file")
    corrupt = told(lambda: load_checkpoint(folder, engine=engine))
    assert "rank-00001-of-00002.safetensors: " in corrupt
    if rank == 0:
        assert corrupt.startswith("CheckpointCorruptError: ")
        assert "rank 1 reports: was changed after it was written" in corrupt
    engine.close()
