"""A result as a picture: every sample, the median, the quartiles."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.framework.tables import title, unit_of
from zerotune._util.palette import BASELINE, CONTESTANT

_HEIGHT, _WIDTH = 0.42, 7.5


def plot(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw all cases of a result; ``None`` where matplotlib is missing or nothing was measured."""
    panels = [
        (case, quantity)
        for case in result["cases"]
        if "refused" not in case
        for quantity in dict.fromkeys(
            quantity for found in case["contestants"].values() for quantity in found
        )
    ]
    if not panels or find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    rows = [len(_with(case, quantity)) for case, quantity in panels]
    # Not pyplot: it would keep every figure and ask for a display.
    figure = Figure(
        figsize=(_WIDTH, sum(rows) * _HEIGHT + 0.9 * len(rows)), layout="constrained", dpi=110
    )
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1.5 for n in rows])
    for axis, (case, quantity) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, case, quantity)
    figure.savefig(path)
    return path


def _with(case: Mapping[str, Any], quantity: str) -> dict[str, Any]:
    contestants = case["contestants"]
    return {name: found[quantity] for name, found in contestants.items() if quantity in found}


def _panel(axis: Any, case: Mapping[str, Any], quantity: str) -> None:
    found = _with(case, quantity)
    size, unit = unit_of(max(values["max"] for values in found.values()), quantity)
    for place, (name, values) in enumerate(found.items()):
        own = BASELINE if name == case["baseline"] else CONTESTANT
        axis.barh(place, values["median"] / size, color=own, height=0.62, zorder=1)
        axis.plot(
            [values["q1"] / size, values["q3"] / size], [place, place],
            color="black", linewidth=2, zorder=2,
        )  # fmt: skip
        axis.plot(
            [sample / size for sample in values["samples"]], [place] * len(values["samples"]),
            "|", color="black", alpha=0.4, zorder=3,
        )  # fmt: skip
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=min(0.0, *(values["min"] / size for values in found.values())))
    axis.tick_params(axis="x", labelsize=8)
    named = f"{title(quantity)}, {unit}" if unit else title(quantity)
    axis.set_title(f"{case['name']}: {named}", fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
