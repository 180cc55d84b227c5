"""What the ``Trainer`` costs beyond a loop written by hand: time of a step and memory."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.framework import Benchmark, Case, Context, Goal, Measured, Worker, alternate
from benchmarks.loops import BY_HAND, LOOPS, OURS, problem

PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-2, optimizer in RAM": {"stage": 2, "offload": "cpu", "precision": "fp32"},
    "ZeRO-3": {
        "stage": 3,
        "precision": "fp32",
        # Below this size nothing is partitioned, and the model is small.
        "stage3_param_persistence_threshold": 0,
    },
}


def cases(quick: bool) -> Sequence[Case]:
    size = (
        {"model": "tiny", "batch": 1, "side": 16, "starts": 1, "rounds": 2, "steps": 2}
        if quick
        # Short turns: what slows a machine for seconds then slows all of them.
        else {"model": "small", "batch": 4, "side": 32, "starts": 5, "rounds": 40, "steps": 2}
    )
    names = list(PLANS)[:1] if quick else list(PLANS)
    return tuple(
        Case(name=name, settings={"plan": dict(PLANS[name]), **size}, measure=measure)
        for name in names
    )


def measure(settings: Mapping[str, Any], context: Context) -> Measured:
    """Take the memory of fresh processes, then let three that have started step in turns."""
    memory = alternate(
        {name: functools.partial(_memory, settings, name) for name in LOOPS},
        rounds=settings["starts"],
        warm_up=0,
    )
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(loop, dict(settings))) for name, loop in LOOPS.items()
        }
        parameters = 0
        for name, worker in workers.items():
            worker.call("held")
            parameters = worker.call("start")
            context.log(f"  {name}: {min(memory[name]['host_bytes']) / 2**20:.0f} MiB at least")
        samples: dict[str, dict[str, Any]] = alternate(
            {name: _steps(worker, settings["steps"]) for name, worker in workers.items()},
            rounds=settings["rounds"],
        )
        losses = {name: worker.call("losses") for name, worker in workers.items()}
        phases = workers[OURS].call("phases")
        device = {name: worker.call("device") for name, worker in workers.items()}
    for name, found in samples.items():
        found.update(memory[name])
        found.update({quantity: [value] for quantity, value in device[name].items()})
    return Measured(
        samples=samples,
        baseline=BY_HAND,
        facts={
            "parameters": parameters,
            "steps compared": len(losses[BY_HAND]),
            "largest relative difference of a loss": _difference(losses),
            "seconds per step by phase": phases,
            "limits": limits(settings, parameters, phases),
        },
    )


def _memory(settings: Mapping[str, Any], name: str) -> dict[str, float]:
    """Most that a fresh process grows beyond its libraries, from the start through two steps."""
    with Worker(LOOPS[name], dict(settings)) as worker:
        before = worker.call("held")
        _, first = worker.peak("start")
        _, second = worker.peak("steps", 2)
    return {"host_bytes": max(first, second) - before}


def _steps(worker: Worker, count: int) -> Any:
    return lambda: worker.call("steps", count)


def _difference(losses: Mapping[str, Sequence[float]]) -> float:
    reference = losses[BY_HAND]
    return max(
        abs(ours - theirs) / abs(theirs)
        for found in losses.values()
        for ours, theirs in zip(found, reference, strict=True)
    )


def limits(
    settings: Mapping[str, Any], parameters: int, phases: Mapping[str, float]
) -> list[dict[str, Any]]:
    """What a step must compute and move, and how fast this machine does either at best."""
    compute = phases["forward"] + phases["backward"]
    flops = _flops(settings)
    # Adam reads weights, gradient and two moments, and writes all but the gradient.
    moved = 28 * parameters
    return [
        {
            "what": "arithmetic of forward and backward",
            "unit": "FLOP",
            "per_step": flops,
            "reached_per_second": flops / compute,
            "limit_per_second": _matmul_rate(),
            "limit": "a matrix product of 1024 x 1024",
        },
        {
            "what": "memory the optimizer must move",
            "unit": "B",
            "per_step": moved,
            "reached_per_second": moved / phases["optimizer"],
            "limit_per_second": _copy_rate(),
            "limit": "a copy in memory",
        },
    ]


def _flops(settings: Mapping[str, Any]) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    one = problem(settings)
    with FlopCounterMode(display=False) as counter:
        output = one.model(one.batches[0]["images"], torch.zeros(settings["batch"])).sample
        output.square().mean().backward()
    return float(counter.get_total_flops())


def _matmul_rate(size: int = 1024) -> float:
    import torch

    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _fastest(lambda: left @ right)


def _copy_rate(count: int = 2**25) -> float:
    import torch

    source, target = torch.zeros(count), torch.zeros(count)
    return 8 * count / _fastest(lambda: target.copy_(source))


def _fastest(act: Any, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


BENCHMARK = Benchmark(
    name="overhead",
    title="a training step of zerotune's Trainer against loops written by hand",
    cases=cases,
    ours=frozenset({OURS}),
    goals=tuple(
        Goal(
            text=f"{case}: {what} within 1 % of the loop by hand",
            case=case,
            contestant=OURS,
            against=BY_HAND,
            quantity=quantity,
            limit=1.01,
        )
        for case in PLANS
        for what, quantity in (("seconds per step", "seconds"), ("peak memory", "host_bytes"))
    )
    + tuple(
        Goal(
            text=f"{case}: the Trainer's own work takes at most 1 % of this small step",
            case=case,
            contestant=OURS,
            quantity="own_share",
            limit=0.01,
        )
        for case in PLANS
    ),
)
