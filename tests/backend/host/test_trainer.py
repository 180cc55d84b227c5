"""Steps that begin in the backward pass, in a trainer: EMAs and non-finite values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backend.host.streaming import Web, contents
from tests.support.ranks import ranks
from zerotune import EMAShadow, Trainer
from zerotune.checkpoint import latest_checkpoint, save_checkpoint
from zerotune.errors import EngineError, TrainingError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.training import RollBackNonFinite, SaveEvery, SkipNonFinite
from zerotune.training.step import RaiseNonFinite

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

STEPS, BAD = 8, 5
PLAN = DeepSpeedPlan.build(
    stage=2, offload="cpu", precision="bf16", micro_batch_size=4, gradient_clipping=0.0,
    gradient_accumulation_steps=2, optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
)  # fmt: skip


class Objective:
    """Losses of a ``Web``; the gradient of one of them is not finite."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, engine: Any, batch: Any, _generator: Any) -> torch.Tensor:
        self.calls += 1
        hook = None
        if self.calls == 2 * BAD:
            hook = engine.module.inp.register_forward_hook(spoiling(engine))
        out = engine(batch["x"].to(engine.dtype)).float()
        if hook is not None:
            hook.remove()
        return (out - 0.5).square().mean()


def spoiling(engine: Any) -> Any:
    """Make the last gradient NaN after all blocks have been stepped."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        engine._steps.passes.settle()
        return gradient * float("nan")

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(spoil)

    return hook


def trainer(tmp_path: Path, policy: Any) -> Trainer:
    torch.manual_seed(0)
    model, chance = Web(), torch.Generator().manual_seed(3)
    batches = [{"x": torch.randn(4, 8, generator=chance)} for _ in range(2 * STEPS + 8)]
    return Trainer(
        model=model,
        plan=PLAN.resolve(model=ModelFacts.from_module(model), streamed=True),
        data=batches,
        objective=Objective(),
        ema=EMAShadow(decay=0.9),
        non_finite=policy,
        callbacks=[SaveEvery(steps=2, root=tmp_path)],
    )


def left(run: Trainer) -> dict[str, list[torch.Tensor]]:
    return contents(run.engine, run.emas.shadows["ema"])


def same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        len(one[n]) == len(other[n]) and all(map(torch.equal, one[n], other[n])) for n in one
    )


@pytest.mark.parametrize("policy", [RaiseNonFinite, SkipNonFinite])
def test_a_late_non_finite_gradient_stops_the_run_and_is_never_saved(tmp_path, policy):
    with trainer(tmp_path, policy()) as run:
        with pytest.raises(TrainingError, match="weights already contain"):
            run.fit(steps=STEPS)
        assert run.step == BAD
        assert latest_checkpoint(tmp_path).name.endswith(f"{BAD - 1}")
        with pytest.raises(EngineError, match="only some weights have been updated"):
            save_checkpoint(tmp_path / "spoiled", engine=run.engine)
        with pytest.raises(EngineError, match="only some weights have been updated"):
            run.fit(steps=STEPS)


def test_a_late_non_finite_gradient_rolls_back_to_the_last_checkpoint(tmp_path):
    with trainer(tmp_path, RollBackNonFinite(root=tmp_path)) as run:
        run.fit(steps=BAD - 1)
        good = left(run)
        taken: list[Any] = []
        resume = run.roll_back
        run.roll_back = lambda *a, **k: (resume(*a, **k), taken.append(left(run)))  # type: ignore[method-assign]
        run.fit(steps=STEPS)
        assert run.step == STEPS
        assert len(taken) == 1
        assert same(taken[0], good)
        assert not same(left(run), good)
