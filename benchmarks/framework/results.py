"""A result as data: statistics of raw samples, a file that grows case by case."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.framework.hardware import environment, hardware, versions
from benchmarks.framework.values import Benchmark, Case, Goal, Measured, more_is_better
from zerotune._util.files import write_atomically

SCHEMA: Final = 1


class ResultFile:
    """The result of one benchmark on disk; whole after every case.

    Cases measured on the same machine, with the same versions and settings, are kept. A file of
    another machine, or of other versions, is laid beside this one under that machine's name, and
    taken up again there.

    Args:
        path: The JSON file.
        benchmark: Whose result it is.
        quick: Whether sizes say nothing.
        fresh: Keep nothing of what is there.
    """

    def __init__(self, path: Path, benchmark: Benchmark, *, quick: bool, fresh: bool) -> None:
        self.path = path
        self._head = {
            "schema": SCHEMA,
            "benchmark": benchmark.name,
            **_shown(benchmark),
            "command": f"python -m benchmarks {benchmark.name}" + (" --quick" if quick else ""),
            "quick": quick,
            "hardware": hardware(),
            "versions": versions(),
            "environment": environment(),
        }
        self._goals = benchmark.goals
        self._cases: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._take(json.loads(path.read_text(encoding="utf-8")), fresh=fresh)

    def _take(self, stored: Mapping[str, Any], *, fresh: bool) -> None:
        if self._head["quick"] and not stored.get("quick", True):
            raise SystemExit(
                f"{self.path} holds a full measurement; give another --output for a quick one"
            )
        if not _same(stored, self._head):
            beside(self.path, stored).write_bytes(self.path.read_bytes())
            earlier = beside(self.path, self._head)
            stored = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else {}
            self.path.unlink()
        if not fresh and stored:
            self._cases = {case["name"]: case for case in stored["cases"]}

    def has(self, case: Case) -> bool:
        """Whether it was measured already, with these settings."""
        stored = self._cases.get(case.name)
        # As JSON has it: a tuple has become a list.
        return stored is not None and stored["settings"] == json.loads(json.dumps(case.settings))

    def add(self, case: Case, outcome: Measured | str, **about: Any) -> None:
        """Store what a case gave, or why it was refused, and write the file."""
        entry: dict[str, Any] = {"name": case.name, "settings": dict(case.settings), **about}
        if isinstance(outcome, str):
            entry["refused"] = outcome
        else:
            entry |= described(outcome)
        self._cases[case.name] = entry
        self.write([*self._cases])

    def write(self, order: Sequence[str]) -> None:
        """Write the cases named, in this order; others are left out."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.data(order), indent=1)
        write_atomically(self.path, (text + "\n").encode())

    def data(self, order: Sequence[str]) -> dict[str, Any]:
        """The whole result, with the goals of these cases."""
        cases = [self._cases[name] for name in order if name in self._cases]
        goals = [judged(goal, cases) for goal in self._goals if _applies(goal, cases, order)]
        return {**self._head, "cases": cases, "goals": goals}


def _shown(benchmark: Benchmark) -> dict[str, Any]:
    """What of a benchmark's own words stands in its result."""
    return {
        "title": benchmark.title,
        "ours": sorted(benchmark.ours),
        "better": benchmark.better,
    }


