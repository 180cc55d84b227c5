"""Calls out of order are refused by every kind of engine, with the next legal call."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.backend.act_runs import MODES, UNITS, begin
from tests.backend.acts import KINDS, Net, Oops
from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.errors import CollectiveError, EngineError, StepOrderError
from zerotune.plan.context import DeviceUpdate, Streaming
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

IN_MEMORY = ("plain", "host", "streamed")
"""Kinds of engines that can drop partial gradients."""


def start(kind: str) -> Any:
    return begin(KINDS[kind], MODES["default"], Net())


def loss_of(engine: Any, number: int = 0, model: Any = None) -> torch.Tensor:
    x = batch(number)
    torch.manual_seed(number)
    return (model or engine)(x.to(engine.dtype)).float().square().mean()


def train(engine: Any, number: int) -> float | None:
    engine.backward(loss_of(engine, number))
    return engine.step().grad_norm


def masters(engine: Any) -> list[torch.Tensor]:
    return [value.clone() for _, value in engine.master_weights.gather()]


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, masters(one), masters(other)))


def test_each_call_out_of_order_names_the_next_legal_call():
    """``test_step_sequences`` makes such calls under every kind of engine."""

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with start("host") as engine:
        old = loss_of(engine, 9)
        with pytest.raises(StepOrderError, match=r"engine\.backward\(loss\) and then"):
            engine.step()
        with pytest.raises(EngineError, match=r"engine\.backward.*the loss"):
            engine.backward(1.0)
        with pytest.raises(StepOrderError, match=r"instead of loss\.backward"):
            loss_of(engine, 1).backward()
        engine.backward(loss_of(engine))
        with pytest.raises(StepOrderError, match="add several losses"):
            engine.backward(loss_of(engine, 1))
        engine.step()
        with pytest.raises(StepOrderError, match="before the last"):
            engine.backward(old + loss_of(engine, 1))
        loss = loss_of(engine, 2)
        hook = engine.module.conv.weight.register_hook(fail)
        with pytest.raises(MemoryError):
            engine.backward(loss)
        hook.remove()
        for call in (lambda: loss_of(engine), engine.step):
            with pytest.raises(StepOrderError, match=r"MemoryError: no room.*engine\.discard\(\)"):
                call()


def test_streamed_weights_come_back_for_a_second_pass_and_refuse_a_graph_of_it():
    with start("streamed") as engine, start("streamed") as reference:
        x = torch.randn(2, 16, 4, 4).to(engine.dtype).requires_grad_()

        def loss(of: Any) -> torch.Tensor:
            torch.manual_seed(7)
            return of(x).float().square().mean()

        value = loss(engine)
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        engine.backward(value)
        reference.backward(loss(reference))
        assert gradient.abs().sum() > 0
        assert engine.step().grad_norm == reference.step().grad_norm
        with pytest.raises(EngineError, match=r"create_graph=True.*without streaming"):
            torch.autograd.grad(loss(engine), x, create_graph=True)


@pytest.mark.parametrize("kind", ["host", "streamed"])
def test_hooks_on_accumulated_gradients_that_are_registered_late_take_effect(kind):
    def scale(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    with start(kind) as engine, start(kind) as reference:
        train(engine, 0)
        train(reference, 0)
        engine.module.mix.weight.register_post_accumulate_grad_hook(scale)
        reference.module.mix.weight.register_hook(lambda gradient: gradient * 0.5)
        for number in (1, 2):
            assert train(engine, number) == train(reference, number)
        assert same(engine, reference)


@pytest.mark.parametrize("kind", ["streamed", "z3"])
def test_calls_without_gradients_or_in_inference_mode_train_as_others(kind):
    with start(kind) as engine, start(kind) as reference:
        for number, mode in enumerate((torch.no_grad, torch.inference_mode, torch.enable_grad)):
            loss = loss_of(engine, number)
            with mode():
                engine.backward(loss)
                engine.step()
            train(reference, number)
        assert same(engine, reference), kind


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(number))


@ranks(2)
@pytest.mark.parametrize("kind", ["plain", "z2 cpu"])
def test_data_that_end_earlier_on_a_rank_are_named_within_seconds_in_a_loop_of_ones_own(kind):
    def loop() -> None:
        for number in range(2 if engine.group.rank else 4):
            train(engine, number)
        engine.group.barrier("saving")

    with start(kind) as engine, pytest.raises(CollectiveError) as raised:
        loop()
    if engine.group.rank:
        assert "rank 0 has begun pass 3, but the data of rank 1 ended after 2" in str(raised.value)


@pytest.mark.parametrize("kind", ["streamed", "z2 cpu"])
def test_gradients_that_are_kept_elsewhere_are_not_clipped_or_cleared_in_vain(kind):
    with start(kind) as engine, start(kind) as reference:
        weights = list(engine.module.parameters())
        for each in (engine, reference):
            each.backward(loss_of(each, 0))
        for use in (
            lambda: torch.nn.utils.clip_grad_norm_(weights, 0.1),
            torch.optim.SGD(weights).step,
            lambda: engine.module.out.weight.grad.mul_(0.5),
        ):
            with pytest.raises(StepOrderError, match=r"keeps its gradients elsewhere"):
                use()
        engine.step()
        reference.step()
        assert same(engine, reference)
        assert all(weight.grad is None for weight in weights)
        optimizer = getattr(engine, "optimizer", None) or engine.deepspeed_engine.optimizer
        one = engine.module.out.weight
        for number, clear in enumerate(
            (
                engine.module.zero_grad,
                optimizer.zero_grad,
                lambda: setattr(one, "grad", None),
                lambda: setattr(one, "grad", torch.ones_like(one)),
                lambda: setattr(engine.module.later.weight, "grad", None),
            )
        ):
            for each in (engine, reference):
                each.backward(loss_of(each, 1))

            def step(clear: Any = clear) -> None:
                clear()
                engine.step()

            if number < 4:
                with pytest.raises(StepOrderError, match=r"keeps its gradients elsewhere"):
                    step()
            else:
                clear()
            for each in (engine, reference):
                each.step()
            assert same(engine, reference)


def test_training_with_averaged_weights_is_refused():
    with start("z2") as engine, start("z2") as reference:
        ema = EMAShadow(decay=0.5).attach(engine)
        for each in (engine, reference):
            train(each, 0)
        ema.step()
        for each in (engine, reference):
            each.backward(loss_of(each, 1))
        with ema.swapped_in():
            with engine.evaluating():
                loss_of(engine, 2)
            with pytest.raises(StepOrderError, match="holds the weights of an EMA"):
                engine.step()
        assert engine.step().grad_norm == reference.step().grad_norm
        with ema.swapped_in(), pytest.raises(StepOrderError, match=r"ema\.swapped_in"):
            engine.backward(loss_of(engine, 2))
        assert train(engine, 3) == train(reference, 3)


@pytest.mark.parametrize("kind", ["host", "z2"])
def test_only_a_whole_checkpoint_makes_half_replaced_weights_legal(kind, tmp_path):
    with start(kind) as engine, start(kind) as reference:
        for each in (engine, reference):
            train(each, 0)
        save_checkpoint(tmp_path / "step", engine=engine)
        state = engine.state

        def broken(*_: Any, **__: Any) -> None:
            raise OSError("disk gone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerotune.checkpoint.reader.Filler.fill", broken)
            with pytest.raises(OSError, match="disk gone"):
                load_checkpoint(tmp_path / "step", engine=engine)
        engine.load_state(state)
        for call in (lambda: loss_of(engine), engine.step, engine.discard):
            with pytest.raises(StepOrderError, match=r"only in part.*load a checkpoint"):
                call()
        load_checkpoint(tmp_path / "step", engine=engine)
        assert train(engine, 1) == train(reference, 1)
        assert same(engine, reference)


@pytest.mark.parametrize("kind", ["plain", "z2"])
def test_a_step_that_was_interrupted_is_not_taken_again(kind):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with start(kind) as engine, start(kind) as reference:
        for each in (engine, reference):
            each.backward(loss_of(each, 0))
        inner = getattr(engine, "optimizer", None) or engine.master_weights._layout._optimizer
        hook = inner.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        hook.remove()
        with pytest.raises(StepOrderError, match="no backward pass"):
            engine.step()
        reference.step()
        assert train(engine, 1) == train(reference, 1)


@pytest.mark.parametrize("kind", ["plain", "z2 cpu", "host"])
def test_a_step_that_failed_after_weights_had_moved_cannot_be_discarded(kind):
    def fail(*_: Any) -> None:
        raise Oops

    with start(kind) as engine:
        engine.backward(loss_of(engine))
        patched = engine._wrapper.inner if kind.startswith("z") else None
        patched = patched or getattr(engine, "_steps", None) or engine.optimizer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patched, "step", fail)
            with pytest.raises(Oops):
                engine.step()
        for call in (engine.step, engine.discard, lambda: loss_of(engine)):
            with pytest.raises(StepOrderError, match=r"load|resume"):
                call()


@pytest.mark.parametrize("kind", ["z3", "split"])
def test_weights_written_in_place_are_refused_where_their_values_cannot_tell(kind):
    with start_split() if kind == "split" else start(kind) as engine:
        train(engine, 0)
        engine.backward(loss_of(engine, 1))
        torch.nn.init.zeros_(engine.module.mix.weight)
        with pytest.raises(EngineError, match=r"mix\.weight.*written in place"):
            engine.step()
        # Nothing is known to differ once the masters have been written too.
        with engine.master_weights.editing() as fragments:
            for fragment in fragments:
                fragment.value.mul_(0.9)
        assert engine.step().applied


@pytest.mark.parametrize("kind", ["split", "stochastic"])
def test_elements_of_an_ema_that_masters_would_round_come_back_from_a_swap(kind):
    how = {"update": DeviceUpdate(masters="stochastic")} if kind == "stochastic" else {}
    with start_split(**how) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        train(engine, 0)
        ema.step()
        ties = torch.tensor([0x3F818000, 0x3F808000, 0x3F818001], dtype=torch.int32)
        for value in ema.state_dict().values():
            if value.ndim:
                value[:3] = ties.view(torch.float32)
        before = {name: value.clone() for name, value in ema.state_dict().items()}
        weights = masters(engine)
        with ema.swapped_in():
            assert not all(map(torch.equal, masters(engine), weights))
        assert all(torch.equal(value, before[name]) for name, value in ema.state_dict().items())
        assert all(map(torch.equal, masters(engine), weights))


@pytest.mark.parametrize("kind", ["plain", "z2", "z3"])
def test_a_parameter_that_is_not_trained_is_named(kind):
    with start(kind) as engine:
        train(engine, 0)
        if kind == "z2":
            engine.module.adapter = torch.nn.Linear(2, 2)
        else:
            engine.module.later.requires_grad_(True)

        def go_on() -> None:
            for number in range(1, 20):
                train(engine, number)

        with pytest.raises(EngineError, match=r"(?s)(later|adapter)\.weight.*would not be trained"):
            go_on()


@pytest.mark.parametrize("kind", ["z2", "z3"])
def test_an_edit_that_stops_early_leaves_model_and_masters_equal(kind):
    with start(kind) as engine:
        with engine.master_weights.editing() as fragments:
            next(fragments).value.mul_(1.5)
        for sample in range(60):
            engine.master_weights.check_model(sample)


def start_half() -> Any:
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", micro_batch_size=2, precision="bf16", gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 4e-3}},
    )  # fmt: skip
    return build(Net(), plan, engine="host")


def start_split(**how: Any) -> Any:
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", micro_batch_size=2, precision="bf16", gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 4e-3}},
    )  # fmt: skip
    streamed = Streaming(units=UNITS, window=2, split_masters=not how)
    return build(Net(), plan, streamed=streamed, **how)


def in_a_fork(call: Callable[[], object]) -> str:
    """Return the error that a call raises in a forked process, such as a loader's worker."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - what is judged
            os.write(there, str(error).encode())
        os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    return os.read(here, 10_000).decode()


