"""What a benchmark is, how its contestants take turns, and what is kept of their samples."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import write_atomically

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Raw samples by contestant and quantity, whose name tells the unit: ``…seconds``, ``…bytes``,
``…_per_second``. Of a rate more is better, of all else less."""
Contestant = Callable[[], Mapping[str, float]]
"""Runs once and gives one sample of each quantity."""
_PACKAGES: Final = (
    "zerotune", "torch", "deepspeed", "accelerate", "diffusers", "transformers", "numpy",
    "safetensors", "pillow", "timm", "ema-pytorch",
)  # fmt: skip
_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS")


@attrs.frozen(kw_only=True)
class Measured:
    """What a case gave."""

    samples: Samples
    baseline: str
    """The contestant that the others are compared with; the n-th samples of all are of one
    round."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """A few JSON-able values; ``"limits"`` are those of docs/performance.md."""
    notes: tuple[str, ...] = ()
    """What a reader must know."""


@attrs.frozen
class Case:
    """One comparison. It is measured again when ``settings`` are others than those stored."""

    name: str
    measure: Callable[[Mapping[str, Any], Path], Measured]
    """Called with the settings and an empty folder, which is removed afterwards."""
    settings: Mapping[str, Any]
    """All that decides what is measured, as JSON-able data."""


@attrs.frozen
class Goal:
    """What a contestant's ratio to another, or its median itself, should come to."""

    text: str
    case: str
    contestant: str
    quantity: str
    limit: float | None
    """The most; of a rate the least. ``None``: it is only compared."""
    against: str | None = None
    """A contestant; ``None`` compares with a number."""


@attrs.frozen(kw_only=True)
class Benchmark:
    """A named set of cases."""

    name: str
    title: str
    """One line: what is compared."""
    cases: Callable[[bool], Sequence[Case]]
    """All cases; given whether they must be quick: seconds, at sizes that say nothing."""
    goals: Sequence[Goal] = ()
    ours: Sequence[str] = ()
    """Contestants that are zerotune's."""
    better: str | None = None
    """What is better in a picture; ``None``: more of a rate, less of anything else."""


def load(name: str) -> Benchmark:
    """The module's ``BENCHMARK``."""
    found: Benchmark = import_module(f"bench.{name}").BENCHMARK
    return found


