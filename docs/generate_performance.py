"""Write docs/performance.md from the results in docs/results, and from nothing else.

``python docs/generate_performance.py``; a test fails when the committed file is not what this
prints. New results come there with ``python -m benchmarks all --output docs/results``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# As a script it is started from anywhere.
sys.path.insert(0, str(ROOT))

from benchmarks.framework.results import median_interval, rounds  # noqa: E402
from benchmarks.framework.tables import (  # noqa: E402
    amount,
    case_parts,
    machine,
    provenance,
)
from benchmarks.framework.values import more_is_better  # noqa: E402

RESULTS = ROOT / "docs" / "results"
TARGET = ROOT / "docs" / "performance.md"
ORDER = ("sdxl", "flux", "overhead", "checkpoint", "step", "ema", "offload", "data", "memory",
         "prediction")  # fmt: skip
UNMEASURED = "not measured yet"

INTRODUCTION = """\
Made from the results in `docs/results`; nothing here is typed by hand."""

# Per row: benchmark, case, contestant, quantity, with what it is compared, and its name here.
FIRST = (
    ("overhead", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "seconds", "DeepSpeed by hand",
     "a training step, ZeRO-2 with the optimizer in RAM"),
    ("overhead", "ZeRO-3", "zerotune Trainer", "seconds", "DeepSpeed by hand",
     "a training step, ZeRO-3"),
    ("overhead", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "host_bytes", "DeepSpeed by hand",
     "host memory of that run, ZeRO-2"),
    ("overhead", "ZeRO-3", "zerotune Trainer", "host_bytes", "DeepSpeed by hand",
     "host memory of that run, ZeRO-3"),
    ("checkpoint", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "save_to_disk_seconds",
     "DeepSpeed by hand", "a save, until it is on the disk, ZeRO-2"),
    ("checkpoint", "ZeRO-3", "zerotune Trainer", "save_to_disk_seconds", "DeepSpeed by hand",
     "a save, until it is on the disk, ZeRO-3"),
    ("checkpoint", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "resume_seconds",
     "DeepSpeed by hand", "a resume, ZeRO-2"),
    ("checkpoint", "ZeRO-3", "zerotune Trainer", "resume_seconds", "DeepSpeed by hand",
     "a resume, ZeRO-3"),
    ("ema", "update", "EMAShadow", "seconds", "diffusers EMAModel, foreach", "an EMA update"),
    ("ema", "update", "EMAShadow", "seconds", "timm ModelEmaV3, foreach", "an EMA update"),
    ("ema", "update", "EMAShadow", "seconds", "memory copy",
     "an EMA update, which moves 1.5 times the bytes"),
    ("ema", "training step", "BackgroundEMA.step", "seconds", "no EMA",
     "a step with an EMA in the background"),
    ("offload", "bandwidth", "zerotune's settings", "write_bytes_per_second", "dd",
     "rate of swapping out"),
    ("offload", "bandwidth", "zerotune's settings", "read_bytes_per_second", "dd",
     "rate of swapping in"),
    ("data", "pixels", "BucketStream of an ImageFolder", "images_per_second",
     "DataLoader, files in memory", "images per second from a folder"),
)  # fmt: skip
"""What a reader needs first."""

NOT_YET = {
    "sdxl": "needs a GPU of at least 24 GiB; none has been at hand so far",
    "flux": "needs a GPU; none has been at hand so far",
}
"""Why what has no result has none."""

METHOD = """\
Contestants of a case run in turns, round by round, on one machine, so that what slows the machine
for a while slows all of them. A ratio is the median of the ratios round by round. The interval
beside it holds that median at 95 %, whatever the distribution (order statistics; of five rounds
lowest and highest, at 94 %); a figure without one was measured once. A goal is met, or missed,
where the whole interval is on one side of it. Where the interval holds the goal, the noise is
larger than the difference, and the page says which side the median is on. Raw samples, quartiles,
settings and versions are in the JSON files.

