"""Two ranks stream one copy of the weights, and train as ZeRO-2 with CPU offload does on two."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backend.host import streaming
from tests.backend.host.streaming import (
    Run,
    advance,
    differences,
    gathered,
    loss_of,
    make_model,
    start,
    train,
)
from tests.support.ranks import RanksFailed, on_a_machine, ranks, run_ranks
from tests.support.sampling import nightly
from zerotune.backend.host import ranks as shared
from zerotune.backend.host.sharing import Meeting
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.checkpoint.export.model import export_model
from zerotune.ema import EMAShadow
from zerotune.errors import CollectiveError, EngineError
from zerotune.plan.context import Streaming

pytestmark = pytest.mark.deepspeed

CLIPPED = Run(family="web", accumulation=3, steps=4, evaluate=True)
EAGER = Run(family="web", checkpointing="on", clipping=0.0, steps=4)
STREAMED = Streaming(window=2, gradient_buffers=2)
LEAN = Streaming(window=2, split_masters=True, gradient_buffers=2)


def rank() -> int:
    return int(os.environ["RANK"])


def lean_weights(optimizer: str) -> tuple[list[float], dict[str, bytes]]:
    run = Run(family="web", clipping=0.0, optimizer=optimizer, steps=4)
    with start(run, make_model(run), streamed=LEAN) as engine:
        losses = []
        for step in range(run.steps):
            # The same batch on every rank, so the mean gradient equals that of one rank.
            loss = loss_of(run, engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        weights = {
            name: weight.numpy().tobytes() for name, weight in engine.master_weights.gather()
        }
    return losses, weights


@pytest.mark.parametrize("optimizer", ["AdamW8BitStates", *nightly("AdamWBF16States")])
def test_lean_states_do_not_depend_on_the_number_of_ranks(optimizer):
    ((losses, weights),) = run_ranks(lean_weights, optimizer)
    for other, found in run_ranks(lean_weights, optimizer, world_size=2):
        assert (other, found) == (losses, weights)


@pytest.mark.parametrize(
    ("run", "streamed"),
    [
        (CLIPPED, STREAMED),
        (EAGER, STREAMED),
        *nightly(
            (Run(family="flux", accumulation=2, steps=3), Streaming(memory="700KiB")),
            (Run(family="web", clipping=0.0, compiled="aot_eager", steps=3), STREAMED),
        ),
    ],
    ids=str,
)
@ranks(2, timeout_s=900)
def test_streaming_on_two_ranks_equals_zero_2_bit_for_bit(monkeypatch, run, streamed):
    def differing(run: Run) -> torch.nn.Module:
        """Build different weights on each rank; those of rank 0 must win."""
        model = make_model(run)
        for parameter in model.parameters() if rank() else ():
            parameter.data.mul_(2)
        return model

    monkeypatch.setattr(streaming, "make_model", differing)
    mine = train(run, streamed=streamed, seed=3)
    theirs = train(run)
    assert (mine["engine"], theirs["engine"]) == ("SharedHostEngine", "DeepSpeedEngine")
    assert not differences(theirs, mine)
    assert mine["counts"].evicted
    assert bool(mine.get("compiled")) == bool(run.compiled)


# Stage 3 streams as stage 2 does, above.


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_the_host_engine_on_two_ranks_equals_zero_2_bit_for_bit(stage):
    mine, theirs = train(CLIPPED, engine="host", stage=stage, seed=3), train(CLIPPED)
    assert (mine["engine"], theirs["engine"]) == ("SharedHostEngine", "DeepSpeedEngine")
    # At stage 3, no rank keeps all weights.
    assert bool(mine["units"]) == (stage == 3)
    assert not differences(theirs, mine)


@ranks(2)
def test_split_masters_train_like_whole_ones_on_two_ranks():
    run = Run(family="flux", checkpointing="on", clipping=0.0, steps=3)
    mine, theirs = train(run, streamed=LEAN, seed=3), train(run)
    for kept in (mine, theirs):
        # Leave out masters and EMAs: one master in 131,072 is one unit in the last place too large.
        kept["contents"] = {
            name: [weight, first, second]
            for name, (weight, _, first, second, _) in kept["contents"].items()
        }
    assert not differences(theirs, mine)


@ranks(2)
def test_planted_faults_are_detected(monkeypatch):
    run = Run(family="web", steps=3)
    theirs = train(run)
    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "stages", lambda self, unit: [self.stage(unit)])
        assert differences(theirs, train(run, streamed=STREAMED)), "a reduction was left out"
    monkeypatch.setattr(Meeting, "wait_written", lambda *_: None)
    original = shared.SharedSteps._check

    def late(self: Any, *each: Any) -> Any:
        time.sleep(0.02 * rank())
        return original(self, *each)

    monkeypatch.setattr(shared.SharedSteps, "_check", late)
    assert differences(theirs, train(run, streamed=STREAMED)), "a write was not waited for"


@pytest.mark.parametrize("run", [CLIPPED, EAGER], ids=str)
@ranks(2)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(run):
    def train(streamed: Any) -> Any:
        with start(run, make_model(run), streamed=streamed) as engine:
            kept: list[Any] = [advance(run, engine, range(1))]
            for _ in range(run.accumulation):
                engine.backward(loss_of(run, engine, 2) * (float("nan") if rank() else 1.0))
                outcome = engine.step()
            kept += [outcome.applied, outcome.boundary, engine.state.skipped_steps]
            kept.append(advance(run, engine, range(3, 4)))
            return kept, gathered(engine)

    (mine, weights), (theirs, their_weights) = train(STREAMED), train(None)
    assert mine == theirs
    assert all(all(map(torch.equal, weights[n], their_weights[n])) for n in weights)


@ranks(2)
def test_no_rank_continues_with_weights_of_a_half_applied_step(monkeypatch):
    with start(EAGER, make_model(EAGER), streamed=STREAMED) as engine:
        advance(EAGER, engine, range(1))
        if rank():
            with torch._C.DisableTorchFunctionSubclass():
                engine.module.inp.weight.register_hook(lambda gradient: gradient * float("nan"))
        engine.backward(loss_of(EAGER, engine, 2))
        outcome = engine.step()
        assert (outcome.applied, outcome.grad_norm) == (True, float("inf"))
        with pytest.raises(EngineError, match="resume from the last checkpoint"):
            loss_of(EAGER, engine, 3)


# -- Ranks that diverge.


def freeze(engine: Any, *names: str) -> None:
    for name in names:
        engine.module.get_submodule(name).requires_grad_(False)


def lose(engine: Any) -> None:
    engine.close()


APART = {
    "a gradient": (lambda e: freeze(e, "blocks.3.n"), r"blocks\.3\.n\..*none on rank 1"),
    "a unit": (lambda e: freeze(e, "blocks.3"), r"gradients of blocks\.3"),
    "a rank": (lose, r"rank 1 has closed its engine"),
}


@pytest.mark.parametrize("run", [EAGER, *nightly(Run(family="web"))], ids=str)
@ranks(2)
def test_ranks_that_diverge_raise_an_error(run):
    for break_it, message in APART.values():
        engine = start(run, make_model(run), streamed=STREAMED)
        advance(run, engine, range(1))
        if rank():
            break_it(engine)
        if break_it is lose and rank():
            continue
        with pytest.raises(CollectiveError, match=message):
            advance(run, engine, range(1, 3))
        with pytest.raises(EngineError, match=message):
            advance(run, engine, range(3, 4))
        # Raises only if weights are between two steps.
        with contextlib.suppress(CollectiveError):
            engine.close()


@ranks(2)
def test_a_rank_that_does_not_arrive_in_time_is_named():
    run = Run(family="web")
    engine = start(run, make_model(run), streamed=STREAMED, timeout_s=4)
    if rank():
        time.sleep(8)
        return
    with pytest.raises(CollectiveError, match="rank 1 never arrived"):
        advance(run, engine, range(1))


@ranks(2)
def test_an_error_in_a_step_on_one_rank_is_reported_on_the_others(monkeypatch):
    run = Run(family="web")
    engine = start(run, make_model(run), streamed=STREAMED)
    advance(run, engine, range(1))
    if rank():
        monkeypatch.setattr(shared.SharedSteps, "_check", _fail)
    kind, message = (MemoryError, "no more") if rank() else (EngineError, "rank 1.*no more")
    with pytest.raises(kind, match=message):
        advance(run, engine, range(1, 3))
    with pytest.raises(kind, match=message):
        engine.close()


def _fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no more")


@ranks(2)
def test_ranks_with_different_models_or_plans_are_refused():
    run = Run(family="web")
    model = make_model(run)
    if rank():
        freeze_part = model.get_submodule("blocks.2")
        freeze_part.requires_grad_(False)
    with pytest.raises(CollectiveError, match=r"model.*blocks\.2"):
        start(run, model, streamed=STREAMED)
    with pytest.raises(CollectiveError, match="resolved plan"):
        start(run, make_model(run), streamed=Streaming(window=2 + rank()))


@ranks(2)
def test_deepspeed_trains_on_several_machines_and_a_decision_says_so():
    on_a_machine(f"machine-{rank()}")
    run = Run(family="web", steps=1)
    with start(run, make_model(run), streamed=True) as engine:
        advance(run, engine, range(1))
        assert type(engine).__name__ == "DeepSpeedEngine"
        (said,) = [each for each in engine.decisions if each.key == "streamed"]
    assert "several machines" in said.reason


# -- Memory.


def mapped(kind: str) -> list[str]:
    """List this process's mappings of shared memory:

    ``s`` shared, ``p`` private (copy on write).
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:zerotune" in line and line.split()[1][3] == kind]


