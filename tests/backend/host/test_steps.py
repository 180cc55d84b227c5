"""Steps of streamed weights: when they begin, which windows are dropped, what is final."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import (
    Run,
    advance,
    contents,
    loss_of,
    make_model,
    start,
)
from tests.support.ranks import ranks
from zerotune.backend.host import passes, steps
from zerotune.backend.host.obstacles import why_not_hosted
from zerotune.backend.step.kernel import HostStepOp
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError
from zerotune.plan.context import Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

CLIPPED = Run(family="web", clipping=0.05)
EAGER = Run(family="web", clipping=0.0)


FEW = Streaming(window=2, gradient_buffers=1)


def begin(run: Run, streamed: Any = FEW) -> Any:
    return start(run, make_model(run), streamed=streamed)


@pytest.mark.parametrize(("run", "eager"), [(CLIPPED, False), (EAGER, True)], ids=str)
def test_passes_begin_in_the_backward_pass_only_without_clipping(run, eager):
    with begin(run) as engine:
        loss = loss_of(run, engine, 0)
        assert not engine._steps._under_way
        engine.backward(loss)
        assert engine._steps._under_way == eager
        engine.step()
        assert not engine._steps._under_way
        assert ("in the backward pass" in engine.explain()) == eager


def test_no_pass_begins_before_the_last_micro_batch():
    run = Run(family="web", clipping=0.0, accumulation=3)
    with begin(run) as engine:
        for micro in range(2):
            engine.backward(loss_of(run, engine, micro))
            assert not engine._steps._under_way
            assert not engine.step().boundary


@pytest.mark.parametrize("run", [CLIPPED, EAGER], ids=str)
def test_a_gradient_without_finite_values_skips_the_step_as_zero_2_does(run):
    def train(streamed: Any) -> Any:
        with begin(run, streamed) as engine:
            kept: list[Any] = [advance(run, engine, range(2))]
            engine.backward(loss_of(run, engine, 2) * float("nan"))
            outcome = engine.step()
            kept += [outcome.applied, outcome.boundary, attrs.evolve(engine.state, loss_scaler={})]
            kept.append(advance(run, engine, range(3, 5)))
            return kept, contents(engine)

    (mine, weights), (theirs, their_weights) = train(FEW), train(None)
    assert mine == theirs
    assert all(all(map(torch.equal, weights[n], their_weights[n])) for n in weights)


def test_late_passes_of_the_step_before_do_not_count_in_a_skipped_step(monkeypatch):
    original = passes.UnitPass.take
    monkeypatch.setattr(passes.UnitPass, "take", lambda each: (time.sleep(0.05), original(each)))
    with begin(EAGER) as engine:
        advance(EAGER, engine, range(1))
        engine.backward(loss_of(EAGER, engine, 2) * float("nan"))
        assert not engine.step().applied


def spoil(engine: Any) -> None:
    """Make the first block's gradients NaN after all other blocks have been stepped."""
    parameter = engine.module.blocks[0].a.bias
    with torch._C.DisableTorchFunctionSubclass():
        hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
    original = steps.StreamedSteps._complete

    def complete(self: Any, unit: Any) -> None:
        if unit.name == "blocks.0":
            self.passes.settle()
        original(self, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.StreamedSteps, "_complete", complete)
        engine.backward(loss_of(EAGER, engine, 9))
    hook.remove()


def test_a_run_resumes_in_the_same_process_after_a_failed_backward_pass(tmp_path):
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    def give_up(_: torch.Tensor) -> None:
        raise MemoryError("no room for this gradient")

    with begin(EAGER) as engine:
        advance(EAGER, engine, range(2))
        save_checkpoint(tmp_path / "good", engine=engine)
        expected = advance(EAGER, engine, range(2, 4))
        with torch._C.DisableTorchFunctionSubclass():
            hook = engine.module.blocks[0].a.bias.register_hook(give_up)
        with pytest.raises(MemoryError, match="no room"):
            engine.backward(loss_of(EAGER, engine, 9))
        hook.remove()
        with pytest.raises(EngineError, match="resume from the last checkpoint"):
            loss_of(EAGER, engine, 3)
        load_checkpoint(tmp_path / "good", engine=engine)
        assert advance(EAGER, engine, range(2, 4)) == expected


def test_training_is_refused_after_a_late_non_finite_gradient_until_a_resume(tmp_path):
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    with begin(EAGER) as engine:
        advance(EAGER, engine, range(2))
        save_checkpoint(tmp_path / "good", engine=engine)
        spoil(engine)
        outcome = engine.step()
        assert outcome.applied, "some weights have changed"
        assert outcome.grad_norm == float("inf")
        for go_on in (
            lambda: loss_of(EAGER, engine, 3),
            lambda: engine.backward(torch.ones((), requires_grad=True)),
        ):
            with pytest.raises(EngineError, match="resume from the last checkpoint"):
                go_on()
        load_checkpoint(tmp_path / "good", engine=engine)
        resumed = advance(EAGER, engine, range(2, 5))
    with begin(EAGER, None) as engine:
        whole = advance(EAGER, engine, range(5))
    assert resumed["losses"] == whole["losses"][2:]