Estimates of memory are held against two measures: *in use* is what the process's live blocks take;
the *peak of the process* also holds freed blocks that the C library keeps for later, which on a CPU
is up to a fifth more. An estimate may be at most 3 % below what is in use, and at most 10 % above
the peak of the process; it is **not** a bound of that peak."""

# The reference system's own figures, as published: SDXL's full U-Net, ZeRO-2 with the optimizer
# in RAM, on an RTX 4090 with 24 GB.
PUBLISHED = (
    (
        "1024², batch 8",
        "13,102 MiB, 8 s per iteration",
        "8.5 GiB, 0.7 of the time",
        ("zerotune ZeRO-2",),
    ),
    (
        "1024², batch 1",
        "perhaps 8 GiB, untested",
        "6.9 GiB; 4 GiB at stage 3",
        ("zerotune ZeRO-2", "zerotune ZeRO-3"),
    ),
    ("128², batch 8", "9,237 MiB", "3.5 GiB at stage 3", ("zerotune ZeRO-3",)),
)

# What a step of SDXL's U-Net must do at 1024 x 1024 and batch 8, with gradient checkpointing:
# 2.567 billion parameters, 25.4 TFLOP per sample.
SDXL_PARAMETERS, SDXL_FLOPS = 2.567e9, 8 * 25.4e12
SDXL_LIMITS = (
    ("arithmetic", f"{SDXL_FLOPS / 1e12:.0f} TFLOP"),
    (
        "over the bus, ZeRO-2 with the optimizer in RAM: fp32 gradients down, bf16 weights up",
        f"{6 * SDXL_PARAMETERS / 1e9:.1f} GB",
    ),
    (
        "host memory, Adam: weights, gradient and moments read, all but the gradient written",
        f"{28 * SDXL_PARAMETERS / 1e9:.1f} GB",
    ),
)

REASONS: Mapping[tuple[str, str], str] = {
    ("ema", "a step with `BackgroundEMA`"): (
        "here forward and backward run on the same cores as the update; a GPU leaves them idle"
    ),
    ("checkpoint", "ZeRO-2, optimizer in RAM: a save"): (
        "zerotune has then also read every byte back and hashed it"
    ),
    ("checkpoint", "ZeRO-3: a save"): "zerotune has then also read every byte back and hashed it",
}
"""Why a goal is missed where it is, by benchmark and the beginning of its text."""


def page() -> str:
    """The whole page."""
    results = stored()
    parts = [
        "<!-- Written by docs/generate_performance.py; edit that. -->",
        "# Performance",
        INTRODUCTION,
        "## What to expect",
        *_first(results),
        "## Not measured yet",
        *_unmeasured(results),
        *_published(results),
        "## Goals",
        _headline(results),
        "## Method",
        METHOD,
        "## How to reproduce",
        _commands(results),
        "## Physical limits",
        *_limits(results),
        "## The memory model",
        *_memory(results),
        *_details(results),
    ]
    return "\n\n".join(parts) + "\n"


def stored() -> dict[str, dict[str, Any]]:
    """The results that are there, in the page's order."""
    found = {}
    for name in ORDER:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _first(results: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        "| zerotune's … | compared with | ratio (95 %) | better is | so it is |",
        "|---|---|--:|---|---|",
    ]
    machines = dict.fromkeys(machine(result) for result in results.values())
    for name, case, contestant, quantity, against, words in FIRST:
        found = rounds(_case(results.get(name), case), contestant, quantity, against)
        if found is None:
            continue
        better = "higher" if more_is_better(quantity) else "lower"
        rows.append(
            f"| {words} | {against} | {_spread(found)} | {better} | {_side(found, quantity)} |"
        )
    yield (
        f"Measured without a GPU, on {'; '.join(machines)}. A ratio of 1 is as much as what it is "
        "compared with; the interval says how sure that is ([method](#method))."
    )
    yield "\n".join(rows)
    yield from _memory_first(results.get("memory"))


