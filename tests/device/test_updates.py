"""Updates on the device give the bits of the same optimizer on the whole model."""

from __future__ import annotations

from functools import partial
from itertools import product

import attrs
import pytest
import torch

from tests.backend.host.whole import contents_of, train_whole, unlike
from tests.device import on_device
from tests.device.cases import (
    AHEAD,
    FAMILIES,
    Case,
    differences,
    loss_of,
    make_model,
    run,
    started,
)
from tests.support.sampling import nightly
from zerotune.backend.host.updates import OptimizerOnDevice
from zerotune.backend.optimizers.classes import Lamb
from zerotune.plan.context import DeviceUpdate, Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.memory.estimate import CONTEXT
from zerotune.plan.memory.hosted import KEPT_BY_STREAM
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.training.setup import build_engine

pytestmark = pytest.mark.deepspeed

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=2e-3, weight_decay=0.01),
    "Lamb": partial(Lamb, lr=2e-3, weight_decay=0.01),
}
SPLIT = DeviceUpdate(masters="split")
CASE = Case(
    name="update on the device", streamed=Streaming(window=2), update=SPLIT, optimizer="Adafactor"
)


def trained(case: Case, seed: int, lateness: float):
    torch.simdev.seed_order(seed, lateness, AHEAD)
    losses, norms = [], []
    with started(case) as engine:
        for step in range(case.steps):
            for micro in range(case.accumulation):
                loss = loss_of(case, engine, 100 * step + micro)
                losses.append(loss.detach())
                engine.backward(loss)
                outcome = engine.step()
            norms.append(outcome.grad_norm)
        return {
            "losses": [float(loss) for loss in losses],
            "norms": norms,
            "contents": contents_of(engine),
        }


@pytest.mark.parametrize(
    "changes",
    [
        {"clipping": 0.0, "optimizer": "AdamW", "update": DeviceUpdate(), "family": "flux"},
        {"accumulation": 2, "steps": 2},
        {"streamed": None, "engine": "host", "optimizer": "Lamb", "steps": 3},
        {"family": "skipping", "steps": 5},
        *nightly(
            {},
            {"optimizer": "AdamW"},
            {"clipping": 0.0},
            {"accumulation": 3, "clipping": 0.0, "update": DeviceUpdate()},
            {"lora": True, "optimizer": "AdamW"},
            {"streamed": None, "engine": "host", "clipping": 0.0, "update": DeviceUpdate()},
            {"family": "skipping", "steps": 8, "clipping": 0.0},
        ),
    ],
    ids=str,
)
@on_device()
def test_bits_are_those_of_the_whole_model(changes):
    mine, whole = both(attrs.evolve(CASE, **changes))
    assert not unlike(mine, whole)


def both(case: Case):
    """Train on the device, and the whole model with torch's optimizer at the same norms."""
    mine = trained(case, 1, 0.05)
    whole = train_whole(
        case, make_model(case), OPTIMIZERS[case.optimizer], ranks=case.ranks,
        norms=mine["norms"], device="simdev", masters=case.update.masters, batches=FAMILIES,
    )  # fmt: skip
    return mine, whole


@pytest.mark.parametrize(
    "changes",
    [
        {"clipping": 0.0, "optimizer": "AdamW"},
        *nightly({}, {"streamed": None, "engine": "host"}),
    ],
    ids=str,
)
@on_device(ranks=2)
def test_two_ranks_give_the_bits_of_the_whole_model(changes):
    mine, whole = both(attrs.evolve(CASE, ranks=2, **changes))
    # Each rank has the master weights and states of its weights.
    whole["contents"] = {name: whole["contents"][name] for name in mine["contents"]}
    assert set(unlike(mine, whole)) <= ({"losses"} if torch.distributed.get_rank() else set())


