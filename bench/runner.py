"""Definition of a benchmark, the order of its contestants, and statistics of their samples."""

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
"""Raw samples by contestant and quantity. The quantity's name ends with its unit: ``…seconds``,
``…bytes``, ``…_per_second``. Higher is better for rates, lower for everything else."""
Contestant = Callable[[], Mapping[str, float]]
"""A function that runs once and returns one sample of each quantity."""
_PACKAGES: Final = (
    "zerotune", "torch", "deepspeed", "accelerate", "diffusers", "transformers", "numpy",
    "safetensors", "pillow", "timm", "ema-pytorch",
)  # fmt: skip
_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS")


class LeftOutError(RuntimeError):
    """A case cannot be measured on this machine now; says why."""


@attrs.frozen(kw_only=True)
class Measured:
    """Result of a case."""

    samples: Samples
    baseline: str
    """The contestant that others are compared with; n-th samples belong to the same round."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """JSON-able facts about the measurement."""
    notes: tuple[str, ...] = ()
    """Remarks that a reader needs to interpret the figures."""


@attrs.frozen
class Case:
    """One comparison, measured again if ``settings`` differ from the stored ones."""

    name: str
    measure: Callable[[Mapping[str, Any], Path], Measured]
    """Called with the settings and an empty folder, which is removed afterwards; may raise
    ``LeftOutError``."""
    settings: Mapping[str, Any]
    """Everything that determines the measurement, as JSON-able data."""


@attrs.frozen
class Goal:
    """Limit for a contestant's median, or for its ratio to another contestant."""

    text: str
    case: str
    contestant: str
    quantity: str
    limit: float | None
    """Maximum, or minimum for a rate; ``None``: a comparison without a goal."""
    against: str | None = None
    """The other contestant; ``None`` compares the median with ``limit``."""


@attrs.frozen(kw_only=True)
class Benchmark:
    """A named set of cases."""

    name: str
    title: str
    """One line that says what is compared."""
    cases: Callable[[bool], Sequence[Case]]
    """Returns all cases; given ``True``, quick ones (seconds) whose figures mean nothing."""
    goals: Sequence[Goal] = ()
    ours: Sequence[str] = ()
    """Contestants that are zerotune's."""
    better: str | None = None
    """What is better, as the chart's caption says; ``None``: higher for rates, lower otherwise."""


def load(name: str) -> Benchmark:
    """Return the module's ``BENCHMARK``."""
    found: Benchmark = import_module(f"bench.{name}").BENCHMARK
    return found


def run(
    benchmark: Benchmark,
    *,
    output: Path,
    quick: bool = False,
    fresh: bool = False,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure each case that is not stored yet, and write ``NAME.json`` after each.

    Args:
        benchmark: The cases.
        output: Folder of the file.
        quick: Whether to measure the quick cases.
        fresh: Measure stored cases again.
        only: Parts of names: measure the cases whose name contains one of them, and no others.

    Returns:
        The content of the file.
    """
    path, here = output / f"{benchmark.name}.json", machine()
    command = f"python -m bench {benchmark.name}" + (" --quick" if quick else "")
    head = {"benchmark": benchmark.name, "command": command, "quick": quick, **here}
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": []}
    if quick and not stored.get("quick", True):
        raise SystemExit(f"{path} holds a full measurement; give another --output for a quick one")
    same = not fresh and all(stored.get(key) == head[key] for key in ("quick", *here))
    cases = benchmark.cases(quick)
    kept = {case["name"]: case for case in stored["cases"]} if same else {}
    # Compare as JSON, which turns tuples into lists.
    current = {case.name: json.loads(json.dumps(case.settings)) for case in cases}
    kept = {name: case for name, case in kept.items() if case["settings"] == current.get(name)}
    goals = [goal for goal in stored.get("goals", ()) if goal["case"] in kept]

    def write() -> dict[str, Any]:
        result = {
            **head,
            "cases": [kept[case.name] for case in cases if case.name in kept],
            "goals": [goal for goal in goals if goal["reached"] is not None],
        }
        result = refreshed(result, benchmark)
        write_atomically(path, compact(result).encode())
        return result

    for case in cases:
        if not any(part in case.name for part in only) if only else case.name in kept:
            continue
        print(f"{benchmark.name}: {case.name}", file=sys.stderr, flush=True)
        try:
            measured, about = _measure(case, output)
        except LeftOutError as error:
            print(f"{benchmark.name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        done = {"name": case.name, "settings": dict(case.settings), **about}
        kept[case.name] = done | summarised(measured)
        goals = [goal for goal in goals if goal["case"] != case.name]
        goals += [
            judged(goal, measured.samples) for goal in benchmark.goals if goal.case == case.name
        ]
        write()
    return write()


def _measure(case: Case, output: Path) -> tuple[Measured, dict[str, Any]]:
    output.mkdir(parents=True, exist_ok=True)
    # Work on the disk of the results: the system's temporary folder is often in RAM.
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
    """Return a contestant that measures the ``seconds`` of a call."""

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
    """Run every contestant once per round, in a different order from round to round.

    The first contestant changes, and every other round runs backwards, so that no contestant
    always follows the same one. The ``warm_up`` rounds do not count; ``before`` is called before
    each turn, outside its measurement. The n-th samples of all contestants are of one round.
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


# -- Statistics and storage.


def summarised(measured: Measured) -> dict[str, Any]:
    """Return median, quartiles, and ratio to the baseline of the same round, by quantity."""
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
    """Return a goal with the median reached, and the median's 95 % confidence interval."""
    found: Sequence[float] = samples.get(goal.contestant, {}).get(goal.quantity, ())
    if goal.against is not None:
        found = _ratios(found, samples.get(goal.against, {}).get(goal.quantity, ()))
    if not found:
        return {**attrs.asdict(goal), "reached": None, "interval": None}
    low, high = median_interval(found)
    middle = rounded(statistics.median(found))
    return {**attrs.asdict(goal), "reached": middle, "interval": [rounded(low), rounded(high)]}


def refreshed(stored: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """Update a stored result to the benchmark's current texts and limits."""
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
    """Return ratios by round: a slow phase of the machine slows both sides and cancels.

    If the numbers of samples differ, return the ratio of the medians; if a divisor is 0, nothing.
    """
    if not samples or not against or not all(against):
        return []
    if len(samples) == len(against):
        return [ours / theirs for ours, theirs in zip(samples, against, strict=True)]
    return [statistics.median(samples) / statistics.median(against)]


def quartiles(samples: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    if len(samples) < 2:
        return [rounded(samples[0])] * 3
    return [rounded(one) for one in statistics.quantiles(samples, n=4, method="inclusive")]


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median.

    It is the narrowest symmetric pair of order statistics that contains the median with this
    probability; with too few samples (below six), the lowest and the highest.
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
    """Round to six significant digits."""
    return float(f"{value:.6g}")


def compact(result: Mapping[str, Any]) -> str:
    """Format as JSON with one line for each innermost list and object."""
    text, inner = json.dumps(result, indent=1, ensure_ascii=False), re.compile(r"\[[^][{}]*\]")
    for brackets in (inner, re.compile(r"\{[^{}]*\}")):
        text = brackets.sub(lambda found: re.sub(r"\n *", " ", found[0]), text)
    return text + "\n"


def machine() -> dict[str, Any]:
    """Return what determines a figure besides the code: hardware, versions, thread settings."""
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
