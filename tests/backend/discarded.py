"""Runs in which ranks drop an accumulation window."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models import HostileNet, WideNet
from tests.support.runs import Case, start

WHOLE = ("stage3_param_persistence_threshold", 0)
STAGE_3 = (WHOLE, ("sub_group_size", 300_000))
CASES = (
    Case(deepspeed=False, accumulation=2),
    Case(stage=0, accumulation=2, precision="bf16"),
    Case(stage=1, accumulation=2),
    Case(stage=2, accumulation=2, offload="cpu"),
    Case(stage=3, accumulation=2, offload="cpu", precision="bf16", overrides=STAGE_3),
)


class Branching(torch.nn.Module):
    """A module with a part that is only used on request."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.sometimes = torch.nn.Linear(7, 7)

    def forward(self, x_b77: torch.Tensor, *, whole: bool) -> torch.Tensor:
        output = self.inner(x_b77)
        return output + self.sometimes(x_b77) if whole else output


def window(engine: Any, number: int, *, bad: bool = False) -> Any:
    """Run one accumulation window; a bad one is NaN in its first micro batch, on the last rank."""
    count = engine.plan.gradient_accumulation_steps
    last = engine.group.rank == engine.group.world_size - 1
    for index in range(count):
        generator = torch.Generator().manual_seed(100 * number + 10 * index + engine.group.rank)
        x = torch.randn(4, 7, 7, generator=generator).to(engine.device, engine.dtype)
        # Good windows leave ``sometimes`` without a gradient, so leftovers are not overwritten.
        output = engine(x, whole=bad or not engine.plan.uses_deepspeed)
        loss = (output.float() - 0.5).pow(2).mean()
        engine.backward(loss * float("nan") if bad and last and index == 0 else loss)
        if bad and index == count - 1:
            engine.discard()
            return None
        outcome = engine.step()
    return outcome


def everything(engine: Any) -> dict[str, Any]:
    """Copy this rank's weights, states and counters."""
    found: dict[str, Any] = {
        "lr": engine.lr,
        "applied": engine.state.global_step - engine.state.skipped_steps,
        "scaler": engine.state.loss_scaler,
        "scheduler": {k: v for k, v in engine.state.scheduler.items() if "step" not in k},
    }
    for fragment in engine.master_weights.read():
        found[fragment.address.key] = fragment.value.clone()
        found[f"{fragment.address.key} step"] = fragment.step
        for name, state in fragment.states.items():
            found[f"{fragment.address.key} {name}"] = state.clone()
    return found


def trained(case: Case, *, bad_at: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    inner = WideNet() if case.offload == "nvme" else HostileNet(scalar=False)
    engine = start(case, Branching(inner))
    if case.stage == 3:
        assert all(parameter.numel() == 0 for parameter in engine.module.parameters())
    for number in range(4):
        if number == bad_at:
            window(engine, 99, bad=True)
        outcome = window(engine, number)
        assert outcome.applied
        assert outcome.boundary
    state = engine.state
    found = everything(engine)
    engine.close()
    return found, {
        "steps": state.global_step,
        "skipped": state.skipped_steps,
        "micro": state.micro_step,
    }


def poisoned(case: Case) -> dict[str, Any]:
    """Report what a NaN gradient on the last rank does to a step."""
    engine = start(case, HostileNet(scalar=False))

    def take(number: int, factor: float) -> Any:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 7, 7, generator=generator).to(engine.device, engine.dtype)
        loss = (engine(x).float() - 0.5).pow(2).mean()
        # The loss stays finite but its gradient does not: sqrt has an infinite derivative at 0.
        last = engine.group.rank == engine.group.world_size - 1
        spoiled = (loss - loss.detach()).abs().sqrt() * 1e30 if factor and last else 0.0
        engine.backward(loss + spoiled)
        return engine.step()

    take(1, 0.0)
    before = everything(engine)
    outcome = take(2, 1.0)
    unlike = [key for key in _unlike(before, everything(engine)) if key != "applied"]
    good = take(3, 0.0)
    found = {
        "unlike": unlike,
        "applied": (outcome.applied, good.applied),
        "finite": all(bool(f.value.isfinite().all()) for f in engine.master_weights.read()),
        "skipped": (engine.state.global_step, engine.state.skipped_steps),
        "norm": good.grad_norm,
        "bad norm": outcome.grad_norm,
    }
    engine.close()
    return found


def left_open(case: Case) -> list[str]:
    """List what differs after a NaN loss was back-propagated without a step."""
    found = []
    for bad in (False, True):
        torch.manual_seed(0)
        engine = start(case, Branching(HostileNet(scalar=False)))
        window(engine, 0)
        if bad:
            x = torch.randn(4, 7, 7).to(engine.device, engine.dtype)
            engine.backward(engine(x, whole=True).float().sum() * float("nan"))
            # Loading a checkpoint ends with this call.
            engine.load_state(engine.state)
        assert window(engine, 1).applied
        found.append(everything(engine))
        engine.close()
    return _unlike(*found)


def differences(cases: tuple[Case, ...]) -> list[tuple[str, list[str], dict[str, Any]]]:
    """For each plan, list the differences between runs with and without a dropped window."""
    found = []
    for case in cases:
        expected, _ = trained(case, bad_at=None)
        dropped, counters = trained(case, bad_at=2)
        assert len(expected) > 10
        found.append((str(case), _unlike(expected, dropped), counters))
    return found


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (
            torch.equal(value, other[key])
            if isinstance(value, torch.Tensor)
            else value == other[key]
        )
    ]
