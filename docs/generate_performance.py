"""Write docs/performance.md and docs/measurements.md from the results in docs/results alone.

``python docs/generate_performance.py`` writes both pages and draws the chart of gains; a test fails
if a committed page differs. ``python -m bench all --output docs/results`` writes new results.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Make ``bench`` importable, from whatever folder the script is started.
sys.path.insert(0, str(ROOT))

from bench.show import amount, case_table, machine, more_is_better  # noqa: E402
from zerotune._util.files import write_atomically  # noqa: E402
from zerotune._util.palette import BASELINE, OURS, empty_figure  # noqa: E402

RESULTS = ROOT / "docs" / "results"
TARGET = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
PICTURE = ROOT / "docs" / "images" / "performance.png"
WRITTEN_BY = "<!-- Written by docs/generate_performance.py; edit that. -->"
ORDER = (
    "models", "overhead", "checkpoint", "step", "stream", "ema", "data", "memory", "prediction",
)  # fmt: skip
BUSY = "models_busy"
"""The benchmark of models on a machine with other load."""
UNMEASURED = "not measured yet"

# Columns: benchmark, case, contestant, quantity, reference, and label on the page.
_LIKE_SD3, _LIKE_SDXL = "transformer like SD3's", "U-Net like SDXL's"
_STEPS = {
    "DeepSpeed, same configuration": (
        _LIKE_SD3, _LIKE_SDXL, "transformer like Flux's", f"adapters on a {_LIKE_SD3}",
    ),
    "torch, fused AdamW": (_LIKE_SD3, _LIKE_SDXL),
    "FSDP2 with CPU offload": (_LIKE_SD3, _LIKE_SDXL),
}  # fmt: skip
"""Cases of the benchmark of models on the page, by what zerotune is compared with."""
GAINS = (
    *(
        ("models", case, "zerotune", "cpu_seconds", other, f"a step with an EMA, {case}")
        for other, cases in _STEPS.items()
        for case in cases
    ),
    ("step", "step alone", "one pass, one EMA", "seconds", "DeepSpeed's separate passes, one EMA",
     "Adam and the EMA in host memory, one pass"),
    ("checkpoint", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "resume_seconds",
     "hand-written DeepSpeed", "a resume, ZeRO-2"),
    ("checkpoint", "ZeRO-3", "zerotune Trainer", "resume_seconds", "hand-written DeepSpeed",
     "a resume, ZeRO-3"),
    ("checkpoint", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "save_to_disk_seconds",
     "hand-written DeepSpeed", "a save flushed to disk, ZeRO-2"),
    ("checkpoint", "ZeRO-3", "zerotune Trainer", "save_to_disk_seconds", "hand-written DeepSpeed",
     "a save flushed to disk, ZeRO-3"),
    ("ema", "update", "EMAShadow", "seconds", "diffusers EMAModel, foreach", "an EMA update"),
    ("ema", "update", "EMAShadow", "seconds", "timm ModelEmaV3, foreach", "an EMA update"),
)  # fmt: skip
COSTS = (
    ("overhead", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "seconds",
     "hand-written DeepSpeed", "a Trainer step without an EMA, ZeRO-2"),
    ("overhead", "ZeRO-3", "zerotune Trainer", "seconds", "hand-written DeepSpeed",
     "a Trainer step without an EMA, ZeRO-3"),
    ("overhead", "ZeRO-2, optimizer in RAM", "zerotune Trainer", "host_bytes",
     "hand-written DeepSpeed", "host memory of this step, ZeRO-2"),
    ("overhead", "ZeRO-3", "zerotune Trainer", "host_bytes", "hand-written DeepSpeed",
     "host memory of this step, ZeRO-3"),
    ("data", "pixels", "BucketStream of an ImageFolder", "images_per_second",
     "DataLoader, files in memory", "images per second from a folder"),
)  # fmt: skip
"""Rows of the page's tables; each is a goal or a comparison of its benchmark."""

