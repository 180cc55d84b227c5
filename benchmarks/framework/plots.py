"""A result as a picture: a row for each quantity, a bar for each contestant, all its samples."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.framework.tables import amount, machine, title, unit_of
from benchmarks.framework.values import more_is_better
from zerotune._util.files import write_atomically
from zerotune._util.palette import BASELINE, FAINT, INK, OTHERS, OURS, empty_figure

SHOWN: Final = "zerotune-shown"
"""Under this name a picture holds what it shows, so that an older one is found out."""

# Inches.
_WIDTH, _BAR, _ABOVE, _HEAD, _FOOT = 8.0, 0.3, 0.72, 0.75, 0.55
_LEFT, _RIGHT = 2.5, 0.9
_THICK = 0.5
"""Height of a bar; the samples stand below it."""


@attrs.frozen(kw_only=True)
class Bar:
    """A contestant's samples of one quantity."""

    name: str
    colour: str
    value: str
    """The median with its unit, as it stands beside the bar."""
    summary: Mapping[str, Any]

    @property
    def took_some(self) -> bool:
        """Whether any sample is more than nothing."""
        return any(self.summary["samples"])


@attrs.frozen(kw_only=True)
class Panel:
    """A quantity with a scale of its own: the bars of each case."""

    quantity: str
    named: str
    better: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    """Cases by name."""

    @property
    def bars(self) -> Iterator[Bar]:
        """Those of all cases."""
        return (bar for _, bars in self.groups for bar in bars)

    @property
    def lines(self) -> int:
        """Rows that the bars and the names of their cases take."""
        return sum(len(bars) + 1 for _, bars in self.groups)


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """A panel for each quantity of cases that compare the same; others have their own.

    What took nothing in any of them, as a device's time without one, has none.
    """
    alike: dict[tuple[str, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for case in result["cases"]:
        if "refused" in case:
            continue
        quantities = (quantity for found in case["contestants"].values() for quantity in found)
        for quantity in dict.fromkeys(quantities):
            alike.setdefault((quantity, tuple(case["contestants"])), []).append(case)
    found = [_panel(result, quantity, cases) for (quantity, _), cases in alike.items()]
    return [panel for panel in found if any(bar.took_some for bar in panel.bars)]


def _panel(result: Mapping[str, Any], quantity: str, cases: Iterable[Mapping[str, Any]]) -> Panel:
    better = "higher is better" if more_is_better(quantity) else "lower is better"
    groups = tuple((case["name"], tuple(_bars(result, case, quantity))) for case in cases)
    return Panel(
        quantity=quantity,
        named=title(quantity),
        better=result.get("better") or better,
        groups=groups,
    )


def _bars(result: Mapping[str, Any], case: Mapping[str, Any], quantity: str) -> Iterator[Bar]:
    for name, found in case["contestants"].items():
        if quantity not in found:
            continue
        others = BASELINE if name == case["baseline"] else OTHERS
        yield Bar(
            name=name,
            colour=OURS if name in result.get("ours", ()) else others,
            value=amount(found[quantity]["median"], quantity),
            summary=found[quantity],
        )


def caption(result: Mapping[str, Any]) -> str:
    """Where it was measured, and what the marks mean."""
    counts = sorted(
        {
            len(found["samples"])
            for case in result["cases"]
            for quantities in case.get("contestants", {}).values()
            for found in quantities.values()
        }
    )
    if counts in ([], [1]):
        return f"{machine(result)}. Bar: what was measured, once."
    samples = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    return (
        f"{machine(result)}. Bar: the median of {samples} samples; below it the quartiles (line) "
        "and every sample."
    )


def shown(result: Mapping[str, Any]) -> str:
    """All that the picture of a result says, as text."""
    found = [attrs.asdict(panel) for panel in panels(result)]
    return json.dumps([result["title"], caption(result), found], sort_keys=True)


def plot(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw all cases of a result; ``None`` where matplotlib is missing or nothing was measured."""
    found = panels(result)
    if not found or find_spec("matplotlib") is None:
        return None
    heights = [_ABOVE + panel.lines * _BAR for panel in found]
    height = _HEAD + sum(heights) + _FOOT
    figure = empty_figure(figsize=(_WIDTH, height), dpi=110)
    _write(figure, result, height)
    top = _HEAD
    for panel, own in zip(found, heights, strict=True):
        across = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        place = (_LEFT / _WIDTH, 1 - (top + own - 0.3) / height, across, (own - _ABOVE) / height)
        _draw(figure.add_axes(place), panel)
        top += own
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={SHOWN: shown(result), "Software": None})
    write_atomically(path, picture.getvalue())
    return path


def _write(figure: Any, result: Mapping[str, Any], height: float) -> None:
    """Title, key and caption."""
    text = result["title"][0].upper() + result["title"][1:]
    figure.text(0.02, 1 - 0.25 / height, text, fontsize=11, fontweight="bold", color=INK)
    at = 0.02
    for colour, words in ((OURS, "zerotune"), (BASELINE, "compared with"), (OTHERS, "others")):
        if not any(bar.colour == colour for bar in _all_bars(result)):
            continue
        figure.text(at, 1 - 0.5 / height, "\u25a0", fontsize=11, color=colour)
        figure.text(at + 0.02, 1 - 0.5 / height, words, fontsize=9, color=INK)
        at += 0.045 + 0.0105 * len(words)
    for line, words in enumerate(reversed(textwrap.wrap(caption(result), 120))):
        figure.text(0.02, (0.1 + 0.17 * line) / height, words, fontsize=8, color=FAINT)


def _all_bars(result: Mapping[str, Any]) -> list[Bar]:
    return [bar for panel in panels(result) for bar in panel.bars]


def _draw(axis: Any, panel: Panel) -> None:
    size, unit = unit_of(max(bar.summary["max"] for bar in panel.bars), panel.quantity)
    line, ticks, names = 0.0, [], []
    for case, group in panel.groups:
        axis.text(0, line, case, fontsize=8.5, fontstyle="italic", va="center", color=INK)
        for offset, bar in enumerate(group, start=1):
            _draw_bar(axis, bar, line + offset, size)
            ticks.append(line + offset)
            names.append(bar.name)
        line += len(group) + 1
    axis.set_yticks(ticks, names, fontsize=8.5)
    axis.set_ylim(line - 0.3, -0.5)
    low, high = (extreme(bar.summary[each] for bar in panel.bars) / size
                 for extreme, each in ((min, "min"), (max, "max")))  # fmt: skip
    # A share that is left over may be below zero, or nothing.
    axis.set_xlim(min(0.0, low), 1.02 * max(high, 0.0) or 1.0)
    axis.tick_params(axis="x", labelsize=8, colors=FAINT)
    axis.tick_params(axis="y", length=0)
    named = ", ".join(filter(None, (panel.named, unit)))
    axis.set_title(f"{named}: {panel.better}", fontsize=9.5, loc="left", fontweight="bold")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)


def _draw_bar(axis: Any, bar: Bar, line: float, size: float) -> None:
    found, own = bar.summary, {"color": bar.colour, "clip_on": False}
    middle = found["median"] / size
    axis.barh(line - 0.1, middle, height=_THICK, **own)
    axis.annotate(
        bar.value, (middle, line - 0.1), (3, 0), textcoords="offset points", va="center",
        fontsize=8.5, color=INK, annotation_clip=False,
    )  # fmt: skip
    if len(found["samples"]) > 1:
        below = line + 0.28
        axis.plot([found["q1"] / size, found["q3"] / size], [below] * 2, linewidth=2, **own)
        samples = [sample / size for sample in found["samples"]]
        axis.plot(samples, [below] * len(samples), "|", markersize=5, alpha=0.8, **own)
