"""Draw the charts that depend on the code: ``python docs/generate_pictures.py``.

Draws README's memory chart and the charts of docs/results, and writes the pages of results. Each
file also contains the chart's data as text, so that a test notices when the code's answer changes.
``nox -s demo`` draws the digits, and docs/generate_builder.py takes the builder's screenshots.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).resolve().parent
# Make ``bench`` importable, from whatever folder the script is started.
sys.path.insert(0, str(DOCS.parent))

from bench.runner import compact, load, refreshed  # noqa: E402
from bench.show import amount, machine, more_is_better, title, unit_of  # noqa: E402
from zerotune import cli  # noqa: E402
from zerotune._util.files import write_atomically  # noqa: E402
from zerotune._util.palette import BASELINE, OTHERS, OURS, empty_figure  # noqa: E402
from zerotune.plan import DeepSpeedPlan  # noqa: E402

PICTURE = DOCS / "images" / "memory.png"
COMMAND = "plan advise --family sdxl --vram 12 --ram 128 --ema host"
ANSWER = "zerotune-answer"
RESULTS = DOCS / "results"
APART = 8
"""Cases of one quantity get panels of their own if their largest bars differ by this factor."""
TALLEST = 8.8
"""Height of a chart in inches, at 100 pixels per inch, that only ``LOWEST_LINE`` exceeds."""
LOWEST_LINE = 0.13
"""Height in inches below which the names of neighbouring bars overlap."""
MARGIN = 0.6
"""Lines between the top of a panel and its first name."""
SHOWN = "zerotune-shown"
"""Metadata key under which a chart stores its data, so that a test finds outdated charts."""


def answer() -> dict[str, dict[str, int]]:
    """Return the bytes of each component at the peaks of device and host, as in README's chart."""
    advice = DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="128GiB", ema="host")
    found: dict[str, dict[str, int]] = {}
    for place in ("device", "host"):
        parts = found.setdefault(place, {})
        for item in advice.estimate.peak(place).items:
            parts[item.component] = parts.get(item.component, 0) + item.nbytes
    return found


def results() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Yield the file, the stored data and the current data of each result that has a chart."""
    for path in sorted(RESULTS.glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if path.with_suffix(".png").exists():
            yield path, stored, refreshed(stored, load(path.stem))


def draw_results() -> None:
    """Write charts and pages with the current titles and goals of the benchmarks."""
    for path, _, today in results():
        path.write_text(compact(today), encoding="utf-8")
        draw(today, path.with_suffix(".png"))
    runpy.run_path(str(DOCS / "generate_performance.py"), run_name="__main__")


def draw_memory() -> None:
    """Draw README's memory chart with the command in README."""
    cli.main([*COMMAND.split(), "--chart", str(PICTURE)])
    words = PngInfo()
    words.add_text(ANSWER, json.dumps(answer(), sort_keys=True))
    with Image.open(PICTURE) as drawn:
        drawn.load()
        drawn.save(PICTURE, pnginfo=words, optimize=True)


def panels(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results by quantity, case and implementation, for quantities with a goal."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for case in result["cases"]:
        taken = list(case["contestants"].values())
        aimed = {goal["quantity"] for goal in result["goals"] if goal["case"] == case["name"]}
        for quantity in sorted(aimed) or [next(iter(taken[0]))]:
            bars = {
                name: quantities[quantity]
                for name, quantities in case["contestants"].items()
                if quantity in quantities
            }
            found.setdefault(quantity, {})[case["name"]] = bars
    return found


def shown(result: Mapping[str, Any]) -> str:
    """Return all data of a result's chart as text."""
    return json.dumps([result["title"], machine(result), result["ours"], panels(result)])


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per quantity, with a bar and quartiles per implementation and case."""
    drawn = [
        (quantity, cases)
        for quantity, all_cases in panels(result).items()
        for cases in _by_size(all_cases)
    ]
    # Bars, a name for each case, and the margin above the first name.
    lines = [sum(len(bars) + 1 for bars in cases.values()) + MARGIN for _, cases in drawn]
    rest = 0.5 * len(lines) + 0.8
    # A chart is no taller than a screen, if its names can be read.
    line = min(0.24, max(LOWEST_LINE, (TALLEST - rest) / sum(lines)))
    height = line * sum(lines) + rest
    figure = empty_figure(figsize=(8.0, height), dpi=100, layout="constrained")
    marks = "bar: median, line: quartiles; orange: zerotune, dark: reference"
    title = result["title"][0].upper() + result["title"][1:]
    heading = f"{textwrap.fill(title, 100)}\n{machine(result)}; {marks}"
    figure.suptitle(heading, fontsize=9)
    heights = [each + 1 for each in lines]
    axes = figure.subplots(len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (quantity, cases) in zip(axes, drawn, strict=True):
        _draw_panel(axis, quantity, cases, result, fontsize=8 if line > 0.2 else 7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={SHOWN: shown(result), "Software": None})
    write_atomically(path, picture.getvalue())


def _by_size(cases: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Mapping[str, Any]]]:
    """Group neighbouring cases whose bars can be compared on one axis."""
    groups: list[dict[str, Mapping[str, Any]]] = []
    sizes: list[float] = []
    for name, bars in cases.items():
        size = max(bar["median"] for bar in bars.values())
        within = [*sizes, size] if groups else []
        if not groups or max(within) > APART * min(within):
            groups.append({})
            sizes = []
        groups[-1][name] = bars
        sizes.append(size)
    return groups


def _draw_panel(
    axis: Any,
    quantity: str,
    cases: Mapping[str, Mapping[str, Any]],
    result: Mapping[str, Any],
    *,
    fontsize: float,
) -> None:
    baselines = {case["name"]: case["baseline"] for case in result["cases"]}
    most = max(bar["median"] for bars in cases.values() for bar in bars.values())
    size, unit = unit_of(most, quantity)
    names: list[str] = []
    for case, bars in cases.items():
        # Case names go above their bars, where there is room for the whole name.
        inside = axis.get_yaxis_transform()
        axis.text(0.005, len(names), case, fontsize=fontsize, va="center", transform=inside)
        names.append("")
        for name, bar in bars.items():
            middle, low, high = (bar[key] / size for key in ("median", "q1", "q3"))
            other = BASELINE if name == baselines[case] else OTHERS
            colour = OURS if name in result["ours"] else other
            axis.barh(len(names), middle, color=colour, height=0.7)
            axis.plot([low, high], [len(names)] * 2, color="black", linewidth=1)
            text = f" {amount(bar['median'], quantity)}"
            axis.text(max(middle, high), len(names), text, fontsize=fontsize, va="center")
            names.append(name)
    axis.set_yticks(range(len(names)), names, fontsize=fontsize)
    axis.set_ylim(len(names), -MARGIN)
    axis.margins(x=0.12)
    if not most:
        axis.set_xlim(0, 1)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    more = "higher is better" if more_is_better(quantity) else "lower is better"
    per_second = f"{title(quantity)} per second"
    named = per_second if unit == "/s" else ", ".join(filter(None, (title(quantity), unit)))
    axis.set_title(f"{named} ({result['better'] or more})", fontsize=8.5, loc="left")


if __name__ == "__main__":
    draw_memory()
    draw_results()