def test_a_forked_worker_cannot_use_streamed_weights():
    with start("streamed") as engine, start("streamed") as reference:
        train(engine, 0)
        with torch.no_grad():
            assert "a model of its own in the worker" in in_a_fork(
                lambda: engine.module(batch(1).to(engine.dtype))
            )
        train(reference, 0)
        assert train(engine, 1) == train(reference, 1)


@pytest.mark.parametrize("kind", ["bf16", "streamed"])
def test_a_resident_weight_written_through_its_data_is_found_before_the_next_step(kind):
    changes = (torch.neg_, lambda data: data.mul_(2), lambda data: data[3].add_(0.5))
    with start_half() if kind == "bf16" else start(kind) as engine:
        train(engine, 0)
        # In one unit of streamed engines, and outside all others.
        weight = engine.module.get_parameter("norm.weight")
        for number, change in enumerate(changes, start=1):
            engine.backward(loss_of(engine, number))
            before = weight.data.clone()
            change(weight.data)
            with pytest.raises(EngineError, match=r"norm\.weight = .*other code replaced or"):
                engine.step()
            weight.data.copy_(before)
            assert engine.step().applied


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_a_model_in_training_is_copied_right_and_pickled_right_or_not_at_all(kind):
    def saved() -> Any:
        torch.save(engine.module, file := io.BytesIO())
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    def is_right(other: torch.nn.Module) -> bool:
        x = batch(2).to(engine.dtype)
        with torch.no_grad(), engine.evaluating():
            return torch.equal(other.eval()(x), engine.module(x))

    with start(kind) as engine:
        train(engine, 0)
        engine.backward(loss_of(engine, 1))
        assert is_right(copy.deepcopy(engine.module))
        if kind == "plain":
            assert is_right(saved())
        else:
            with pytest.raises(EngineError, match=r"pass model\.state_dict\(\) to torch\.save"):
                saved()
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(EngineError, match=r"copy engine\.module"):
                call(engine)
        assert engine.step().applied
    assert is_right(saved())


