"""Two ranks: nobody waits for ever, and a failure on one is an error on both."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint.refusals import failing_write, told
from tests.checkpoint.runs import hostile
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import PLAIN


def save_alone(folder: str, saver: int) -> tuple[str, float]:
    """Only rank ``saver`` saves; the other goes on with something else."""
    from zerotune.checkpoint import save_checkpoint

    engine = hostile(PLAIN, seed=0)
    began = time.monotonic()
    error, over = "", Path(f"{folder}.over")
    if engine.group.rank == saver:
        error = told(lambda: save_checkpoint(folder, engine=engine, timeout_s=2))
        over.touch()
    while not over.exists() and time.monotonic() < began + 60:
        time.sleep(0.02)
    return error, time.monotonic() - began


def check_alone(tmp_path: Path, saver: int) -> None:
    results = run_ranks(save_alone, str(tmp_path / "step"), saver, world_size=2)
    error, seconds = results[saver]
    assert error.startswith("CollectiveError: ")
    assert "saving checkpoint" in error
    assert "within 2 s" in error
    missing = rf"\(.*Ranks? {1 - saver} .*\)|\(.*[Rr]ank {1 - saver}.*\)"
    assert re.search(missing, error), "the missing rank must be named"
    assert "on every rank, not inside `if rank == 0`" in error
    assert seconds < 8
    assert [path.name for path in tmp_path.iterdir()] == ["step.over"], "the test's own"


def test_a_save_on_the_main_rank_only_names_the_missing_one(tmp_path):
    check_alone(tmp_path, saver=0)


def test_a_save_on_another_rank_only_names_the_main_one(tmp_path):
    check_alone(tmp_path, saver=1)


def save_with_a_dying_rank(root: str) -> None:
    """Rank 1 is gone in the midst of writing; rank 0 writes down what it was told."""
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
    from zerotune.checkpoint import verify_checkpoint

    with pytest.raises(RanksFailed, match="rank 1: died with exit code 3"):
        run_ranks(save_with_a_dying_rank, str(tmp_path), world_size=2)
    seconds, error = (tmp_path / "told.txt").read_text().split(" s: ", maxsplit=1)
    assert float(seconds) < 30
    assert error.startswith("CollectiveError: ")
    assert "write the weights" in error
    assert re.search(r"[Rr]anks? 1\b", error)
    assert verify_checkpoint(tmp_path / "step").extra == {"number": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step", "told.txt"]


def trouble(root: str) -> dict[str, Any]:
    """One rank fails or disagrees; the engines go on, and a later save works."""
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    engine = hostile(PLAIN, seed=0)
    rank, folder = engine.group.rank, Path(root) / "step"
    found: dict[str, Any] = {}

    def save(path: Path = folder, **arguments: Any) -> Path:
        return save_checkpoint(path, engine=engine, **arguments)

    found["extra"] = told(lambda: save(extra={"rank": rank}))
    found["path"] = told(lambda: save(folder / str(rank)))
    found["bad extra"] = told(lambda: save(extra={"set": {1}} if rank else {}))
    if rank == 1:
        with failing_write(3_000):
            found["full"] = told(save)
    else:
        found["full"] = told(save)
    if rank == 1:
        with mock.patch("pathlib.Path.is_dir", return_value=False):
            found["not shared"] = told(save)
    else:
        found["not shared"] = told(save)
    # Rank 0 clears up after it has told the others.
    engine.group.barrier("looking at what is left")
    found["left"] = [path.name for path in Path(root).iterdir()]
    save()
    found["files"] = sorted(path.name for path in folder.iterdir())
    found["sizes"] = [
        (folder / f"rank-{index:05d}-of-00002.safetensors").stat().st_size for index in range(2)
    ]
    engine.group.barrier("damaging a file")
    if rank == 0:
        (folder / "rank-00001-of-00002.safetensors").write_bytes(b"x" * found["sizes"][1])
    engine.group.barrier("damaged a file")
    found["corrupt"] = told(lambda: load_checkpoint(folder, engine=engine))
    engine.close()
    return found


def test_trouble_on_one_rank_is_told_on_both(tmp_path):
    first, second = run_ranks(trouble, str(tmp_path), world_size=2)
    for found in (first, second):
        assert "CollectiveError: arguments of save_checkpoint" in found["extra"]
        assert "{'rank': 0}" in found["extra"]
        assert "{'rank': 1}" in found["extra"]
        assert "CollectiveError: arguments of save_checkpoint" in found["path"]
        assert found["left"] == []
        assert found["files"] == [
            "manifest.json",
            "rank-00000-of-00002.safetensors",
            "rank-00001-of-00002.safetensors",
            "weights-00001-of-00001.safetensors",
        ]
        assert "rank-00001-of-00002.safetensors: " in found["corrupt"]
    assert second["bad extra"].startswith("CheckpointError: extra.set = {1}: JSON cannot")
    assert first["bad extra"].startswith("CheckpointError: extra.set = {1}: rank 1 reports: JSON")
    assert "No space left on device" in second["full"]
    assert "rank 1 reports: OSError" in first["full"]
    assert "does not see it" in second["not shared"]
    assert "rank 1 reports: rank 0 made this folder" in first["not shared"]
    assert first["corrupt"].startswith("CheckpointCorruptError: ")
    assert "rank 1 reports: was altered" in first["corrupt"]
