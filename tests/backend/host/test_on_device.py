"""Updates on the device: rounding, resuming, optimizers; tests/device has the parity."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import attrs
import pytest
import torch

from tests.backend.host import streaming
from tests.backend.host.streaming import Run, make_model
from tests.backend.host.whole import contents_of, train_whole, unlike
from zerotune.backend.host.units import HostMemory
from zerotune.backend.host.updates import OptimizerOnDevice, _check_unchanged
from zerotune.backend.optimizers.classes import Lion
from zerotune.backend.step.adams import StochasticMasters
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.plan.context import DeviceUpdate, Streaming
from zerotune.plan.memory.hosted import NOISE_PERIOD
from zerotune.plan.plan import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed

OTHERS = {
    "NAdam": partial(torch.optim.NAdam, lr=2e-3, weight_decay=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=2e-3, weight_decay=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=2e-3, weight_decay=0.01),
    "SGD": partial(torch.optim.SGD, lr=2e-3, weight_decay=0.01),
    "Lion": partial(Lion, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.999)),
}
WEB = Run(family="web", scheduler=False)


def train(run: Run, *, seed: int = 3, **how):
    """Train with the update on the device, and random delays of all threads."""
    with (
        streaming.delays(seed),
        streaming.start(run, make_model(run), **how) as engine,
    ):
        found = streaming.advance(run, engine, range(run.steps))
        return {**found, "contents": contents_of(engine), "decisions": engine.decisions}


def test_weights_that_are_not_finite_stay_so_when_rounded_at_random():
    # CUDA's usual NaN, which the noise would carry into the sign, a negative one, and infinity.
    values = torch.tensor([0x7FFFFFFF, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    masters = StochasticMasters(torch.zeros(3, dtype=torch.bfloat16))
    masters.store(values, lambda words: words.add_(0xFFFF))
    assert masters.weight[:2].isnan().all()
    assert masters.weight[2] == float("inf")


def test_the_noise_of_a_weight_depends_on_the_step_and_its_place_in_the_group(monkeypatch):
    def make(groups):
        return torch.optim.SGD(groups, lr=0.1)

    update = OptimizerOnDevice(
        optimizer=make([torch.nn.Parameter(torch.zeros(1))]), make=make,
        order=SimpleNamespace(place_of=lambda name, _: int(name)),
        memory=HostMemory(pin=False), device=torch.device("cpu"),
    )  # fmt: skip

    def noise(place, count, *, taken=3, group=0):
        part = SimpleNamespace(member=SimpleNamespace(name=str(place)))
        words = torch.zeros(count, dtype=torch.int32)
        update._add_noise(SimpleNamespace(parts=[part], group=group), taken, words)
        return words

    whole = noise(7, NOISE_PERIOD + 1000)
    assert (int(whole.min()), int(whole.max())) == (0, 2**16 - 1)
    assert float(whole.double().mean()) == pytest.approx((2**16 - 1) / 2, rel=1e-3)
    cuts = (0, 500, NOISE_PERIOD - 3, NOISE_PERIOD + 1000)
    pieces = [noise(7 + start, stop - start) for start, stop in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)
    for other in (noise(7, 1000, taken=4), noise(7, 1000, group=1), noise(8, 1000)):
        assert float((other == whole[:1000]).double().mean()) < 0.01
    assert torch.equal(noise(7, 1000), whole[:1000])
    # Too little memory for those of another step leaves none of this step either.
    with monkeypatch.context() as patch:
        patch.setattr(torch, "arange", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            noise(7, 1000, taken=4)
    assert torch.equal(noise(7, 1000), whole[:1000])


def test_loading_without_the_saved_states_begins_them_anew(tmp_path):
    run = attrs.evolve(WEB, optimizer="Adafactor", steps=2)
    how = {"streamed": Streaming(window=2), "update": DeviceUpdate()}
    adam = attrs.evolve(run, optimizer="AdamW")
    with streaming.start(adam, make_model(run), **how) as engine:
        streaming.advance(adam, engine, range(2))
        save_checkpoint(tmp_path / "saved", engine=engine)
    with streaming.start(run, make_model(run), **how) as engine:
        streaming.advance(run, engine, range(2))
        load_checkpoint(tmp_path / "saved", engine=engine)
        engine.master_weights.settle()
        assert not any("row_var" in state for state in engine.optimizer.state.values())
        streaming.advance(run, engine, range(2, 4))


def test_the_update_on_the_device_takes_over_the_moments_of_the_host(tmp_path):
    run = attrs.evolve(WEB, steps=2)
    with streaming.start(run, make_model(run), streamed=True) as engine:
        streaming.advance(run, engine, range(2))
        save_checkpoint(tmp_path / "saved", engine=engine)
        theirs = streaming.contents(engine)
    with streaming.start(run, make_model(run), streamed=True, update=DeviceUpdate()) as engine:
        load_checkpoint(tmp_path / "saved", engine=engine)
        mine = streaming.contents(engine)
        assert all(map(torch.equal, mine[n], theirs[n]) for n in theirs)
        streaming.advance(run, engine, range(2, 3))


def test_a_group_that_changes_in_a_step_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.5

    made = [Counting([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)]
    weight = torch.nn.Parameter(torch.ones(1))
    made[0].param_groups[0]["params"] = [weight]
    weight.grad = torch.ones(1)
    before = dict(made[0].param_groups[0])
    made[0].step()
    with pytest.raises(OptimizerError, match="changes lr of its parameter groups"):
        _check_unchanged(made[0], made[0].param_groups[0], before)


@pytest.mark.parametrize("clipping", [0.05, pytest.param(0.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_any_optimizer_with_states_per_weight_gives_its_own_bits(optimizer, clipping):
    run = attrs.evolve(WEB, optimizer=optimizer, clipping=clipping, steps=3)
    mine = train(run, streamed=Streaming(window=2), update=DeviceUpdate(masters="split"))
    whole = train_whole(
        run, make_model(run), OTHERS[optimizer], norms=mine["norms"], masters="split"
    )
    assert not unlike(mine, whole)


def test_muon_updates_matrices_on_the_device():
    run = attrs.evolve(WEB, optimizer="Muon", steps=3)
    found = train(run, streamed=Streaming(window=2), update=DeviceUpdate(masters="split"))
    for name, before in make_model(run).named_parameters():
        master = found["contents"][name][1]
        assert master.isfinite().all(), name
        assert not torch.equal(master, before.detach().bfloat16().float().flatten()), name


@pytest.mark.parametrize("optimizer", ["Prodigy", "AdamWScheduleFree", "AdamWBF16States"])
def test_optimizers_that_need_all_weights_are_refused(optimizer):
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", micro_batch_size=2, optimizer=optimizer
    )
    with pytest.raises(OptimizerError, match="all weights"):
        plan.resolve(world_size=1, streamed=True, update="device")


def test_what_cannot_be_updated_on_the_device_is_updated_on_the_host_with_a_reason():
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", micro_batch_size=2
    ).resolve(world_size=1, engine="host", update="device")
    decision = next(each for each in plan.decisions if each.key == "update")
    assert plan.update is None
    assert (decision.after, decision.severity) == ("host", "warning")
    assert "fp32" in decision.reason
    with pytest.raises(InvalidValueError, match="nearest"):
        DeviceUpdate(masters="bf16")
    with pytest.raises(InvalidValueError, match="no place"):
        DeviceUpdate.of("moon")
