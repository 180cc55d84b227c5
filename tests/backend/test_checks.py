"""A model's dtypes are trained as they are, cast by the engine, or refused before the start."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any

import pytest
import torch

from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, build, start
from tests.support.sampling import sampled
from zerotune.backend.roll_call import LOOK_S
from zerotune.errors import CollectiveError, EngineError
from zerotune.plan.plan import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed


def begin(dtype: torch.dtype, stage: int | None, precision: str, engine: Any = None) -> Any:
    torch.manual_seed(0)
    plan = DeepSpeedPlan.build(
        stage=stage or 0,
        offload="cpu" if engine == "host" else "none",
        precision=precision,
        micro_batch_size=2,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
    )
    model = torch.nn.Linear(4, 4).to(dtype)
    return build(model, plan, deepspeed=stage is not None, engine=engine)


@pytest.mark.parametrize(
    ("dtype", "stage", "precision"),
    [
        (torch.float64, None, "fp32"),
        (torch.float64, 3, "bf16"),
        (torch.complex64, 2, "bf16"),
    ],
)
@ranks(1)
def test_weights_that_no_engine_casts_are_refused(
    dtype: torch.dtype, stage: int | None, precision: str
) -> None:
    with pytest.raises(EngineError, match=rf"model\.weight = {dtype}.*fp32 master weights"):
        begin(dtype, stage, precision)


@pytest.mark.parametrize("engine", ["deepspeed", "host"])
@ranks(1)
def test_float64_weights_train_where_the_engine_casts_them(engine: str) -> None:
    weights = []
    for dtype in (torch.float32, torch.float64):
        with begin(dtype, 2, "bf16", engine) as running:
            loss = running(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
            running.backward(loss)
            running.step()
            weights.append({name: full.clone() for name, full in running.master_weights.gather()})
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1])
@ranks(1)
def test_a_permuted_weight_is_trained_in_its_own_order_or_refused(stage: int) -> None:
    class Permuted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            stored = torch.randn(4, 8, 8, generator=generator).permute(1, 0, 2)
            self.weight = torch.nn.Parameter(stored)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.tanh().sum((0, 1))

    plan = DeepSpeedPlan.build(
        stage=stage, precision="fp32", micro_batch_size=2, gradient_clipping=0,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    )  # fmt: skip
    if stage == 0:
        with pytest.raises(EngineError, match=r"model\.weight = \(8, 64, 1\).*strided"):
            build(Permuted(), plan)
        return
    reference, x = Permuted(), torch.randn(2, 8)
    ordinary = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0)
    with build(Permuted(), plan) as engine:
        for _ in range(2):
            ordinary.zero_grad()
            reference(x).square().mean().backward()
            ordinary.step()
            engine.backward(engine(x).square().mean())
            engine.step()
        ((_, mine),) = engine.master_weights.gather()
    torch.testing.assert_close(mine, reference.weight.detach(), rtol=0, atol=1e-6)


def _buffers(case: Case) -> tuple[list[float], int]:
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.BatchNorm1d(4)
    model.register_buffer("drawn", torch.randn(4), persistent=False)
    with start(case, model) as engine:
        said = [each for each in engine.decisions if each.key == "model.buffers"]
        return model.drawn.tolist(), len(said)


@pytest.mark.parametrize(
    "case", [Case(stage=3), Case(stage=2, offload="cpu", engine="host")], ids=str
)
def test_buffers_that_ranks_drew_differently_become_rank_0s(case: Case) -> None:
    torch.manual_seed(0)
    drawn = torch.randn(4).tolist()
    assert run_ranks(_buffers, case, world_size=2) == [(drawn, 1), (drawn, 1)]


class Turned(torch.nn.Module):
    """Calls its modules in another order, or fewer of them, on rank 1."""

    def __init__(self, called: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called = called if os.environ["RANK"] == "1" else "abc"
        self.parts = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.called:
            x = self.parts[name](x).tanh()
        return x


def one_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()


@pytest.mark.parametrize(
    ("stage", "called", "late"),
    sampled(
        itertools.product((1, 2, 3), ("cab", "ac", "ab", "abcc"), (False, True)),
        [(1, "cab", True), (1, "ac", False), (2, "cab", True), (2, "ab", False), (3, "abcc", True)],
    ),
)
@ranks(2)
def test_ranks_that_call_other_modules_train_alike_or_are_refused(
    stage: int, called: str, late: bool
) -> None:
    model = Turned("abc" if late else called)
    # The group's timeout is longer than this test may take.
    with start(Case(stage=stage), model) as engine:
        if late:
            one_step(engine)
            model.called = called if os.environ["RANK"] == "1" else "abc"
        if (stage, called) in ((1, "cab"), (1, "abcc"), (2, "abcc")):
            one_step(engine)
            return
        wanted = r"order .*rank 0: '[^']*', rank 1: '[^']*'.*same order on every rank"
        with pytest.raises(CollectiveError, match=wanted):
            one_step(engine)


class Failing(Turned):
    """Raises an error at the end of its forward pass."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails:
            raise ValueError("not finite")
        return x


@ranks(2, timeout_s=120)
def test_ranks_may_skip_a_batch_that_failed_on_one_of_them() -> None:
    model = Failing("abc")
    with start(Case(stage=3), model) as engine:
        model.fails = os.environ["RANK"] == "1"
        with pytest.raises(ValueError, match="finite") if model.fails else contextlib.nullcontext():
            engine(torch.ones(4, 8))
        model.fails = False
        one_step(engine)
        one_step(engine)


class Slow(Turned):
    """Waits on rank 1 after each of its modules, longer than ranks look at each other."""

    pause_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x).tanh()
            time.sleep(self.pause_s if os.environ["RANK"] == "1" else 0)
        return x


@ranks(2, timeout_s=200)
def test_ranks_of_stage_3_wait_for_a_slow_one() -> None:
    model = Slow("abc")
    with start(Case(stage=3), model) as engine:
        one_step(engine)
        model.pause_s = 3 * LOOK_S
        for _ in range(2):
            loss = engine(torch.ones(4, 8)).square().mean()
            time.sleep(model.pause_s * (os.environ["RANK"] == "0"))
            engine.backward(loss)
            engine.step()
            time.sleep(model.pause_s * (os.environ["RANK"] == "1"))
