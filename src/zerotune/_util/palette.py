"""Common parts of all charts: an empty matplotlib figure, and colours.

Each component of memory has a colour. Readers with protanopia or deuteranopia can also tell any two
components apart: the CIEDE2000 differences are at least 15 in each kind of vision, which a test
simulates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from zerotune.errors import MissingDependencyError

COMPONENTS: Final[Mapping[str, str]] = {
    "weights": "#357545",
    # Weights that are on the device only while they are used; no plan has both.
    "gathered weights": "#caf3a2",
    "streamed weights": "#caf3a2",
    "master weights": "#b7ecff",
    "optimizer states": "#0101e6",
    "gradients": "#d7bb00",
    "accumulated gradients": "#5c3300",
    "activations": "#ae767c",
    "buckets": "#808b00",
    "temporaries": "#6f1238",
    "staging": "#8d4f6b",
    "swap buffers": "#d49676",
    "EMA": "#08bbec",
    "pinned cache": "#0a0f00",
    "frozen parts": "#003875",
    "model as loaded": "#387ef6",
    "checkpoint": "#d9e5d8",
    "context": "#a8adb2",
    "runtime": "#7880a1",
}
INK: Final = "#222222"
FAINT: Final = "#6a6a6a"
PAPER: Final = "#ffffff"
ROOM: Final = "#f0f0f0"
"""Colour of free memory."""
ALARM: Final = "#b2182b"
OURS: Final = "#d9601a"
"""Colour of zerotune's bars in a comparison."""
BASELINE: Final = "#4d6b80"
"""Colour of the bars with which zerotune is compared."""
OTHERS: Final = "#b4c3cd"
_SPARE: Final = ("#c9a0dc", "#555555", "#ee9a6a", "#8fa68f")


def empty_figure(**how: Any) -> Any:
    """Return a matplotlib figure with a canvas; matplotlib is imported only here."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"plots require matplotlib ({error})", "run pip install 'zerotune[plot]'", "matplotlib"
        ) from error
    # Not pyplot: that would choose a backend for the whole process and keep the figure.
    figure = Figure(**how)
    FigureCanvasAgg(figure)
    return figure


def component_colours(components: Iterable[str]) -> dict[str, str]:
    """Return a colour for each component: fixed for zerotune's own, a spare one for others."""
    unknown = [name for name in dict.fromkeys(components) if name not in COMPONENTS]
    spare = {name: _SPARE[place % len(_SPARE)] for place, name in enumerate(unknown)}
    return {**COMPONENTS, **spare}
