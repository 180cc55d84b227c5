"""Checkpoints written during training hold the state at the time of the call."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.checkpoint.refusals import failing_write, told
from tests.checkpoint.runs import everything, hostile, reseed, shadow_of, train
from tests.support.ranks import ranks
from tests.support.runs import Case


@pytest.mark.deepspeed
@ranks(2)
def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    from zerotune.checkpoint import BackgroundSaver, load_checkpoint
    from zerotune.checkpoint import tensors as tensorfile
    from zerotune.checkpoint.folders import verify_checkpoint

    engine = hostile(Case(stage=2), seed=0)
    ema = shadow_of(engine)
    reseed(engine.group.rank)
    train(engine, ema, 2)
    folder, shadows = tmp_path / "step", {"ema": ema}
    real, trained = tensorfile.write_at, threading.Event()

    def slow(*arguments: Any) -> None:
        trained.wait(120)
        real(*arguments)

    with BackgroundSaver(engine=engine) as saver:
        tensorfile.write_at = slow
        pending = saver.save(folder, shadows=shadows)
        assert (pending.done, folder.exists()) == (False, False)
        assert "is still being written after 0.001 s" in told(lambda: pending.wait(timeout_s=0.001))
        before = everything(engine, ema)
        train(engine, ema, 3)
        trained.set()
        assert everything(engine, ema)["lr"] != before["lr"]
        assert pending.wait() == folder
        assert (pending.done, pending.failed) == (True, False)
        tensorfile.write_at = real
        verify_checkpoint(folder)
        load_checkpoint(folder, engine=engine, shadows=shadows)
        assert [k for k, v in everything(engine, ema).items() if v != before[k]] == []
        with failing_write(0):
            failing = saver.save(folder, shadows=shadows)
            assert "No space left on device" in told(failing.wait)
        assert failing.failed
        assert "No space left on device" in told(saver.wait)
    verify_checkpoint(folder)
    # Rank 0 removes the unfinished save after all ranks have the error.
    engine.group.barrier("looking at what is left")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    engine.close()
