"""A result as Markdown and as a picture, and figures with their units.

Markdown needs the standard library only: the documentation is made with it.
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_TITLES: Final = {
    "seconds": "time", "bytes_per_second": "rate", "images_per_second": "images",
    "host_bytes": "host memory", "memory_bytes": "memory it grew by",
}  # fmt: skip
_SECONDS: Final = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
_BYTES: Final = {2.0**30: "GiB", 2.0**20: "MiB", 2.0**10: "KiB", 1.0: "B"}
SHOWN: Final = "zerotune-shown"
"""A picture holds under this name what it shows, so that a test finds an older one."""


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result: where it was measured, a table per case, the goals."""
    parts = [f"# {result['benchmark']}: {result['title']}", provenance(result)]
    for case in result["cases"]:
        parts += [f"## {case['name']}", case_table(case), *case["notes"]]
    if result["goals"]:
        rows = ["| goal | limit | reached |", "|---|--:|--:|"]
        rows += [
            f"| {goal['text']} | {goal['limit'] or ''} | {goal['reached']:.4g} |"
            for goal in result["goals"]
        ]
        parts += ["## Goals", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def provenance(result: Mapping[str, Any]) -> str:
    """Hardware, versions and command."""
    packages = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{machine(result)}. {packages}. `{result['command']}`"


def machine(result: Mapping[str, Any]) -> str:
    """The hardware it was measured on."""
    found = result["hardware"]
    devices = [f"{device['name']} ({device['gib']:g} GiB)" for device in found["devices"]]
    host = f"{found['usable_cores']} cores of {found['processor']}"
    return ", ".join([*devices, host, f"{found['host_gib']:g} GiB of RAM"])


def case_table(case: Mapping[str, Any]) -> str:
    """Medians, quartiles and the ratio to the baseline."""
    rows = [f"| | quantity | median | quartiles | to {case['baseline']} |", "|---|---|--:|--:|--:|"]
    for name, quantities in case["contestants"].items():
        for quantity, found in quantities.items():
            spread = span(found["q1"], found["q3"], quantity)
            median = amount(found["median"], quantity)
            cells = [name, title(quantity), median, spread, times(found.get("ratio"))]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def more_is_better(quantity: str) -> bool:
    """Whether a quantity is a rate."""
    return quantity.endswith("_per_second")


def title(quantity: str) -> str:
    """``"save_seconds"`` → ``"save"``; the unit stands beside the number."""
    if quantity in _TITLES:
        return _TITLES[quantity]
    for suffix in ("_seconds", "_bytes", "_bytes_per_second", "_per_second"):
        quantity = quantity.removesuffix(suffix)
    return quantity.replace("_", " ")


def amount(value: float, quantity: str) -> str:
    """A value with the unit that its quantity's name tells."""
    size, unit = unit_of(value, quantity)
    digits = 3 if unit in _SECONDS.values() else 4
    number = f"{value / size:.0f}" if unit == "B" else f"{value / size:.{digits}g}"
    return f"{number}{unit}" if unit == "/s" else f"{number} {unit}".rstrip()


def unit_of(value: float, quantity: str) -> tuple[float, str]:
    """The unit that suits a value, and how much of the quantity it is."""
    if quantity.endswith("_per_second"):
        rate = quantity.endswith("bytes_per_second")
        size, unit = _suited(value, _BYTES) if rate else (1.0, "")
        return size, f"{unit}/s"
    if quantity.endswith("seconds"):
        return _suited(value, _SECONDS)
    return _suited(value, _BYTES) if quantity.endswith("bytes") else (1.0, "")


def _suited(value: float, units: Mapping[float, str]) -> tuple[float, str]:
    *larger, smallest = units.items()
    return next((one for one in larger if abs(value) >= one[0]), smallest)


def span(low: float, high: float, quantity: str) -> str:
    """From … to, the unit once where both have the same."""
    first, last = amount(low, quantity), amount(high, quantity)
    number, _, unit = first.partition(" ")
    return f"{number} to {last}" if unit and last.endswith(f" {unit}") else f"{first} to {last}"


def times(ratio: Sequence[float] | None) -> str:
    """``"1.003 (0.998 to 1.010)"``, of quartiles."""
    if ratio is None:
        return ""
    low, middle, high = ratio
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f} to {high:.3f})"


# -- The picture.


def panels(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """By quantity and case what each contestant took, of the quantities that goals are about."""
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
    """All that the picture of a result says, as text."""
    return json.dumps([result["title"], machine(result), result["ours"], panels(result)])


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each quantity, a bar with quartiles for each contestant of each case."""
    from zerotune._util.files import write_atomically
    from zerotune._util.palette import empty_figure

    drawn = panels(result)
    lines = [sum(len(bars) + 1 for bars in cases.values()) for cases in drawn.values()]
    height = 0.24 * sum(lines) + 0.6 * len(lines) + 0.8
    figure = empty_figure(figsize=(8.0, height), dpi=100, layout="constrained")
    marks = "bar: median, line: quartiles; orange: zerotune, dark: compared with"
    heading = textwrap.fill(f"{result['title']}. {machine(result)}; {marks}", 90)
    figure.suptitle(heading, fontsize=9)
    axes = figure.subplots(len(drawn), 1, height_ratios=lines, squeeze=False)[:, 0]
    for axis, (quantity, cases) in zip(axes, drawn.items(), strict=True):
        _draw_panel(axis, quantity, cases, result)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={SHOWN: shown(result), "Software": None})
    write_atomically(path, picture.getvalue())


def _draw_panel(
    axis: Any, quantity: str, cases: Mapping[str, Mapping[str, Any]], result: Mapping[str, Any]
) -> None:
    from zerotune._util.palette import BASELINE, OTHERS, OURS

    baselines = {case["name"]: case["baseline"] for case in result["cases"]}
    most = max(bar["median"] for bars in cases.values() for bar in bars.values())
    size, unit = unit_of(most, quantity)
    names: list[str] = []
    for case, bars in cases.items():
        names.append(f"{textwrap.shorten(case, 50)}:")
        for name, bar in bars.items():
            middle, low, high = (bar[key] / size for key in ("median", "q1", "q3"))
            other = BASELINE if name == baselines[case] else OTHERS
            colour = OURS if name in result["ours"] else other
            axis.barh(len(names), middle, color=colour, height=0.7)
            axis.plot([low, high], [len(names)] * 2, color="black", linewidth=1)
            text = f" {amount(bar['median'], quantity)}"
            axis.text(max(middle, high), len(names), text, fontsize=8, va="center")
            names.append(name)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names), -0.6)
    axis.margins(x=0.12)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    more = "higher is better" if more_is_better(quantity) else "lower is better"
    named = ", ".join(filter(None, (title(quantity), unit)))
    axis.set_title(f"{named} ({result['better'] or more})", fontsize=8.5, loc="left")
