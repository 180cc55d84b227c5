"""The trainer end to end on the real engines, one and two processes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.errors import error_of
from tests.support.models import tiny_unet
from tests.support.ranks import ranks, run_ranks
from tests.training import workers
from tests.training.workers import dataset, plan, regression, trainer
from zerotune import DataStream, EMAShadow, OffloadManager, prepare
from zerotune.plan import ModelFacts
from zerotune.training.events import read_metrics

ENGINES = [
    pytest.param(True, 1, marks=[pytest.mark.deepspeed, pytest.mark.nightly]),
    pytest.param(True, 2, marks=pytest.mark.deepspeed),
    pytest.param(False, 1, marks=pytest.mark.nightly),
    (False, 2),
]
_first_losses: dict[int, list[float]] = {}


@pytest.mark.parametrize(("deepspeed", "ranks"), ENGINES)
def test_a_whole_run_trains_saves_samples_and_reports(deepspeed, ranks, tmp_path):
    results = run_ranks(workers.whole_run, deepspeed, str(tmp_path), world_size=ranks)
    first = results[0]
    losses = first["losses"]

    assert all(result["losses"] == losses for result in results), "the mean is everyone's"
    assert len(losses) == 5
    assert len(set(losses)) == 5
    assert first["report"].losses == tuple(losses)
    assert first["events"] == ["start 0 of 5", "end", "save checkpoint", "start 5 of 5", "end"]
    assert first["steps_after"] == 5, "nothing is left to do"
    assert first["distance"] > 0
    # All engines see the same data and, for a given number of ranks, the same noise.
    expected = _first_losses.setdefault(ranks, losses)
    assert losses == pytest.approx(expected, rel=5e-5)
    _check_samples(results)
    _check_files(tmp_path, losses, ranks)
    _check_report(first["report"], ranks)
    _check_memory(
        [result["memory"] for result in results],
        replicated=not deepspeed,
        # In fp32, the host engine's weights in host memory are the master weights.
        separate_master=False,
    )
    assert "EMA" in first["explanation"]
    assert "optimizer.type = " in first["explanation"]
    said = [line for line in first["printed"].splitlines() if line.strip()]
    assert len(said) == len(set(said)), "each warning is printed once"


def _check_samples(results):
    averaged, trained = (results[0]["samples"][ema] for ema in (True, False))
    assert averaged.shape == (3, 1, 8, 8)
    assert np.isfinite(averaged).all()
    assert not np.array_equal(averaged, trained)
    for result in results:
        assert np.array_equal(result["samples"][True], averaged), "every rank has all images"


def _check_memory(found, *, replicated, separate_master):
    """Compare the plan's parts with the tensors' bytes, summed over the ranks."""
    elements = found[0]["elements"]
    for part, each in (("master weights", 4), ("optimizer states", 8), ("EMA", 4)):
        said = [memory["parts"].get(part, 0) for memory in found]
        held = [memory[part] for memory in found]
        if part == "master weights" and not separate_master:
            assert said == [0] * len(found), "the weights themselves"
            continue
        assert len(set(said)) == 1
        copies = len(found) if replicated else 1
        assert sum(held) == each * elements * copies
        stored = elements if part == "EMA" else found[0]["stored"]
        # Ranks own equal shares, except for the last one's padding.
        assert math.isclose(sum(said), each * stored * copies, rel_tol=2e-3)
        assert sum(said) >= sum(held)


def _check_files(folder, losses, ranks):
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]
    assert [line.loss for line in lines] == losses
    assert [line.samples for line in lines] == [8, 16, 24, 32, 40]
    assert [line.lr for line in lines] == pytest.approx([0, 0, 5e-4, 1e-3, 1.5e-3])
    for line in lines:
        assert line.applied
        assert 0 < line.grad_norm < 100
        assert 0 < line.phases["forward"] < line.seconds
        assert sum(line.phases.values()) <= line.seconds
        assert line.host_peak > 50 * 2**20
        assert line.device_peak is None or line.device_peak > 0


def _check_report(report, ranks):
    assert report.steps == 5
    assert report.first_step == 0
    assert report.world_size == ranks
    assert report.samples_per_second == pytest.approx(8 * 5 / report.seconds)
    assert report.host_peak >= report.host_before > 0
    text = report.render()
    assert "5 steps in" in text
    assert "optimizer states" in text
    assert f"{ranks} process" in text


@pytest.mark.parametrize(("deepspeed", "ranks"), [ENGINES[1], (False, 1)])
def test_a_resumed_run_equals_an_uninterrupted_one(deepspeed, ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    whole = run_ranks(workers.uninterrupted, deepspeed, folder, world_size=ranks)
    parts = run_ranks(workers.resumed, deepspeed, folder, world_size=ranks)
    for (losses, weights), (later, continued, first_step) in zip(whole, parts, strict=True):
        assert first_step == 3
        assert later == losses[3:], "bit for bit"
        for kind in ("master", "ema"):
            for name, value in weights[kind].items():
                assert np.array_equal(continued[kind][name], value), (kind, name)
    assert len(set(whole[0][0])) == 6, "the losses differ from step to step"


@ranks(1)
def test_each_mistake_gives_one_clear_error():
    halves = [{"images": torch.zeros(3, 1, 8, 8), "labels": torch.zeros(3).long()}]
    for options, call, said in (
        ({"data": None}, lambda t: t.fit(steps=1), "DataError: data = None: the trainer has no da"),
        ({"data": halves}, lambda t: t.fit(steps=1), "'images': 3"),
        ({"data": halves}, lambda t: t.fit(steps=1), "drop_last=True"),
        ({"objective": regression}, lambda t: t.sample(count=1), "function has no scheduler"),
        ({}, lambda t: t.resume("nowhere"), "CheckpointError"),
    ):
        with trainer(False, **options) as running:
            message = error_of(lambda call=call, running=running: call(running))
        assert said in message
        assert "Fix: " in message
    assert error_of(lambda: trainer(False, data=7)).startswith("DataError: data = 'int'")


@pytest.mark.deepspeed
@ranks(2)
def test_the_measured_memory_of_stage_3_is_what_the_ranks_hold():
    wanted = plan(stage=3, offload="cpu").resolve(
        model=ModelFacts.from_module(tiny_unet()), world_size=2, engine="deepspeed"
    )
    with trainer(True, wanted, ema=EMAShadow(decay=0.5)) as running:
        running.fit(steps=1)
        found = running.engine.group.gather(workers.memory(running))
    _check_memory(found, replicated=False, separate_master=True)
    assert found[0]["parts"]["buckets"] > 0


@pytest.mark.deepspeed
@pytest.mark.nvme
@ranks(2)
def test_prepare_leases_one_swap_folder_for_all_ranks_and_always_removes_it(tmp_path):
    (name,) = raw_loop(tmp_path)  # There is one folder per run and not one per rank.
    assert name.startswith("zerotune-")
    assert dist.is_initialized(), "a launcher's group lasts as long as its process"
    wanted, manager = plan(stage=3, offload="nvme"), OffloadManager(root=tmp_path)
    with (
        pytest.raises(KeyError, match="the user's own"),
        prepare(model=tiny_unet(), plan=wanted, offload=manager),
    ):
        raise KeyError("the user's own")
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


def raw_loop(root: Path) -> list[str]:
    """Run a custom loop with ``prepare`` twice; return the swap folders while it runs."""
    wanted, losses = plan(stage=3, offload="nvme"), []
    for _ in range(2):
        with prepare(model=tiny_unet(), plan=wanted, offload=OffloadManager(root=root)) as engine:
            stream = DataStream(
                dataset(),
                micro_batch_size=engine.plan.micro_batch_size,
                rank=engine.group.rank,
                world_size=engine.group.world_size,
            )
            engine.backward(regression(engine, next(stream), None))
            assert engine.step().applied
            losses.append(regression(engine, next(stream), None).item())
            during = sorted(path.name for path in root.iterdir())
        engine.close()
    assert losses[0] == losses[1]
    return during


@ranks(2)
def test_a_trainer_refuses_the_stream_of_another_world():
    alone = DataStream(dataset(), micro_batch_size=2, rank=0, world_size=1)
    message = error_of(lambda: trainer(False, data=alone))
    assert "rank 0 of 1" in message
    assert f"this is rank {dist.get_rank()} of 2" in message
    trainer(False, data=DataStream(dataset(), micro_batch_size=2)).close()


@ranks(1)
def test_closing_one_engine_leaves_the_process_group_to_the_other():
    first, second = trainer(False), trainer(False)
    again = error_of(lambda: trainer(False, model=second.engine.module))
    assert "another open engine already trains this parameter" in again
    first.close()
    assert dist.is_initialized()
    assert second.fit(steps=1).losses[0] > 0
    second.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("deepspeed", [False, pytest.param(True, marks=pytest.mark.deepspeed)])
@ranks(1)
def test_a_failed_start_leaves_nothing_behind(deepspeed):
    # Nothing is trainable, which the engine notices only after it has started the process group.
    model = tiny_unet().requires_grad_(False)
    assert "Fix: " in error_of(lambda: trainer(deepspeed, model=model))
    assert not dist.is_initialized()
    assert "LOCAL_RANK" not in os.environ
