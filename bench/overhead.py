"""Overhead of the ``Trainer`` over hand-written loops, in time per step and memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.loops import BY_HAND, LOOPS, OURS
from bench.runner import Benchmark, Case, Goal, Measured, alternate
from bench.workers import Worker, together

PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-2, optimizer in RAM": {"stage": 2, "offload": "cpu", "precision": "fp32"},
    "ZeRO-3": {
        "stage": 3,
        "precision": "fp32",
        # DeepSpeed keeps smaller parameters unpartitioned, and the model is small.
        "stage3_param_persistence_threshold": 0,
    },
}


def cases(quick: bool) -> Sequence[Case]:
    size = (
        {"model": "tiny", "batch": 1, "side": 16, "starts": 1, "rounds": 2, "steps": 2}
        if quick
        # Short turns, so that a machine that is slow for seconds slows all contestants.
        else {"model": "small", "batch": 4, "side": 32, "starts": 5, "rounds": 40, "steps": 2}
    )
    names = list(PLANS)[:1] if quick else list(PLANS)
    return tuple(Case(name, measure, {"plan": dict(PLANS[name]), **size}) for name in names)


def measure(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure memory in fresh processes, then let the three step in turns."""
    memory = alternate(
        {name: functools.partial(_memory, settings, name) for name in LOOPS},
        rounds=settings["starts"],
        warm_up=0,
    )
    with together({name: (loop, settings) for name, loop in LOOPS.items()}) as workers:
        parameters = 0
        for worker in workers.values():
            worker.call("held")
            parameters = worker.call("start")
        samples: dict[str, dict[str, Any]] = alternate(
            {
                name: functools.partial(worker.call, "steps", settings["steps"])
                for name, worker in workers.items()
            },
            rounds=settings["rounds"],
        )
        losses = {name: worker.call("losses") for name, worker in workers.items()}
    for name, found in samples.items():
        found.update(memory[name])
    return Measured(
        samples=samples,
        baseline=BY_HAND,
        facts={
            "parameters": parameters,
            "steps compared": len(losses[BY_HAND]),
            "largest relative difference of a loss": _difference(losses),
        },
    )


def _memory(settings: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return a fresh process's peak beyond its libraries, from start through two steps."""
    with Worker(LOOPS[name], dict(settings)) as worker:
        before = worker.call("held")
        _, first = worker.peak("start")
        _, second = worker.peak("steps", 2)
    return {"host_bytes": max(first, second) - before}


def _difference(losses: Mapping[str, Sequence[float]]) -> float:
    reference = losses[BY_HAND]
    return max(
        abs(ours - theirs) / abs(theirs)
        for found in losses.values()
        for ours, theirs in zip(found, reference, strict=True)
    )


_TRAINER = "the Trainer's own work takes at most 1 % of the time of the benchmark's small step"

BENCHMARK = Benchmark(
    name="overhead",
    title="a training step of zerotune's Trainer, compared with hand-written loops",
    cases=cases,
    ours=(OURS,),
    goals=(
        *(
            Goal(f"{case}: {what} a hand-written loop", case, OURS, quantity, 1.01, BY_HAND)
            for case in PLANS
            for what, quantity in (
                ("a step takes at most 1 % longer than in", "seconds"),
                ("peak memory is at most 1 % higher than in", "host_bytes"),
            )
        ),
        *(Goal(f"{case}: {_TRAINER}", case, OURS, "own_share", 0.01) for case in PLANS),
    ),
)  # fmt: skip