def test_an_error_in_a_pass_is_raised_by_every_later_call(monkeypatch):
    def fail(self: Any) -> None:
        raise MemoryError("no more")

    with begin(CLIPPED) as engine:
        advance(CLIPPED, engine, range(1))
        engine.master_weights.settle()
        monkeypatch.setattr(passes.UnitPass, "take", fail)
        engine.backward(loss_of(CLIPPED, engine, 1))
        engine.step()
        for _ in range(2):
            with pytest.raises(MemoryError):
                loss_of(CLIPPED, engine, 2)
            with pytest.raises(MemoryError):
                list(engine.master_weights.read())
        with pytest.raises(MemoryError):
            engine.close()


# -- When weights are not streamed.


def resolved(streamed: Any = True, *, world_size: int = 1, **build: Any) -> Any:
    arguments = {"stage": 2, "offload": "cpu", "precision": "bf16", **build}
    return DeepSpeedPlan.build(**arguments).resolve(
        streamed=streamed,
        world_size=world_size,
        platform=Platform.synthetic("cuda", vram=2**34, ram=2**40),
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"stage": 0}, "not in host memory"),
        ({"offload": "none"}, "not in host memory"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_streamed_gets_a_warning_with_the_reason(how, reason):
    plan = resolved(**how)
    assert plan.streamed is False
    (said,) = [d for d in plan.decisions if d.key == "streamed"]
    assert reason in said.reason
    assert (said.before, said.after, said.severity) == (True, False, "warning")


def test_weights_on_the_device_are_streamed_only_on_request():
    from zerotune.plan.optimizer.resolver import OptimizerResolver

    assert resolved(None).is_resident
    plan = OptimizerResolver().resolve(resolved(True))
    assert not plan.is_resident
    assert why_not_hosted(plan, make_model(CLIPPED)) is None
    said = plan.without_streaming("because").decisions[-1]
    assert (said.key, said.after, said.reason) == ("streamed", False, "because")


def test_a_model_without_repeated_blocks_is_trained_by_deepspeed():
    from zerotune.plan.optimizer.resolver import OptimizerResolver
    from zerotune.training.setup import build_engine

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ready = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16").resolve(
        model=ModelFacts.from_module(model), streamed=True
    )
    with build_engine(model=model, plan=OptimizerResolver().resolve(ready)) as engine:
        assert type(engine).__name__ == "DeepSpeedEngine"
        assert "no repeated blocks" in engine.explain()


# -- EMAs of weights that were updated during the backward pass.


def averaged(*, streamed: Any = True, is_late: bool = False) -> Any:
    with begin(EAGER, streamed) as engine:
        ema = EMAShadow(decay=0.9, update_every=3).attach(engine)
        for step in range(7):
            engine.backward(loss_of(EAGER, engine, step))
            assert engine.step().applied
            if is_late:
                engine.master_weights.settle()
            ema.step()
        return contents(engine, ema)


def test_emas_of_eager_steps_equal_those_of_steps_after_the_backward_pass():
    mine = averaged()
    for other in (averaged(is_late=True), averaged(streamed=None)):
        assert mine.keys() == other.keys()
        assert all(all(map(torch.equal, mine[name], other[name])) for name in mine)


@pytest.mark.parametrize("run", [CLIPPED, EAGER], ids=str)
def test_only_views_outside_the_engine_complete_a_step_at_once(run, monkeypatch):
    at_once: list[int] = []
    op_step, wait_for_all = HostStepOp.step, steps.StreamedSteps.wait_for_all

    def slow(self: HostStepOp, *args: Any, **kwargs: Any) -> None:
        # The arguments are views of the weights.
        op_step(self, *args, **kwargs)
        time.sleep(0.02)

    def wait(self: steps.StreamedSteps) -> None:
        at_once.append(step)
        wait_for_all(self)

    with begin(run) as engine:
        monkeypatch.setattr(HostStepOp, "step", slow)
        monkeypatch.setattr(steps.StreamedSteps, "wait_for_all", wait)
        for step in range(4):
            engine.backward(loss_of(run, engine, step))
            views = [p.data for p in engine.module.parameters()] if step == 3 else []
            assert engine.step().applied
            del views
        assert at_once == [3]


def test_an_engine_with_streamed_weights_cannot_be_compiled_as_a_whole():
    with begin(CLIPPED) as engine:
        with pytest.raises(EngineError, match=r"torch\.compile.*engine\.module"):
            torch.compile(engine, backend="eager")
        advance(CLIPPED, engine, range(1))
