"""Checkpoints written while training goes on hold the moment they were asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.refusals import failing_write, told
from tests.checkpoint.runs import everything, hostile, reseed, shadow_of, train
from tests.support.ranks import run_ranks
from tests.support.runs import Case


def saved_meanwhile(root: str) -> dict[str, Any]:
    """Save in the background, train on, and load what was saved."""
    from zerotune.checkpoint import BackgroundSaver, load_checkpoint, verify_checkpoint
    from zerotune.checkpoint import tensors as tensorfile

    engine = hostile(Case(stage=2), seed=0)
    ema = shadow_of(engine)
    reseed(engine.group.rank)
    train(engine, ema, 2)
    folder, shadows = Path(root) / "step", {"ema": ema}
    found: dict[str, Any] = {}
    real, trained = tensorfile.write_at, threading.Event()

    def slow(*arguments: Any) -> None:
        trained.wait(120)
        real(*arguments)

    with BackgroundSaver(engine=engine) as saver:
        tensorfile.write_at = slow
        pending = saver.save(folder, shadows=shadows)
        found["early"] = pending.done, folder.exists()
        found["impatient"] = told(lambda: pending.wait(timeout_s=0.001))
        before = everything(engine, ema)
        train(engine, ema, 3)
        trained.set()
        found["moved"] = everything(engine, ema)["lr"] != before["lr"]
        found["path"] = pending.wait() == folder
        found["done"] = pending.done, pending.failed
        tensorfile.write_at = real
        verify_checkpoint(folder)
        load_checkpoint(folder, engine=engine, shadows=shadows)
        found["differ"] = [k for k, v in everything(engine, ema).items() if v != before[k]]
        with failing_write(0):
            failing = saver.save(folder, shadows=shadows)
            found["full"] = told(failing.wait)
        found["failed"] = failing.failed
        found["told again"] = told(saver.wait)
    verify_checkpoint(folder)
    # Rank 0 removes what is unfinished after all were told.
    engine.group.barrier("looking at what is left")
    found["left"] = [path.name for path in Path(root).iterdir()]
    engine.close()
    return found


@pytest.mark.deepspeed
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    for found in run_ranks(saved_meanwhile, str(tmp_path), world_size=2):
        assert found["early"] == (False, False)
        assert "is still being written after 0.001 s" in found["impatient"]
        assert found["moved"]
        assert found["path"]
        assert found["done"] == (True, False)
        assert found["differ"] == []
        assert "No space left on device" in found["full"]
        assert found["failed"]
        assert "No space left on device" in found["told again"]
        assert found["left"] == ["step"]
