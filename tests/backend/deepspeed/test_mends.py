"""Each mend of DeepSpeed works, and is left out if the mended method has changed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, digest, start
from zerotune.backend.deepspeed import mends

pytestmark = pytest.mark.deepspeed


@ranks(1)
def test_the_mended_methods_of_the_installed_release_are_those_that_were_tested():
    found = {name: mends.digest_of(name) for name in mends.TESTED}
    assert found == mends.TESTED, "read the changed methods, and run this folder's tests"
    assert len(set(found.values())) == len(found), "its own source each"
    assert mends.TESTED.keys() == {*mends.SWAPPED, *mends.HOOKS}


@pytest.mark.parametrize("part", [mends.SWAPPED, mends.HOOKS], ids=["swapped", "hooks"])
def test_a_method_whose_source_is_unknown_is_not_mended(part, monkeypatch):
    assert mends.changed(part) is None
    monkeypatch.setattr(mends, "TESTED", {**mends.TESTED, part[-1]: "another"})
    method = part[-1].rpartition(".")[2]
    assert mends.changed(part) == f"DeepSpeed's {method} differs from every tested release"
    monkeypatch.setattr(mends, "digest_of", lambda _: None)
    assert "cannot be read" in (mends.changed(part) or "")


@ranks(1)
def test_a_decision_says_where_weights_stay_gathered(monkeypatch):
    from zerotune.backend.deepspeed import sharded

    monkeypatch.setattr(sharded, "changed", lambda _: "DeepSpeed's hook differs")
    with start(Case(stage=3), Two()) as engine:
        (said,) = [d for d in engine.decisions if d.key == sharded.GATHERED_KEY]
        assert said.severity == "warning"
        assert said.before == said.after
        assert "DeepSpeed's hook differs" in said.reason


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def forward(self, x_b8: torch.Tensor, both: bool) -> torch.Tensor:
        return self.left(x_b8) + self.right(x_b8) if both else self.left(x_b8)


@ranks(1)
def test_a_parameter_without_a_gradient_is_not_stepped_with_an_earlier_one():
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    case = Case(stage=2, offload="cpu", micro_batch=2, clipping=0.0, optimizer=optimizer)
    engine, seen = start(attrs.evolve(case, engine="deepspeed"), Two()), []
    for both in (True, False):
        engine.backward(engine(torch.ones(2, 8), both).square().sum())
        engine.step()
        (right,) = (
            fragment.states["exp_avg"].clone()
            for fragment in engine.master_weights.read()
            if fragment.address.name == "right.weight"
        )
        seen.append(right)
    engine.close()
    # DeepSpeed takes zeros.
    assert torch.allclose(seen[1], 0.9 * seen[0], rtol=1e-6)


def swapping(folder: str | None, pipelined: bool) -> dict[str, Any]:
    """Train at stage 3 with sub-groups on NVMe, editing one of them between steps."""
    from zerotune.ema import EMAShadow
    from zerotune.plan.facts import ModelFacts
    from zerotune.plan.optimizer.resolver import OptimizerResolver
    from zerotune.plan.plan import DeepSpeedPlan
    from zerotune.training.setup import build_engine

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(601, 601) for _ in range(4)))
    place: dict[str, Any] = {"device": "cpu"}
    if folder is not None:
        place = {"device": "nvme", "nvme_path": folder}
        place |= {"pipeline_read": pipelined, "pipeline_write": pipelined}
    plan = DeepSpeedPlan.from_dict({
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 360_000, "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
        },
    })  # fmt: skip
    resolved = plan.resolve(model=ModelFacts.from_module(model), world_size=1, engine="deepspeed")
    engine = build_engine(model=model, plan=OptimizerResolver().resolve(resolved))
    wrapper, losses, seen = engine.deepspeed_engine.optimizer, [], []
    ema = EMAShadow(decay=0.9).attach(engine)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 601, generator=generator).to(engine.dtype)
        loss = engine(x).float().square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
        ema.step()
        with engine.master_weights.editing() as fragments:
            next(fragments).value.mul_(1.5)
        if folder is not None and pipelined:
            seen.append(dict(wrapper.optimizer_swapper.swap_ops))
    kept = {
        "losses": losses,
        "master": digest(engine),
        "ema": [float(value.double().sum()) for value in ema.state_dict().values()],
    }
    swapped = [wrapper._swappable_optimizer_subgroup(each) for each in range(4)]
    engine.close()
    return {**kept, "swapped": swapped, "seen": seen}


@pytest.mark.nvme
def test_reading_ahead_and_writing_behind_on_nvme_changes_no_bit(tmp_path):
    (host,) = run_ranks(swapping, None, False)
    (in_turn,) = run_ranks(swapping, str(tmp_path / "in turn"), False)
    (beside,) = run_ranks(swapping, str(tmp_path / "beside"), True)
    assert in_turn["swapped"] == beside["swapped"] == [True] * 4
    for name in ("losses", "master", "ema"):
        assert host[name] == in_turn[name] == beside[name], name
    assert len(beside["seen"]) == 4
    under_way = [name for each in beside["seen"] for name, op in each.items() if op is not None]
    assert not under_way, "who edits a sub-group leaves it written"