def refreshed(stored: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """A stored result with the words and the goals that its benchmark has today."""
    cases = stored["cases"]
    order = [case["name"] for case in cases]
    goals = [judged(goal, cases) for goal in benchmark.goals if _applies(goal, cases, order)]
    return {**stored, **_shown(benchmark), "goals": goals}


_SAME: Final = ("schema", "quick", "hardware", "versions", "environment")


def _same(stored: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
    return all(stored.get(key) == head[key] for key in _SAME)


def beside(path: Path, stored: Mapping[str, Any]) -> Path:
    """Where a result lies while the file of that name is another machine's."""
    decisive = {key: stored.get(key) for key in _SAME}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]
    return path.with_name(f"{path.stem}@{machine_name(stored['hardware'])}-{digest}.json")


def machine_name(of: Mapping[str, Any]) -> str:
    """A machine's device, or its processor, as part of a file's name."""
    devices = of.get("devices") or [{"name": of.get("processor") or "unknown"}]
    return file_name(str(devices[0]["name"]))


def file_name(text: str) -> str:
    """Text as part of a file's name that every system and every transfer takes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def described(measured: Measured) -> dict[str, Any]:
    """Samples with their statistics, and the ratio to the baseline of the same round."""
    baseline = measured.samples[measured.baseline]
    contestants: dict[str, dict[str, Any]] = {}
    for name, quantities in measured.samples.items():
        contestants[name] = {}
        for quantity, samples in quantities.items():
            found: dict[str, Any] = {"samples": [_rounded(value) for value in samples]}
            found |= summary(samples)
            reference = baseline.get(quantity)
            compared = ratio(samples, reference or ())
            if name != measured.baseline and compared is not None:
                found["ratio"] = compared
            contestants[name][quantity] = found
    return {
        "baseline": measured.baseline,
        "contestants": contestants,
        "facts": dict(measured.facts),
        "notes": list(measured.notes),
    }


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    low, middle, high = _quartiles(samples)
    return {
        "median": _rounded(middle),
        "q1": _rounded(low),
        "q3": _rounded(high),
        "min": _rounded(min(samples)),
        "max": _rounded(max(samples)),
    }


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles of the ratios round by round; ``None`` where there is no such thing.

    What slows the whole machine for a while slows both and cancels; where the numbers of samples
    differ there are no rounds, and medians are divided.
    """
    found = _round_by_round(samples, baseline)
    if found is None:
        return None
    low, middle, high = _quartiles(found)
    return {"median": _rounded(middle), "q1": _rounded(low), "q3": _rounded(high)}


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


def rounds(
    case: Mapping[str, Any], contestant: str, quantity: str, against: str | None
) -> list[float] | None:
    """Samples of a contestant, or their ratios to another's of the same rounds."""
    contestants = case.get("contestants", {})
    ours = contestants.get(contestant, {}).get(quantity)
    if ours is None or against is None:
        return None if ours is None else list(ours["samples"])
    theirs = contestants.get(against, {}).get(quantity)
    return None if theirs is None else _round_by_round(ours["samples"], theirs["samples"])


def _round_by_round(samples: Sequence[float], baseline: Sequence[float]) -> list[float] | None:
    if not baseline or not all(baseline):
        return None
    if len(samples) == len(baseline):
        return [ours / theirs for ours, theirs in zip(samples, baseline, strict=True)]
    return [statistics.median(samples) / statistics.median(baseline)]


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _applies(goal: Goal, cases: Sequence[Mapping[str, Any]], order: Sequence[str]) -> bool:
    """Whether a goal is about these cases, and about something that this machine has."""
    case = next((case for case in cases if case["name"] == goal.case), None)
    if case is None or "refused" in case:
        return goal.case in order
    return goal.quantity in case["contestants"].get(goal.contestant, {})


def judged(goal: Goal, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A goal with what was reached: ``reached`` and ``met`` are ``None`` when not measured."""
    entry: dict[str, Any] = {
        "text": goal.text, "case": goal.case, "contestant": goal.contestant,
        "quantity": goal.quantity, "limit": goal.limit, "against": goal.against,
    }  # fmt: skip
    reached = _reached(goal, {case["name"]: case for case in cases}.get(goal.case))
    met = None
    if reached is not None:
        more = more_is_better(goal.quantity)
        met = reached >= goal.limit if more else reached <= goal.limit
    return entry | {"reached": reached, "met": met}


def _reached(goal: Goal, case: Mapping[str, Any] | None) -> float | None:
    found = rounds(case or {}, goal.contestant, goal.quantity, goal.against)
    return None if found is None else _rounded(statistics.median(found))
