"""What every chart is drawn on and with: an empty figure, and a colour for each thing shown.

Each component of memory and each phase of a step has one. Any two components, and any two phases,
are told apart by readers with protanopia and deuteranopia too: CIEDE2000 differences of at least
15, in each way of seeing. A test simulates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from zerotune.errors import MissingDependencyError

COMPONENTS: Final[Mapping[str, str]] = {
    "weights": "#357545",
    "gathered weights": "#caf3a2",
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
PHASES: Final[Mapping[str, str]] = {
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0b4f8a",
    "optimizer": "#b3401a",
    "ema": "#2a9d78",
    "rest": "#c4c4c4",
}
"""In the order of a step."""

INK: Final = "#222222"
FAINT: Final = "#6a6a6a"
PAPER: Final = "#ffffff"
ROOM: Final = "#f0f0f0"
"""What is free."""
ALARM: Final = "#b2182b"
PALE: Final = "#9ecae1"
STRONG: Final = "#08519c"
OURS: Final = "#d9601a"
"""zerotune's own bars in a comparison."""
BASELINE: Final = "#4d6b80"
"""What they are compared with."""
OTHERS: Final = "#b4c3cd"
_SPARE: Final = ("#c9a0dc", "#555555", "#ee9a6a", "#8fa68f")


def empty_figure(**how: Any) -> Any:
    """A figure of matplotlib, which is loaded only now, with its canvas."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"plots require matplotlib ({error})",
            key="matplotlib",
            fix="run pip install 'zerotune[plot]'",
        ) from error
    # Not pyplot: that would choose a backend for the whole process and keep the figure.
    figure = Figure(**how)
    FigureCanvasAgg(figure)
    return figure


def component_colours(components: Iterable[str]) -> dict[str, str]:
    """A colour for each component: always the same for zerotune's own, a spare one for others."""
    unknown = [name for name in dict.fromkeys(components) if name not in COMPONENTS]
    spare = {name: _SPARE[place % len(_SPARE)] for place, name in enumerate(unknown)}
    return {**COMPONENTS, **spare}
