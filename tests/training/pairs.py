"""Two trained models in one run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.models import HostileNet
from tests.support.runs import Case, start
from zerotune.backend.trained_parts import frozen

WHOLE = ("stage3_param_persistence_threshold", 0)
STAGE_3 = Case(stage=3, overrides=(WHOLE,))
PAIRS = (
    (Case(deepspeed=False), Case(deepspeed=False, accumulation=2)),
    (Case(stage=0), Case(stage=2, offload="cpu", accumulation=2)),
    (STAGE_3, Case(stage=3, offload="cpu", overrides=(WHOLE,))),
)


def micro_batch(engine: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(100 * number + engine.group.rank)
    x = torch.randn(4, 7, 7, generator=generator).to(engine.device, engine.dtype)
    loss = (engine(x).float() - 0.5).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def alone(case: Case, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(case, HostileNet(seed, scalar=False))
    losses = [micro_batch(engine, number) for number in range(6)]
    found = weights(engine)
    engine.close()
    return losses, found


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: full.clone() for name, full in engine.master_weights.gather()}


def together(pair: tuple[Case, Case]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Run micro batches on both in turn; the first engine ends before the other's last two."""
    engines = [start(case, HostileNet(seed, scalar=False)) for seed, case in enumerate(pair)]
    for case, engine in zip(pair, engines, strict=True):
        sizes = {parameter.numel() for parameter in engine.module.parameters()}
        assert (sizes == {0}) == (case.stage == 3)
    losses: list[list[float]] = [[], []]
    for number in range(4):
        # Run both forward passes before either step, as when one model is the other's loss.
        for each, engine in zip(losses, engines, strict=True):
            each.append(micro_batch(engine, number))
    losses[0] += [micro_batch(engines[0], number) for number in (4, 5)]
    first = weights(engines[0])
    engines[0].close()
    if pair[0].deepspeed:
        assert os.environ["LOCAL_RANK"] == os.environ.get("RANK", "0")
    losses[1] += [micro_batch(engines[1], number) for number in (4, 5)]
    second = weights(engines[1])
    engines[1].close()
    return [(losses[0], first), (losses[1], second)]


RIVALS = (
    (Case(deepspeed=False), Case(deepspeed=False)),
    (Case(stage=0), Case(stage=2, offload="cpu")),
    (Case(stage=2), STAGE_3),
    (STAGE_3, STAGE_3),
)


def adversaries(rivals: Sequence[tuple[Case, Case]]) -> list[list[float]]:
    """Train a generator through a judge, and the judge, for each pair; return the losses."""
    found = []
    for cases in rivals:
        maker, judge = (start(case, HostileNet(n, scalar=False)) for n, case in enumerate(cases))
        losses = []
        for number in range(4):
            generator = torch.Generator().manual_seed(10 * number + maker.group.rank)
            x = torch.randn(4, 7, 7, generator=generator).to(maker.device)
            made = maker(x)
            verdict = (judge(made.detach()) - 1).pow(2).mean() + judge(x).pow(2).mean()
            judge.backward(verdict)
            judge.step()
            with frozen(judge) as through:
                loss = through(made).pow(2).mean()
                maker.backward(loss)
            maker.step()
            losses += [float(verdict.detach()), float(loss.detach())]
        maker.close()
        judge.close()
        found.append(losses)
    return found