METHOD = """\
Each benchmark consists of cases, and each case compares several implementations. The
implementations of a case run alternately, round by round, on one machine, so that a slowdown of the
machine affects all of them. A ratio is the median of the ratios of all rounds. If the machine's
speed changes from round to round, the ratio can differ from the quotient of the two medians in the
table: one may be above 1 and the other below. In this case, the ratio is more reliable. The
interval in brackets is a 95 % confidence interval of the median ratio; it is based on order
statistics, so it holds for any distribution. With five rounds, the interval extends from the lowest
to the highest ratio, and its confidence is 94 %. A figure without an interval was measured once. A
goal counts as met if the whole interval meets it, and as missed if the whole interval misses it. If
the interval contains the goal, the table says whether the median meets the goal, and that the
difference is within the noise. The JSON files contain medians, quartiles, settings and versions.

Memory estimates are compared with two measurements. Memory *in use* is the total size of the
process's live blocks. The *peak memory of the process* also contains freed blocks that the C
library keeps for reuse; on a CPU, they can raise the peak by a fifth. An estimate may be at most
3 % below the memory in use, and at most 10 % above the process's peak memory. An estimate is
**not** an upper bound on the peak memory."""

# The reference system's published figures: SDXL's full U-Net, ZeRO-2 with the optimizer in RAM, on
# an RTX 4090 with 24 GB.
PUBLISHED = (
    ("1024², batch 8", "13,102 MiB, 8 s per iteration", "8.5 GiB, 0.7 of the time"),
    ("1024², batch 1", "perhaps 8 GiB, untested", "6.9 GiB; 4 GiB at stage 3"),
    ("128², batch 8", "9,237 MiB", "3.5 GiB at stage 3"),
)

# Work of one step of SDXL's U-Net at 1024 x 1024 and batch 8, with gradient checkpointing: 2.567
# billion parameters, 25.4 TFLOP per sample.
SDXL_PARAMETERS, SDXL_FLOPS = 2.567e9, 8 * 25.4e12
LEAST = (
    ("computation", f"{SDXL_FLOPS / 1e12:.0f} TFLOP"),
    (
        "bus traffic, ZeRO-2, optimizer in RAM: fp32 gradients to RAM, bf16 weights to the device",
        f"{6 * SDXL_PARAMETERS / 1e9:.1f} GB",
    ),
    (
        "host memory traffic, Adam: reads weights, gradients, moments; writes weights, moments",
        f"{28 * SDXL_PARAMETERS / 1e9:.1f} GB",
    ),
)

REASONS: Mapping[tuple[str, str], str] = {
    ("checkpoint", "ZeRO-2, optimizer in RAM: a save"): (
        "zerotune's save also reads every byte back and hashes it"
    ),
    ("checkpoint", "ZeRO-3: a save"): "zerotune's save also reads every byte back and hashes it",
}
"""Reasons for missed goals, by benchmark and the beginning of the goal's text."""


LOWER_BOUNDS = """\
A training step of SDXL's full U-Net at 1024 x 1024, with batch 8 and recomputed blocks, needs at
least:"""

ABOUT = """\
A ratio below 1 means that zerotune needed less time or memory than the reference. zerotune and the
reference ran alternately. The brackets contain a 95 % confidence interval
([method](measurements.md#method))."""

ONE_PASS = """\
zerotune runs Adam, unscaling, clipping and every EMA in a single pass over host memory; DeepSpeed
and a separate EMA need several passes. On a GPU, the [host
engine](engines.md#the-host-engine), which runs the single pass, is the default once its checks (run
at the first start or by `zerotune doctor --prove`) have passed on this GPU ([proven on this
machine](diagnostics.md#proven-on-this-machine))."""

NOT_ON_A_GPU = """\
No figure on this page was measured on a GPU. The costs of offload over a bus, the overlap with
computation on a device, and the device's memory are predictions ([memory](memory.md)). On a GPU
with at least 24 GiB, `python -m bench.gpu` measures the costs of offload. It trains SDXL's full
U-Net alternately with zerotune and with the reference configuration, whose figures were published
for an RTX 4090 with 24 GB:"""

