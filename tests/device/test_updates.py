"""Updates on the device give the bits of the same optimizer on the whole model."""

from __future__ import annotations

from functools import partial

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
from zerotune.backend.optimizers.classes import Lamb
from zerotune.plan.context import DeviceUpdate, Streaming

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
        {},
        {"optimizer": "AdamW"},
        {"clipping": 0.0},
        {"clipping": 0.0, "optimizer": "AdamW", "update": DeviceUpdate(), "family": "flux"},
        {"accumulation": 3},
        {"accumulation": 3, "clipping": 0.0, "update": DeviceUpdate()},
        {"lora": True, "optimizer": "AdamW"},
        {"streamed": None, "engine": "host", "optimizer": "Lamb"},
        {"streamed": None, "engine": "host", "clipping": 0.0, "update": DeviceUpdate()},
        {"family": "skipping", "steps": 8},
        {"family": "skipping", "steps": 8, "clipping": 0.0},
    ],
    ids=str,
)
@on_device()
def test_bits_are_those_of_the_whole_model(changes):
    import attrs

    case = attrs.evolve(CASE, **changes)
    mine = trained(case, 1, 0.05)
    whole = train_whole(
        case, make_model(case), OPTIMIZERS[case.optimizer],
        norms=mine["norms"], device="simdev", masters=case.update.masters, batches=FAMILIES,
    )  # fmt: skip
    assert not unlike(mine, whole)


@pytest.mark.parametrize(
    "changes",
    [{}, {"clipping": 0.0, "optimizer": "AdamW"}, {"streamed": None, "engine": "host"}],
    ids=str,
)
@on_device(ranks=2)
def test_two_ranks_give_the_bits_of_the_whole_model(changes):
    case = attrs.evolve(CASE, ranks=2, **changes)
    mine = trained(case, 1, 0.05)
    whole = train_whole(
        case, make_model(case), OPTIMIZERS[case.optimizer], ranks=2,
        norms=mine["norms"], device="simdev", masters=case.update.masters, batches=FAMILIES,
    )  # fmt: skip
    # Each rank has the master weights and states of its weights.
    whole["contents"] = {name: whole["contents"][name] for name in mine["contents"]}
    assert set(unlike(mine, whole)) <= ({"losses"} if torch.distributed.get_rank() else set())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "AdamW", "clipping": 0.0},
        {"clipping": 0.0, "update": DeviceUpdate(masters="stochastic")},
    ],
    ids=str,
)
@on_device()
def test_a_resumed_run_is_that_without_interruption(changes, tmp_path):
    case = attrs.evolve(CASE, **changes)
    whole = run(case, 0, 1.0, tmp_path)
    assert not differences(whole, run(attrs.evolve(case, middle="resume"), 1, 0.05, tmp_path))