def run(
    benchmark: Benchmark, *, output: Path, quick: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """Measure each case that is not there yet, and write ``NAME.json`` after each.

    Returns:
        What the file holds.
    """
    path, here = output / f"{benchmark.name}.json", machine()
    command = f"python -m bench {benchmark.name}" + (" --quick" if quick else "")
    head = {"benchmark": benchmark.name, "command": command, "quick": quick, **here}
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": []}
    if quick and not stored.get("quick", True):
        raise SystemExit(f"{path} holds a full measurement; give another --output for a quick one")
    same = not fresh and all(stored.get(key) == head[key] for key in ("quick", *here))
    kept = {case["name"]: case for case in stored["cases"]} if same else {}
    goals = [] if not same else stored["goals"]
    result: dict[str, Any] = head | {"cases": [], "goals": []}
    for case in benchmark.cases(quick):
        done = kept.get(case.name)
        # As JSON has it: a tuple has become a list.
        if done is None or done["settings"] != json.loads(json.dumps(case.settings)):
            print(f"{benchmark.name}: {case.name}", file=sys.stderr, flush=True)
            measured, about = _measure(case, output)
            done = {"name": case.name, "settings": dict(case.settings), **about}
            done |= summarised(measured)
            goals = [goal for goal in goals if goal["case"] != case.name]
            goals += [
                judged(goal, measured.samples) for goal in benchmark.goals if goal.case == case.name
            ]
        result["cases"].append(done)
        result["goals"] = [goal for goal in goals if goal["reached"] is not None]
        result = refreshed(result, benchmark)
        write_atomically(path, compact(result).encode())
    return result


def _measure(case: Case, output: Path) -> tuple[Measured, dict[str, Any]]:
    output.mkdir(parents=True, exist_ok=True)
    # On the disk of the results: the system's temporary folder is often memory.
    scratch = Path(tempfile.mkdtemp(prefix=".scratch-", dir=output))
    load_before, began = round(os.getloadavg()[0], 2), time.perf_counter()
    try:
        measured = case.measure(case.settings, scratch)
    finally:
        shutil.rmtree(scratch)
    return measured, {
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "took_seconds": round(time.perf_counter() - began, 1),
        "load_before": load_before,
    }


def timed(act: Callable[[], object]) -> Contestant:
    """A contestant whose quantity is the ``seconds`` of a call."""

    def measure() -> dict[str, float]:
        began = time.perf_counter()
        act()
        return {"seconds": time.perf_counter() - began}

    return measure


def alternate(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Let all contestants run once per round, in another order from round to round.

    The first of a round changes, and every other round goes backwards, so that no contestant
    always follows the same one. Rounds of ``warm_up`` do not count; ``before`` is called before
    each turn, outside of what it measures. The n-th samples of all are of one round.
    """
    names = list(contestants)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for turn in range(warm_up + rounds):
        shift = turn // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 == 0 else reversed(order):
            if before is not None:
                before()
            for quantity, value in contestants[name]().items():
                if turn >= warm_up:
                    samples[name].setdefault(quantity, []).append(float(value))
    return samples


# -- What is kept.


def summarised(measured: Measured) -> dict[str, Any]:
    """Median and spread of each quantity, and its ratio to the baseline of the same round."""
    contestants: dict[str, Any] = {}
    for name, quantities in measured.samples.items():
        contestants[name] = {}
        for quantity, samples in quantities.items():
            found = dict(zip(("q1", "median", "q3"), quartiles(samples), strict=True))
            ratios = _ratios(samples, measured.samples[measured.baseline].get(quantity, ()))
            if name != measured.baseline and ratios:
                found["ratio"] = quartiles(ratios)
            contestants[name][quantity] = found
    return {
        "baseline": measured.baseline, "contestants": contestants,
        "facts": dict(measured.facts), "notes": list(measured.notes),
    }  # fmt: skip


def judged(goal: Goal, samples: Samples) -> dict[str, Any]:
    """A goal with the median that was reached, and the interval that holds it at 95 %."""
    found: Sequence[float] = samples.get(goal.contestant, {}).get(goal.quantity, ())
    if goal.against is not None:
        found = _ratios(found, samples.get(goal.against, {}).get(goal.quantity, ()))
    if not found:
        return {**attrs.asdict(goal), "reached": None, "interval": None}
    low, high = median_interval(found)
    middle = rounded(statistics.median(found))
    return {**attrs.asdict(goal), "reached": middle, "interval": [rounded(low), rounded(high)]}


def refreshed(stored: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """A stored result with the words and limits that its benchmark has today."""
    keys = ("case", "contestant", "quantity", "against")
    reached = {tuple(goal[key] for key in keys): goal for goal in stored["goals"]}
    today = [attrs.asdict(goal) for goal in benchmark.goals]
    goals = [
        {**reached[place], **goal}
        for goal in today
        if (place := tuple(goal[key] for key in keys)) in reached
    ]
    words = {"title": benchmark.title, "ours": list(benchmark.ours), "better": benchmark.better}
    return {**stored, **words, "goals": goals}


def _ratios(samples: Sequence[float], against: Sequence[float]) -> list[float]:
    """Round by round: what slows the whole machine for a while slows both and cancels.

    Of the medians where the numbers of samples differ; none where something to divide by is 0.
    """
    if not samples or not against or not all(against):
        return []
    if len(samples) == len(against):
        return [ours / theirs for ours, theirs in zip(samples, against, strict=True)]
    return [statistics.median(samples) / statistics.median(against)]


def quartiles(samples: Sequence[float]) -> list[float]:
    """The first, the median and the third."""
    if len(samples) < 2:
        return [rounded(samples[0])] * 3
    return [rounded(one) for one in statistics.quantiles(samples, n=4, method="inclusive")]


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Between which of the samples the median lies, whatever their distribution.

    The narrowest pair of order statistics, alike from both ends, that holds the median with this
    probability; lowest and highest where there are too few samples for it (below six).
    """
    ordered, count = sorted(samples), len(samples)
    within, outside = 1, 0.0
    for rank in range(1, count // 2 + 1):
        outside += 2 * math.comb(count, rank - 1) / 2**count
        if outside > 1 - confidence:
            break
        within = rank
    return ordered[within - 1], ordered[count - within]


def rounded(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")


def compact(result: Mapping[str, Any]) -> str:
    """JSON with a line for each innermost list and object."""
    text, inner = json.dumps(result, indent=1, ensure_ascii=False), re.compile(r"\[[^][{}]*\]")
    for brackets in (inner, re.compile(r"\{[^{}]*\}")):
        text = brackets.sub(lambda found: re.sub(r"\n *", " ", found[0]), text)
    return text + "\n"


def machine() -> dict[str, Any]:
    """What decides a figure beside the code: the hardware, versions, and use of threads."""
    from zerotune import detect_platform

    here = detect_platform(log=False)
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "hardware": {
            "processor": here.processor or here.machine,
            "usable_cores": here.usable_cores,
            "host_gib": round(here.host_memory.limit / 2**30, 1),
            "devices": [
                {"name": device.name, "gib": round(device.total_memory / 2**30, 1)}
                for device in here.devices
            ],
            "system": here.system,
        },
        "versions": versions,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