def _case(result: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    cases = result["cases"] if result else ()
    return next((case for case in cases if case["name"] == name), {})


def _spread(found: list[float]) -> str:
    """``"1.046 (0.989 to 1.097)"``."""
    low, high = median_interval(found)
    middle = f"{statistics.median(found):.3f}"
    return middle if len(found) == 1 else f"{middle} ({low:.3f} to {high:.3f})"


def _side(found: list[float], quantity: str) -> str:
    """Whether it differs from 1, and to which side."""
    low, high = median_interval(found)
    if low <= 1 <= high:
        return "no difference beyond the noise"
    return "better" if (low > 1) == more_is_better(quantity) else "worse"


def _memory_first(result: Mapping[str, Any] | None) -> Iterator[str]:
    if result is None:
        return
    of_use, of_peak = [], []
    for case in result["cases"]:
        if "refused" not in case:
            estimated, peak, in_use = (
                case["contestants"][of]["host_bytes"]["median"]
                for of in ("estimated", "measured", "measured, without freed blocks")
            )
            of_use.append(100 * (estimated / in_use - 1))
            of_peak.append(100 * (estimated / peak - 1))
    yield (
        f"The plan's estimate of memory differs by {_range(of_use)} from what is in use, and by "
        f"{_range(of_peak)} from the peak of the process, over {len(of_use)} plans."
    )


def _range(found: list[float]) -> str:
    return f"{min(found):+.1f} to {max(found):+.1f} %"


def _unmeasured(results: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in ORDER if name not in results]
    if missing:
        yield "\n".join(
            [
                "| what | command | why not |",
                "|---|---|---|",
                *(f"| {name} | `python -m benchmarks {name}` | {NOT_YET[name]} |"
                  for name in missing),
            ]
        )  # fmt: skip
    yield (
        "Nothing here ran on a GPU: what offload costs over a bus, what hides behind a device's "
        "work and how full its memory gets is predicted ([memory](memory.md)), not measured."
    )


def _published(results: Mapping[str, Any]) -> Iterator[str]:
    sdxl = results.get("sdxl")
    cases = {case["name"]: case for case in sdxl["cases"]} if sdxl else {}
    rows = [
        "| SDXL's full U-Net | published | our goal | zerotune |",
        "|---|---|---|---|",
    ]
    for name, theirs, goal, contestants in PUBLISHED:
        found = [_gpu_figures(cases.get(name, {}), contestant) for contestant in contestants]
        ours = "; ".join(each for each in found if each) or UNMEASURED
        rows.append(f"| {name} | {theirs} | at most {goal} | {ours} |")
    yield "\n".join(rows)
    yield (
        "The published figures are from an RTX 4090 with 24 GB; ours "
        f"{'from ' + _where(sdxl) if sdxl else 'need a GPU'}. Times compare on one machine "
        "only: below, where the reference's configuration runs in turns with ours."
    )


def _gpu_figures(case: Mapping[str, Any], contestant: str) -> str:
    quantities = case.get("contestants", {}).get(contestant)
    if quantities is None:
        return ""
    memory, seconds = (quantities[name]["median"] for name in ("device_bytes", "seconds"))
    return (
        f"{amount(memory, 'device_bytes')}, {amount(seconds, 'seconds')} per iteration "
        f"({contestant.removeprefix('zerotune ')})"
    )


def _headline(results: Mapping[str, Any]) -> str:
    rows = [
        "| goal | reference | zerotune | ratio (95 %) | met | hardware |",
        "|---|--:|--:|--:|---|---|",
    ]
    for name, result in results.items():
        for goal in result["goals"]:
            case = _case(result, goal["case"])
            reference, ours = _pair(goal, case)
            found = rounds(case, goal["contestant"], goal["quantity"], goal["against"])
            ratio = _spread(found) if found and goal["against"] else ""
            cells = [
                goal["text"] + _reason(name, goal, found), reference, ours, ratio,
                _met(goal, found), _where(result),
            ]  # fmt: skip
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) if results else "No result is stored yet."


def _met(goal: Mapping[str, Any], found: list[float] | None) -> str:
    """Whether a goal is met, where the noise lets anybody say so."""
    if goal["met"] is None or not found:
        return UNMEASURED
    low, high = median_interval(found)
    if low <= goal["limit"] <= high and low < high:
        return f"{'met' if goal['met'] else 'missed'} at the median, within the noise"
    return "yes" if goal["met"] else "**no**"


