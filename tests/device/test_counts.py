"""What a step makes the host wait for, and how many bytes it copies."""

from __future__ import annotations

import attrs
import pytest
import torch

from tests.device import on_device
from tests.device.cases import Case, loss_of, started
from zerotune.ema import DeviceStore, EMAShadow
from zerotune.ema.stores import HostStore
from zerotune.plan.context import Streaming
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.traffic import step_traffic

pytestmark = pytest.mark.deepspeed

_UNITS = Streaming(units=("ChainBlock",), window=2)
STREAMED = Case(name="streamed, clipped", family="chain", streamed=_UNITS)
ZERO_2 = Case(name="ZeRO-2", family="chain")
RESIDENT = Case(name="host engine", family="chain", engine="host")


def settle(engine):
    """Wait for updates, and for copies that have been requested."""
    engine.master_weights.settle()
    for unit in getattr(engine, "_units", ()):
        if unit.loading is not None:
            unit.loading.finish()
    torch.simdev.synchronize()


def steps(case, count=4):
    """Train; return the last step's engine traffic and the host's waits, phase by phase."""
    simdev = torch.simdev
    waits = {}

    def phase(name, call):
        before = simdev.host_waits()
        result = call()
        found = {k: n - before.get(k, 0) for k, n in simdev.host_waits().items()}
        waits.setdefault(name, {}).update({k: n for k, n in found.items() if n})
        return result

    with started(case) as engine:
        for step in range(count):
            settle(engine)
            simdev.reset_counts()
            waits.clear()
            for micro in range(case.accumulation):
                loss = phase("forward", lambda seed=10 * step + micro: loss_of(case, engine, seed))
                phase("backward", lambda loss=loss: engine.backward(loss))
                phase("step", engine.step)
        settle(engine)
        counts = simdev.counts()
        estimate = engine.plan.estimate(Workload(batch=2, gradient_checkpointing=False))
    return waits, counts, step_traffic(estimate)


def evolved(case, name, **changes):
    return attrs.evolve(case, name=name, **changes)


WAITS = {
    # The norm needs all gradients of the 7 units; before that the host waits only in order not to
    # run too far ahead of their copies. A sample of the weights is compared with the masters.
    STREAMED: {
        "forward": {},
        "backward": {"synchronize_event": 7},
        "step": {"synchronize_event": 7, "blocking_download": 1},
    },
    evolved(STREAMED, "streamed, not clipped", clipping=0.0): {
        "forward": {},
        "backward": {"synchronize_event": 7, "blocking_download": 1},
        "step": {"synchronize_event": 7},
    },
    # A unit that stays on the device is uploaded as soon as it is updated.
    RESIDENT: {
        "forward": {},
        "backward": {"synchronize_event": 7},
        "step": {"synchronize_event": 7, "blocking_download": 1},
    },
    # The same engine with units in fp32.
    evolved(ZERO_2, "plain", deepspeed=False, stage=0): {
        "forward": {},
        "backward": {"synchronize_event": 7},
        "step": {"synchronize_event": 7, "blocking_download": 1},
    },
    # The norm alone decides whether the step is applied.
    evolved(ZERO_2, "plain, no offload", deepspeed=False, stage=0, offload="none"): {
        "forward": {}, "backward": {}, "step": {"item": 1},
    },
}  # fmt: skip
BY_NAME = {case.name: case for case in WAITS}
SAMPLE = (STREAMED.name, RESIDENT.name)


def check(name):
    """Check waits by phase and cause, and bytes by direction."""
    case = BY_NAME[name]
    waits, counts, traffic = steps(case)
    assert waits == WAITS[case]
    assert counts.get("download_bytes", 0) == pytest.approx(traffic.gradients, rel=0.01)
    uploaded = traffic.returned + traffic.parameters + traffic.weights
    if case.offload_param == "cpu":
        # Weights that fit stage3_max_live_parameters stay on the device between the passes.
        assert counts["upload_bytes"] < uploaded
    else:
        assert counts.get("upload_bytes", 0) == pytest.approx(uploaded, rel=0.01, abs=2048)


@pytest.mark.parametrize("name", SAMPLE)
@on_device()
def test_a_step_waits_and_copies_as_predicted(name):
    check(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in SAMPLE])
@on_device()
def test_every_engine_waits_and_copies_as_predicted(name):
    check(name)


def an_update(store, place):
    """Update an EMA; return the host's waits, how many tensors are averaged, and traffic."""
    with started(BY_NAME["plain, no offload"]) as engine:
        ema = EMAShadow(decay=0.9, store=store).attach(engine)
        for step in range(5):
            engine.backward(loss_of(BY_NAME["plain, no offload"], engine, step))
            engine.step()
            torch.simdev.synchronize()
            torch.simdev.reset_counts()
            ema.step()
        waits = {cause: n for cause, n in torch.simdev.host_waits().items() if n}
        work = Workload(batch=2, gradient_checkpointing=False, ema=place)
        expected = step_traffic(engine.plan.estimate(work)).ema_from_device
        assert torch.simdev.counts().get("download_bytes", 0) == pytest.approx(expected, rel=0.01)
        return waits, len(engine.master_weights.addresses)


@on_device()
def test_an_ema_in_host_memory_of_weights_on_the_device_waits_for_each_of_them():
    waits, count = an_update(HostStore(), "host")
    assert waits == {"blocking_download": count}


@on_device()
def test_an_ema_on_the_device_waits_for_nothing():
    waits, _ = an_update(DeviceStore(), "device")
    assert not waits