def links() -> list[int]:
    """Return the link count of each piece of shared memory that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:zerotune" in str(each.readlink()):
                found.append(each.stat().st_nlink)
    return found


@ranks(2)
def test_ranks_share_one_copy_of_the_weights_and_free_it():
    run = Run(family="web", steps=1)
    model = make_model(run)
    with start(run, model, streamed=STREAMED) as engine:
        advance(run, engine, range(1))
        assert mapped("s")
        assert set(links()) == {0}, "nothing of it lasts longer than its processes"
        inodes = engine.group.gather(sorted({line.split()[4] for line in mapped("s")}))
        assert inodes[0] == inodes[1]
        weights = gathered(engine)
    gc.collect()
    assert not mapped("s")
    # From here on the weights are whole, and private to each rank.
    state = model.state_dict()
    assert all(torch.equal(state[name], weights[name][0]) for name in weights)
    for value in state.values():
        value.fill_(rank())
    time.sleep(0.2)
    assert all(bool((value == rank()).all()) for value in model.state_dict().values())
    del model, state, value, engine
    gc.collect()
    assert not mapped("p")
    assert not links()


@ranks(2)
def test_shared_memory_is_freed_after_an_error(monkeypatch):
    run = Run(family="web", steps=1)
    monkeypatch.setattr(shared.SharedSteps, "__init__", _fail)
    with pytest.raises(MemoryError):
        start(run, make_model(run), streamed=STREAMED)
    gc.collect()
    assert not mapped("s")
    assert not links()


def lose_a_rank() -> str:
    run = Run(family="web", steps=1)
    engine = start(run, make_model(run), streamed=STREAMED)
    advance(run, engine, range(1))
    if rank():
        os.kill(os.getpid(), signal.SIGKILL)
    said = ""
    try:
        advance(run, engine, range(1, 3))
    except CollectiveError as error:
        said += str(error)
    try:
        engine.close()
    except CollectiveError as error:
        said += str(error)
    del engine
    gc.collect()
    assert not mapped("s")
    # A killed rank fails the whole call, which returns no results: report through the error.
    raise AssertionError(said)


def test_a_killed_rank_is_named():
    with pytest.raises(RanksFailed, match=r"rank 1 has ended"):
        run_ranks(lose_a_rank, world_size=2)


# -- Reading and writing checkpoints of other engines.


def go_on(
    streamed: Any, steps: range, *, resume: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    with start(CLIPPED, make_model(CLIPPED), streamed=streamed) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        if resume is not None:
            load_checkpoint(resume, engine=engine, shadows={"ema": ema})
        kept = advance(CLIPPED, engine, steps, ema)
        if save is not None:
            save_checkpoint(save, engine=engine, shadows={"ema": ema})
        return {**kept, "contents": gathered(engine, ema)}


@ranks(2)
def test_checkpoints_equal_those_of_stage_2_and_resume_under_any_engine(tmp_path):
    # tests/checkpoint/test_matrix.py has all pairs of all plans.
    for streamed in (STREAMED, None):
        go_on(streamed, range(2), save=tmp_path / str(streamed))
    mine, theirs = (
        go_on(STREAMED, range(2, 4), resume=tmp_path / str(source)) for source in (STREAMED, None)
    )
    assert not differences(theirs, mine)


@ranks(2)
def test_exports_and_explanations_cover_all_ranks(tmp_path):
    from safetensors.torch import load_file

    run = Run(family="flux", steps=2)
    with start(run, make_model(run), streamed=STREAMED) as engine:
        advance(run, engine, range(2))
        export_model(tmp_path / "export", engine=engine)
        masters = dict(engine.master_weights.gather())
        assert "2 ranks" in engine.explain()
    (file,) = (tmp_path / "export").glob("*.safetensors")
    stored = load_file(file)
    assert stored.keys() == masters.keys()
    assert all(torch.equal(stored[n].float(), masters[n]) for n in masters)


def resume_with_any_number(folder: str, save: bool) -> Any:
    run = Run(family="web", steps=2)
    with start(run, make_model(run), streamed=STREAMED) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        path = Path(folder) / "checkpoint"
        if save:
            advance(run, engine, range(2), ema)
            save_checkpoint(path, engine=engine, shadows={"ema": ema})
        else:
            load_checkpoint(path, engine=engine, shadows={"ema": ema})
        return {k: [t.tolist() for t in v] for k, v in gathered(engine, ema).items()}


def test_checkpoints_of_two_ranks_resume_on_one_and_back(tmp_path):
    two, _ = run_ranks(resume_with_any_number, str(tmp_path), True, world_size=2)
    (one,) = run_ranks(resume_with_any_number, str(tmp_path), False, world_size=1)
    assert one == two