def test_stage_3_refuses_a_write_to_a_frozen_weight_that_is_empty():
    with start("z3") as engine:
        train(engine, 0)
        torch.nn.init.constant_(engine.module.later.weight, 0.5)
        engine.backward(loss_of(engine, 1))
        with pytest.raises(EngineError, match=r"later\.weight.*written in place"):
            engine.step()


@pytest.mark.parametrize("place", ["streamed", "resident"])
def test_a_write_between_a_backward_pass_that_updates_and_its_step_is_refused(place):
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", micro_batch_size=2, precision="fp32", gradient_clipping=0.0,
        gradient_accumulation_steps=2, optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
    )  # fmt: skip
    streaming = Streaming(units=UNITS, window=2)
    with build(Net(), plan, deepspeed=True, streamed=streaming) as engine:
        for number in range(3):
            train(engine, number)
            # Between steps, writes are taken over.
            torch.nn.init.normal_(engine.module.mix.weight, std=0.05)
        engine.backward(loss_of(engine, 3))
        if place == "streamed":
            torch.nn.init.normal_(engine.module.mix.weight, std=0.05)
        else:
            engine.module.scale.data = torch.ones(Net.CHANNELS)
        with pytest.raises(EngineError, match=r"between engine\.backward.*and engine\.step"):
            engine.step()
        with pytest.raises(StepOrderError, match="resume from the last checkpoint"):
            engine.discard()
