"""Why DeepSpeed's own Muon is not used: its defects, and that ours does not have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv_in = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.hidden = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(torch.relu(self.conv_in(x)))).mean((2, 3)))


def upstream(stage: int) -> dict[str, Any]:
    """DeepSpeed's Muon as its configuration asks for it, with the tags we set before."""
    import os

    import deepspeed

    from zerotune.backend.distributed import ProcessGroup

    os.environ["LOCAL_RANK"] = "0"
    group = ProcessGroup(backend="gloo")
    model = Net()
    for parameter in model.parameters():
        parameter.use_muon = False
    model.hidden.weight.use_muon = True
    try:
        deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_batch_size": 1,
                "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
                "zero_optimization": {"stage": stage},
            },
            dist_init_required=False,
        )
        error = ""
    except Exception as caught:  # noqa: BLE001 - whatever it raises is the finding
        error = str(caught)
    finally:
        tags = {name: p.use_muon for name, p in model.named_parameters()}
        group.close()
    return {"error": error, "tags": tags}


def test_deepspeed_overwrites_the_tags_it_asks_for() -> None:
    pytest.importorskip("deepspeed.runtime.zero.muon")
    (found,) = run_ranks(upstream, 1)
    # The first and the last layer were tagged false before.
    assert found["tags"]["conv_in.weight"] is True
    assert found["tags"]["out.weight"] is True


def test_deepspeed_refuses_stage_3_as_it_is_configured_by_default() -> None:
    (found,) = run_ranks(upstream, 3)
    assert "Muon and reduce scatter cannot be used together" in found["error"]


def ours(stage: int) -> list[str]:
    from zerotune.backend.building import build_engine
    from zerotune.optim import OptimizerResolver
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.facts import ModelFacts

    model = Net()
    plan = DeepSpeedPlan.build(
        stage=stage,
        precision="fp32",
        optimizer={"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}},
    ).resolve(model=ModelFacts.from_module(model))
    with build_engine(model=model, plan=OptimizerResolver().apply(plan)) as engine:
        engine.backward(engine(torch.ones(1, 1, 5, 5)).pow(2).sum())
        engine.step()
        return [
            fragment.address.name
            for fragment in engine.master_weights.read()
            if fragment.step is None
        ]


def test_ours_updates_the_hidden_convolution_alone_at_stage_3() -> None:
    (without_adams_counter,) = run_ranks(ours, 3)
    assert without_adams_counter == ["hidden.weight"]


def one_bit() -> dict[str, str]:
    import os

    import deepspeed

    from zerotune.backend.distributed import ProcessGroup

    os.environ["LOCAL_RANK"] = "0"
    group = ProcessGroup(backend="gloo")
    found = {}
    for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam"):
        model = torch.nn.Linear(2, 2)
        try:
            deepspeed.initialize(
                model=model,
                model_parameters=list(model.parameters()),
                config={"train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": 1e-3}}},
                dist_init_required=False,
            )
            found[name] = ""
        except Exception as caught:  # noqa: BLE001 - whatever it raises is the finding
            found[name] = f"{type(caught).__name__}: {caught}"
    group.close()
    return found


def test_one_bit_names_are_gone_or_need_cuda() -> None:
    import deepspeed
    from packaging.version import Version

    if Version(deepspeed.__version__).release >= (0, 19):
        pytest.skip(f"DeepSpeed {deepspeed.__version__} has removed them; 0.18.x has them")
    (found,) = run_ranks(one_bit)
    # Known names, whose communication asks for cupy before anything is trained.
    assert all("cupy" in error for error in found.values()), found