REPEAT = """\
`python -m pip install nox && nox -s bench -- all` runs all measurements, which takes about half an
hour on an idle machine. For all figures and goals, the method and the commands, see
[measurements](measurements.md)."""

EVERYTHING = """\
This page contains all results of zerotune's benchmarks. `docs/generate_performance.py` writes this
page from the files in `docs/results`. For a summary, see [performance](performance.md)."""


def result() -> str:
    """Return the sentence about performance in README and on the landing page."""
    results = stored()
    one, two = (compared_in(results[name], *compared) for name, *compared, _ in GAINS[:2])
    return (
        f"a training step with an EMA takes {one['reached']:.2f} (a transformer like SD3's) and"
        f" {two['reached']:.2f} (a U-Net like SDXL's) of the CPU time that DeepSpeed with the same"
        " configuration needs"
    )


def page() -> str:
    """Return docs/performance.md."""
    results = stored()
    days = sorted(case["measured"][:10] for result in results.values() for case in result["cases"])
    period = f"between {days[0]} and {days[-1]}"
    parts = [
        WRITTEN_BY,
        "# Performance",
        f"The figures on this page were measured {period}, without a GPU, on {_machines(results)}.",
        ABOUT,
        f"![Time of zerotune relative to each reference](images/{PICTURE.name})",
        "## Gains",
        ONE_PASS,
        _compared(results, GAINS),
        "## Costs",
        _compared(results, COSTS),
        _estimates(results["memory"]),
        "## On a busy machine",
        *_busy(),
        "## Not measured yet",
        NOT_ON_A_GPU,
        _published(),
        "## Repeating the measurements",
        REPEAT,
    ]
    return "\n\n".join(parts) + "\n"


def _busy() -> Iterator[str]:
    """Yield the section's parts: the rows of models, measured beside other programs."""
    busy = _result(BUSY)
    loads = [case["load_before"] for case in busy["cases"]]
    yield (
        "The steps of models above ran alone or with priority over other programs. Beside other"
        f" programs, with a load average of {min(loads):.0f} to {max(loads):.0f} on"
        f" {busy['hardware']['usable_cores']} cores, the ratios were:"
    )
    yield _compared({"models": busy}, [row for row in GAINS if row[0] == "models"])


def _machines(results: Mapping[str, Any]) -> str:
    return "; ".join(dict.fromkeys(machine(result) for result in results.values()))


def measurements() -> str:
    """Return docs/measurements.md."""
    results = stored()
    parts = [
        WRITTEN_BY,
        "# Measurements",
        EVERYTHING,
        "## Goals",
        f"All goals were measured on {_machines(results)}.",
        _headline(results),
        "## Method",
        METHOD,
        "## Commands",
        _commands(results),
        "## Lower bounds of a step on a GPU",
        LOWER_BOUNDS,
        "\n".join(
            ["| quantity | per step |", "|---|--:|", *(f"| {' | '.join(row)} |" for row in LEAST)]
        ),
        "## The memory model",
        *_memory(results["memory"]),
        "## All figures",
        *_details(results),
    ]
    return "\n\n".join(parts) + "\n"


def stored() -> dict[str, dict[str, Any]]:
    """Return the stored results, in the order of the page."""
    return {name: _result(name) for name in ORDER}


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _compared(results: Mapping[str, Any], table: Sequence[tuple[str, ...]]) -> str:
    rows = ["| zerotune | compared with | ratio (95 %) | result |", "|---|---|--:|---|"]
    for name, *compared, words in table:
        found = compared_in(results[name], *compared)
        rows.append(f"| {words} | {compared[-1]} | {_spread(found)} | {_side(found)} |")
    return "\n".join(rows)


def _estimates(result: Mapping[str, Any]) -> str:
    of_use, of_peak = [], []
    for case in result["cases"]:
        peak, in_use, estimated = _three(case)
        of_use.append(100 * (estimated / in_use - 1))
        of_peak.append(100 * (estimated / peak - 1))
    return (
        f"For {len(of_use)} plans, the memory estimate differs by {_range(of_use)} from the "
        f"memory in use, and by {_range(of_peak)} from the process's peak memory."
    )