def _pair(goal: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[str, str]:
    """The medians of the reference and of ours."""

    def median(contestant: str | None) -> str:
        found = case.get("contestants", {}).get(contestant, {}).get(goal["quantity"])
        return "" if found is None else amount(found["median"], goal["quantity"])

    reference = (
        median(goal["against"])
        if goal["against"]
        else "at most " + amount(goal["limit"], goal["quantity"])
    )
    return reference, median(goal["contestant"])


def _reason(name: str, goal: Mapping[str, Any], found: list[float] | None) -> str:
    if _met(goal, found) != "**no**":
        return ""
    for (benchmark, beginning), reason in REASONS.items():
        if benchmark == name and goal["text"].startswith(beginning):
            return f". Missed: {reason}"
    return ""


def _where(result: Mapping[str, Any]) -> str:
    machine = result["hardware"]
    devices = [device["name"] for device in machine["devices"]]
    return ", ".join(devices) or f"{machine['usable_cores']} CPU cores"


def _commands(results: Mapping[str, Any]) -> str:
    rows = ["| figures | command | measured |", "|---|---|---|"]
    for name in ORDER:
        result = results.get(name)
        if result is None:
            rows.append(f"| {name} | `python -m benchmarks {name}` | {UNMEASURED} |")
            continue
        days = sorted({case["measured"][:10] for case in result["cases"]})
        minutes = sum(case["took_seconds"] for case in result["cases"]) / 60
        rows.append(
            f"| {name}: {result['title']} | `{result['command']}` | "
            f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {minutes:.1f} minutes |"
        )
    return "\n".join(rows) + (
        "\n\n`nox -s bench -- NAME` is the same in an environment of its own, "
        "`python -m benchmarks all --output docs/results` measures all that needs no GPU, and "
        "`--quick` shows within seconds that a benchmark works."
    )


def _limits(results: Mapping[str, Any]) -> Iterator[str]:
    header = [
        "| case | what | per step | reached | limit | share |",
        "|---|---|--:|--:|--:|--:|",
    ]
    rows = [
        _limit(case["name"], limit)
        for result in results.values()
        for case in result["cases"]
        for limit in case.get("facts", {}).get("limits", ())
    ]
    if rows:
        yield (
            "What a step must do at least, and how near it came to the fastest that this machine "
            "was seen to do it:"
        )
        yield "\n".join(header + rows)
    if "sdxl" not in results:
        yield "SDXL's U-Net at 1024 x 1024, batch 8:"
        yield "\n".join(
            [
                "| what | per step | reached |",
                "|---|--:|---|",
                *(f"| {what} | {least} | {UNMEASURED} |" for what, least in SDXL_LIMITS),
            ]
        )


def _limit(case: str, limit: Mapping[str, Any]) -> str:
    unit = limit["unit"]
    share = limit["reached_per_second"] / limit["limit_per_second"]
    cells = [
        case,
        limit["what"],
        _scaled(limit["per_step"], unit),
        _scaled(limit["reached_per_second"], unit) + "/s",
        f"{_scaled(limit['limit_per_second'], unit)}/s ({limit['limit']})",
        f"{100 * share:.0f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def _scaled(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _memory(results: Mapping[str, Any]) -> Iterator[str]:
    result = results.get("memory")
    if result is None:
        yield f"{UNMEASURED.capitalize()}: `python -m benchmarks memory`."
        return
    yield f"The plan's estimate beside the peak of real steps, {_where(result)}:"
    rows = [
        "| plan | peak of the process | in use | estimated | to what is in use | to the peak |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in result["cases"]:
        if "refused" in case:
            rows.append(f"| {case['name']} | did not run: {case['refused']} | | | | |")
            continue
        measured, estimated = (case["contestants"][of] for of in ("measured", "estimated"))
        in_use = case["contestants"].get("measured, without freed blocks", measured)
        for quantity, found in estimated.items():
            cells = [
                case["name"],
                amount(measured[quantity]["median"], quantity),
                amount(in_use[quantity]["median"], quantity),
                amount(found["median"], quantity),
                f"{100 * (found['median'] / in_use[quantity]['median'] - 1):+.1f} %",
                f"{100 * (found['median'] / measured[quantity]['median'] - 1):+.1f} %",
            ]
            rows.append("| " + " | ".join(cells) + " |")
    yield "\n".join(rows)
    yield (
        "On a CPU the C library keeps freed blocks of up to 32 MiB for later, which the peak of "
        "the process holds too: leave room for it there."
    )


def _details(results: Mapping[str, Any]) -> Iterator[str]:
    if results:
        yield "## All figures"
    for name, result in results.items():
        yield f"### {name}"
        yield f"{result['title'][0].upper()}{result['title'][1:]}. {provenance(result)}"
        if (RESULTS / f"{name}.png").exists():
            yield f"![{result['title']}](results/{name}.png)"
        for case in result["cases"]:
            yield f"**{case['name']}**"
            yield from case_parts(case)


if __name__ == "__main__":
    text = page()
    TARGET.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{TARGET.name}: {len(text.splitlines())} lines\n")
