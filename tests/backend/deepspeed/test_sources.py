"""DeepSpeed keeps each method that differs from the tested releases, and a decision says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.backend.step.test_hidden_step import Web, begin, loss_of
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import build

pytestmark = pytest.mark.deepspeed


@ranks(1)
def test_the_digests_of_the_installed_release_are_on_file():
    from tools.deepspeed_sources import FILE
    from zerotune.backend.deepspeed.start import digests
    from zerotune.backend.upstream import require_deepspeed

    version = require_deepspeed(accelerator="cpu").__version__
    digests_seen = digests()
    file = json.loads(FILE.read_text(encoding="utf-8"))
    for name, digest in digests_seen.items():
        assert digest is not None, name
        releases = file.get(name, {}).get(digest, [])
        assert version in releases, f"read {name}, then python -m tools.deepspeed_sources"
    assert file.keys() == digests_seen.keys(), "nothing that is no longer replaced"
    assert len(set(digests_seen.values())) == len(digests_seen), "its own source each"


@pytest.mark.parametrize("stage", [2, 3])
@ranks(1)
def test_a_later_deepspeed_release_keeps_its_own_step(stage):
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    kind = {
        2: stage_1_and_2.DeepSpeedZeroOptimizer, 3: stage3.DeepSpeedZeroOptimizer_Stage3,
    }[stage]  # fmt: skip
    original, calls = kind.step, []

    def step(self: Any, closure: Any = None) -> Any:
        calls.append("more")
        return original(self, closure)

    kind.step = step
    engine = begin(stage, Web(), hidden=True)
    engine.backward(loss_of(engine, 0))
    engine.step()
    decided = {d.key: (d.after, d.reason) for d in engine.decisions}
    engine.close()
    assert calls == ["more"]
    after, reason = decided["optimizer.step"]
    assert after == "DeepSpeed's"
    assert "step differs from every tested release" in reason


def timers(host_step: bool) -> list[str]:
    from zerotune.plan.model import DeepSpeedPlan

    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    plan = DeepSpeedPlan.from_dict({
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "wall_clock_breakdown": True,
    })  # fmt: skip
    engine = build(model, plan, hidden=False, host_step=host_step)
    engine.backward(engine(torch.randn(2, 8, dtype=engine.dtype)).float().square().mean())
    engine.step()
    found = sorted(
        name
        for name in engine.deepspeed_engine.optimizer.timers.get_timers()
        if "optimizer" in name
    )
    engine.close()
    return found


def test_the_wall_clock_breakdown_includes_the_optimizer_timers():
    assert run_ranks(timers, True) == run_ranks(timers, False)
    assert run_ranks(timers, True) != [[]]