def draw() -> None:
    """Draw the chart of gains: a bar for each ratio with its interval, and a line at 1."""
    results = stored()
    found = [(words, compared_in(results[name], *c)) for name, *c, words in GAINS]
    figure = empty_figure(figsize=(8.0, 0.36 * len(found) + 1.0), dpi=100, layout="constrained")
    axis = figure.subplots()
    for line, (_, goal) in enumerate(found):
        low, high = goal["interval"]
        axis.barh(line, goal["reached"], color=OURS, height=0.6)
        axis.plot([low, high], [line, line], color="black", linewidth=1)
        # A white box, because the line at 1 must not cross the number.
        words = f"{goal['reached']:.2f}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(max(goal["reached"], high) + 0.02, line, words, va="center", bbox=box)
    labels = [f"{words}\ncompared with {goal['against']}" for words, goal in found]
    axis.axvline(1, color=BASELINE, linewidth=1.5)
    axis.set_yticks(range(len(found)), labels, fontsize=8)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("time relative to the reference, which is 1; line: 95 % interval", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_atomically(PICTURE, picture.getvalue())


def compared_in(
    result: Mapping[str, Any], case: str, contestant: str, quantity: str, against: str
) -> Mapping[str, Any]:
    """Return a result's comparison of one implementation with another."""
    wanted = case, contestant, quantity, against
    keys = ("case", "contestant", "quantity", "against")
    (found,) = (goal for goal in result["goals"] if tuple(goal[key] for key in keys) == wanted)
    return found


def _spread(goal: Mapping[str, Any]) -> str:
    """Format as ``"1.046 (0.989 to 1.097)"``."""
    low, high = goal["interval"]
    middle = f"{goal['reached']:.3f}"
    return middle if low == high else f"{middle} ({low:.3f} to {high:.3f})"


def _side(goal: Mapping[str, Any]) -> str:
    """Return whether the ratio differs from 1, and to which side."""
    low, high = goal["interval"]
    if low <= 1 <= high:
        return "no difference beyond the noise"
    return "better" if (low > 1) == more_is_better(goal["quantity"]) else "worse"


def _three(case: Mapping[str, Any]) -> list[float]:
    """Return the peak of the process, the memory in use and the estimate, in bytes."""
    names = ("measured", "measured, without freed blocks", "estimated")
    return [case["contestants"][name]["host_bytes"]["median"] for name in names]


def _range(found: list[float]) -> str:
    return f"{min(found):+.1f} to {max(found):+.1f} %"


def _published() -> str:
    rows = ["| SDXL's full U-Net | published | our goal | zerotune |", "|---|---|---|---|"]
    rows += [
        f"| {size} | {theirs} | at most {goal} | {UNMEASURED} |" for size, theirs, goal in PUBLISHED
    ]
    return "\n".join(rows)


def _headline(results: Mapping[str, Any]) -> str:
    rows = [
        "| goal | reference | zerotune | ratio (95 %) | met |",
        "|---|--:|--:|--:|---|",
    ]
    for name, result in results.items():
        cases = {case["name"]: case["contestants"] for case in result["cases"]}
        for goal in result["goals"]:
            if goal["limit"] is None:
                continue
            quantity, against = goal["quantity"], goal["against"]
            medians = {
                contestant: amount(quantities[quantity]["median"], quantity)
                for contestant, quantities in cases[goal["case"]].items()
                if quantity in quantities
            }
            most = "at most " + amount(goal["limit"], quantity)
            cells = [
                goal["text"] + _reason(name, goal), medians[against] if against else most,
                medians[goal["contestant"]], _spread(goal) if against else "", met(goal),
            ]  # fmt: skip
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def met(goal: Mapping[str, Any]) -> str:
    """Return whether a goal is met, missed, or within the noise."""
    (low, high), limit = goal["interval"], goal["limit"]
    more = more_is_better(goal["quantity"])
    reached = goal["reached"] >= limit if more else goal["reached"] <= limit
    if low <= limit <= high and low < high:
        return f"{'met' if reached else 'missed'} at the median, within the noise"
    return "yes" if reached else "**no**"


def _reason(name: str, goal: Mapping[str, Any]) -> str:
    if met(goal) != "**no**":
        return ""
    for (benchmark, beginning), reason in REASONS.items():
        if benchmark == name and goal["text"].startswith(beginning):
            return f". Missed: {reason}"
    return ""


def _commands(results: Mapping[str, Any]) -> str:
    rows = ["| figures | command | measured |", "|---|---|---|"]
    for name, result in results.items():
        days = sorted({case["measured"][:10] for case in result["cases"]})
        minutes = sum(case["took_seconds"] for case in result["cases"]) / 60
        rows.append(
            f"| {name}: {result['title']} | `{result['command']}` | "
            f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {minutes:.1f} minutes |"
        )
    return "\n".join(rows) + (
        "\n\n`nox -s bench -- NAME` runs the benchmark NAME in a separate environment. "
        "`python -m bench all --output docs/results` runs all benchmarks that need no GPU. "
        "With `--quick`, `python -m bench` checks within seconds that a benchmark works."
    )


def _memory(result: Mapping[str, Any]) -> Iterator[str]:
    cores = result["hardware"]["usable_cores"]
    yield f"The table compares memory estimates with the memory of real steps on {cores} CPU cores:"
    rows = [
        "| plan | peak memory | in use | estimated | against in use | against the peak |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in result["cases"]:
        three = _three(case)
        cells = [case["name"], *(amount(nbytes, "host_bytes") for nbytes in three)]
        cells += [f"{100 * (three[2] / other - 1):+.1f} %" for other in (three[1], three[0])]
        rows.append("| " + " | ".join(cells) + " |")
    yield "\n".join(rows)
    yield (
        "On a CPU, the C library keeps freed blocks of up to 32 MiB for reuse. The process's "
        "peak memory includes these blocks, so leave some additional memory free for them."
    )


def _lanes(result: Mapping[str, Any]) -> Iterator[str]:
    """Compare the time model with the clock, by lane."""
    lanes = ("computation", "weights to the device", "gradients off it", "host pass")
    yield (
        "The next table compares the predicted time of a step with the clock of the simulated "
        "accelerator, on which the real engine runs. Both use the same rates. For the step and for "
        "each lane, it shows the predicted seconds and by how much they differ from the clock's."
    )
    rows = [
        "| case | plan | step | predicted | " + " | ".join(lanes) + " |",
        "|---|---|--:|--:|" + "--:|" * len(lanes),
    ]
    for case in result["cases"]:
        for plan, found in case["contestants"].items():
            if "predicted_seconds" not in found:
                continue
            step, predicted = (found[q]["median"] for q in ("seconds", "predicted_seconds"))
            cells = [case["name"], plan, f"{step:.2f} s", _against(step, predicted)]
            cells += [_against(*case["facts"][f"{plan}, {lane}"]) for lane in lanes]
            rows.append("| " + " | ".join(cells) + " |")
    yield "\n".join(rows)


def _against(clocked: float, predicted: float) -> str:
    return f"{predicted:.2f} s ({100 * (predicted / clocked - 1):+.1f} %)"


def _details(results: Mapping[str, Any]) -> Iterator[str]:
    for name, result in results.items():
        yield f"### {name}"
        packages = ", ".join(
            f"{package} {number}" for package, number in result["versions"].items()
        )
        yield (
            f"The benchmark `{name}` measures {result['title']}. It ran on "
            f"{machine(result)}. The installed versions were {packages}. To repeat it, run "
            f"`{result['command']}`."
        )
        yield f"![{result['title']}](results/{name}.png)"
        if name == "stream":
            yield from _lanes(result)
        for case in result["cases"]:
            yield f"#### {case['name']}"
            yield case_table(case)
            yield from case["notes"]


if __name__ == "__main__":
    draw()
    for target, text in ((TARGET, page()), (MEASUREMENTS, measurements())):
        target.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{target.name}: {len(text.splitlines())} lines\n")