@pytest.mark.parametrize(
    "changes",
    [
        {"clipping": 0.0, "update": DeviceUpdate(masters="stochastic"), "steps": 4},
        *nightly({}, {"optimizer": "AdamW", "clipping": 0.0}),
    ],
    ids=str,
)
@on_device()
def test_a_resumed_run_is_that_without_interruption(changes, tmp_path):
    case = attrs.evolve(CASE, **changes)
    whole = run(case, 0, 1.0, tmp_path)
    assert not differences(whole, run(attrs.evolve(case, middle="resume"), 1, 0.05, tmp_path))


class Square(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return x + self.inner(x)


def squares(model, optimizer, masters, *, clipping):
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", micro_batch_size=1, gradient_clipping=clipping,
        optimizer={"type": optimizer, "params": {"lr": 1e-3}},
    ).with_overrides({"zero_optimization.offload_optimizer.pin_memory": True})  # fmt: skip
    resolved = plan.resolve(
        platform=Platform.synthetic("cuda", vram=8 * 2**30, ram=24 * 2**30),
        model=ModelFacts.from_module(model), world_size=1,
        streamed=Streaming(units=("Square",), window=2), update=DeviceUpdate(masters=masters),
    )  # fmt: skip
    return OptimizerResolver().resolve(resolved)


WAYS = pytest.mark.parametrize(
    ("optimizer", "masters"),
    [
        ("Adafactor", "stochastic"),
        *nightly(
            *(
                way
                for way in product(("AdamW", "Adafactor"), ("fp32", "split", "stochastic"))
                if way != ("Adafactor", "stochastic")
            )
        ),
    ],
)


@WAYS
@on_device()
def test_the_predicted_traffic_of_updates_is_what_their_operators_read_and_write(
    optimizer, masters, monkeypatch
):
    clock, counted = torch.simdev.clock, []
    own = OptimizerOnDevice._run

    def watched(self, *arguments):
        clock.scale(label="update")
        own(self, *arguments)
        clock.scale()

    monkeypatch.setattr(OptimizerOnDevice, "_run", watched)
    model = torch.nn.Sequential(*(Square() for _ in range(3)))
    resolved = squares(model, optimizer, masters, clipping=0.0)
    expected = step_traffic(resolved.estimate(Workload())).on_device
    clock.rates({"memory": 1e12, "half": 1e15, "single": 1e15, "latency": 0.0, "launch": 0.0})
    with build_engine(model=model, plan=resolved) as engine:
        for _ in range(3):
            clock.reset()
            clock.record(True)
            x = torch.ones(1, 1024, device=engine.device, dtype=torch.bfloat16)
            engine.backward(engine(x).float().square().mean())
            engine.step()
            engine.master_weights.settle()
            spans = [s for s in clock.spans() if (s.lane, s.label) == ("compute", "update")]
            counted.append(sum(span.bytes for span in spans))
    assert counted[-1] == pytest.approx(expected, rel=0.05)


@WAYS
@on_device(lateness=0.02)
def test_the_predicted_memory_of_updates_is_the_peak_of_the_device(optimizer, masters):
    simdev, model = torch.simdev, torch.nn.Sequential(*(Square() for _ in range(3)))
    before = simdev.memory_allocated()
    resolved = squares(model, optimizer, masters, clipping=1.0)
    items = resolved.estimate(Workload()).items
    there = [i for i in items if i.place == "device" and "optimizer step" in i.phases]
    # Free memory is not counted as allocated.
    expected = sum(i.nbytes for i in there if i.note != KEPT_BY_STREAM) - CONTEXT
    with build_engine(model=model, plan=resolved) as engine:
        for _ in range(3):
            x = torch.ones(1, 1024, device=engine.device, dtype=torch.bfloat16)
            engine.backward(engine(x).float().square().mean())
            engine.step()
            del x
            simdev.synchronize()
            simdev.reset_peak_memory_stats()
            engine.master_weights.settle()
            simdev.synchronize()
        peak = simdev.max_memory_allocated() - before
    assert peak == pytest.approx(expected, rel=0.05)
    assert [i.nbytes for i in there if i.note == KEPT_BY_STREAM] == [
        i.nbytes for i in there if i.note.startswith("of the update of a weight")
    ]
