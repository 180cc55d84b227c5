"""A large diffusion model on one GPU: zerotune against the reference's configuration.

Each contestant is a process of its own and the only one at work: two of these models do not fit
into one machine's memory. They follow each other case by case, the first of them in turns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.framework import (
    AnonPeak,
    Case,
    CaseRefused,
    Context,
    Measured,
    TimeIsUp,
    Worker,
    WorkerError,
)

REFERENCE: Final = "reference"
GIB: Final = 2**30
BUDGET_S: Final = 540.0
"""Of one run; what is left is measured by the next."""
TIME_LIMIT_S: Final = 240.0
"""Of one contestant."""

PLANS: Final[Mapping[str, Mapping[str, Any]]] = {
    "zerotune ZeRO-2": {"stage": 2, "offload": "cpu"},
    "zerotune ZeRO-3": {"stage": 3, "offload": "cpu", "offload_param": "cpu"},
}


def comparison(
    name: str,
    *,
    steps: int,
    turn: int = 0,
    plans: Mapping[str, Mapping[str, Any]] = PLANS,
    **problem: Any,
) -> Case:
    """Zerotune's plans and the reference at one size."""
    named = {key: dict(plan) for key, plan in plans.items()}
    settings = {**problem, "steps": steps, "turn": turn, "plans": named}
    return Case(name=name, settings=settings, measure=compare)


def capped(cap_gib: float, *, steps: int, **problem: Any) -> Case:
    """What ``advise`` chooses for a card of that size, under a hard limit of it."""
    return Case(
        name=f"card of {cap_gib:g} GiB",
        settings={**problem, "steps": steps, "cap_gib": cap_gib},
        measure=emulate,
    )


def compare(settings: Mapping[str, Any], context: Context) -> Measured:
    """Run all contestants one after the other."""
    names = [REFERENCE, *settings["plans"]]
    shift = settings["turn"] % len(names)
    found: dict[str, Mapping[str, Any]] = {}
    for name in names[shift:] + names[:shift]:
        plan = settings["plans"].get(name)
        made = "benchmarks.large_runs:Reference" if plan is None else "benchmarks.large_runs:Ours"
        try:
            found[name] = _run(made, {**settings, "plan": plan}, context, name)
        except WorkerError as error:
            if not out_of_memory(error):
                raise
            context.log(f"  {name}: out of memory")
            found[name] = {"refused": last_line(error)}
    _refuse_if_all_failed(found)
    ran = {name: one for name, one in found.items() if "refused" not in one}
    return Measured(
        samples={name: ran[name]["samples"] for name in names if name in ran},
        baseline=REFERENCE if REFERENCE in ran else next(iter(ran)),
        facts={
            name: {key: value for key, value in one.items() if key != "samples"}
            for name, one in found.items()
        },
        notes=tuple(_notes(found)),
    )


def emulate(settings: Mapping[str, Any], context: Context) -> Measured:
    """Follow the advice for a smaller card on this one."""
    name = "advised"
    try:
        found = _run("benchmarks.large_runs:Advised", dict(settings), context, name)
    except WorkerError as error:
        if "NothingFitsError" in str(error) or out_of_memory(error):
            raise CaseRefused(last_line(error)) from error
        raise
    samples = found.pop("samples")
    return Measured(
        samples={name: samples}, baseline=name, facts=found, notes=tuple(_notes({name: found}))
    )


def check_time(context: Context) -> None:
    """End the benchmark when its time is up; what was measured is kept.

    Raises:
        TimeIsUp: It is.
    """
    if time.monotonic() - context.began > BUDGET_S:
        raise TimeIsUp("the time of one run is up; run it again to go on")


def out_of_memory(error: WorkerError) -> bool:
    """Whether a worker ended for want of memory, of the device or, killed, of the host."""
    text = str(error)
    return "OutOfMemoryError" in text or "out of memory" in text or "exit code -9" in text


def last_line(error: WorkerError) -> str:
    """What was wrong, without the way there."""
    return str(error).strip().splitlines()[-1][:300]


def _run(made: str, settings: Mapping[str, Any], context: Context, name: str) -> dict[str, Any]:
    check_time(context)
    with Worker(make, made, dict(settings), timeout_s=TIME_LIMIT_S) as worker:
        worker.call("load")
        with AnonPeak(worker.pid, interval=0.01) as memory:
            begun = time.perf_counter()
            about = worker.call("start")
            about["start_seconds"] = time.perf_counter() - begun
            samples = worker.call("run", settings["steps"])
        about |= worker.call("memory")
    samples["host_bytes"] = [host_bytes(memory.growth, about)]
    for quantity in [key for key in about if key.endswith("_bytes")]:
        samples[quantity] = [float(about.pop(quantity))]
    seconds = sum(samples["seconds"]) / len(samples["seconds"])
    sizes = {key: value[0] / GIB for key, value in samples.items() if key.endswith("_bytes")}
    told = ", ".join(f"{key.removesuffix('_bytes')} {gib:.2f} GiB" for key, gib in sizes.items())
    context.log(f"  {name}: {seconds:.3g} s, {told}")
    return {**about, "samples": samples}


def host_bytes(grown: int, about: dict[str, Any]) -> float:
    """Host memory of a contestant: what its own data grew by, and page-locked memory beside it.

    Args:
        grown: Of its anonymous memory, bytes.
        about: What it told at the end; ``pinned_apart`` is taken out of it.
    """
    apart = about.pop("pinned_apart", False)
    return float(grown) + (about["pinned_bytes"] if apart else 0.0)


def make(name: str, settings: Mapping[str, Any]) -> Any:
    """A contestant by name, imported in its own process only."""
    from importlib import import_module

    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)(settings)


def _refuse_if_all_failed(found: Mapping[str, Mapping[str, Any]]) -> None:
    if all("refused" in one for one in found.values()):
        raise CaseRefused("; ".join(f"{name}: {one['refused']}" for name, one in found.items()))


def _notes(found: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    notes = []
    for name, one in found.items():
        if "refused" in one:
            notes.append(f"{name} did not run: {one['refused']}.")
            continue
        estimate = one.get("estimate")
        told = "" if estimate is None else (
            f", estimated {estimate['device'] / GIB:.2f} GiB of device memory and "
            f"{estimate['host'] / GIB:.2f} GiB of RAM"
        )  # fmt: skip
        notes.append(f"{name}: {one['what']}{told}.")
    return notes
