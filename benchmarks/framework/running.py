"""Run a benchmark case by case, and contestants in turns."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.framework.hardware import hardware, load_average
from benchmarks.framework.plots import plot
from benchmarks.framework.results import ResultFile
from benchmarks.framework.tables import markdown
from benchmarks.framework.values import (
    Benchmark,
    Case,
    CaseRefused,
    Context,
    Measured,
    TimeIsUp,
)

Contestant = Callable[[], Mapping[str, float]]
"""Runs once and gives one sample of each quantity."""


def timed(act: Callable[[], object], *, count: int = 1) -> Contestant:
    """A contestant whose quantity is the ``seconds`` of a call, the mean of ``count`` calls."""

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(count):
            act()
        return {"seconds": (time.perf_counter() - started) / count}

    return measure


def alternate(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Let all contestants run once per round, in another order from round to round.

    Who begins moves on, and every other round goes backwards, so that nobody always follows the
    same one.

    Args:
        contestants: By name.
        rounds: That count.
        warm_up: Rounds before these that do not.
        before: Called before each contestant's turn, outside of what it measures.

    Returns:
        Samples by contestant and quantity; the n-th of all are of one round.
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


def run(
    benchmark: Benchmark, *, output: Path, quick: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """Measure what is not there yet; write the JSON file after every case.

    Args:
        benchmark: What to run.
        output: Folder of ``NAME.json``, and of ``NAME.md`` and ``NAME.png`` at the end.
        quick: The sizes that only show that it works.
        fresh: Measure everything anew.

    Returns:
        What the JSON file holds.
    """
    _check_device(benchmark, quick=quick)
    file = ResultFile(output / f"{benchmark.name}.json", benchmark, quick=quick, fresh=fresh)
    cases = list(benchmark.cases(quick))
    names = [case.name for case in cases]
    began = time.monotonic()
    for case in cases:
        if file.has(case):
            _say(f"{benchmark.name}: {case.name} is there already")
            continue
        _say(f"{benchmark.name}: {case.name}")
        try:
            _measure(case, file, output, began=began)
        except TimeIsUp as end:
            _say(f"  {end}")
            break
    file.write(names)
    result = file.data(names)
    present(result, output)
    return result


def _check_device(benchmark: Benchmark, *, quick: bool) -> None:
    if benchmark.device == "gpu" and not quick and not hardware()["devices"]:
        raise SystemExit(f"{benchmark.name} needs a GPU; --quick shows that it works without one")


def _measure(case: Case, file: ResultFile, output: Path, *, began: float) -> None:
    output.mkdir(parents=True, exist_ok=True)
    # On the disk of the results: the system's temporary folder is often memory.
    scratch = Path(tempfile.mkdtemp(prefix=".scratch-", dir=output))
    load, started = load_average(), time.perf_counter()
    try:
        context = Context(scratch=scratch, log=_say, began=began)
        outcome: Measured | str = case.measure(case.settings, context)
    except CaseRefused as refusal:
        outcome = str(refusal)
        _say(f"  refused: {outcome}")
    finally:
        shutil.rmtree(scratch)
    file.add(
        case,
        outcome,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took_seconds=round(time.perf_counter() - started, 1),
        load_before=load,
    )


def present(result: Mapping[str, Any], output: Path) -> None:
    """Write the table, and the plot where matplotlib is installed."""
    name = result["benchmark"]
    (output / f"{name}.md").write_text(markdown(result), encoding="utf-8")
    plot(result, output / f"{name}.png")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
