"""Draw docs/images/streaming.png: ``python docs/generate_streaming.py``.

The picture shows what each lane does in two steps of eight blocks. The durations of compute, copies
and optimizer passes are simulated (``bench/stream.py``); the engine determines the order.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
# Make ``bench`` importable, from whatever folder the script is started.
sys.path.insert(0, str(DOCS.parent))

from bench.stream import BACKWARD, FORWARD, IN, OUT, PASS, Recorded  # noqa: E402
from bench.workers import Worker  # noqa: E402
from zerotune._util.files import write_atomically  # noqa: E402
from zerotune._util.palette import BASELINE, OTHERS, OURS, empty_figure  # noqa: E402

PICTURE = DOCS / "images" / "streaming.png"
BLOCKS, STEPS = 8, 2
TIMES = (0.6, 1.8, 0.46, 0.46, 1.3)
LANES = {"compute": "compute", IN: IN, OUT: "gradients to the host", PASS: "optimizer pass"}
PANELS = {
    "gradient_clipping 0: a block is updated as soon as its gradients are on the host": 0.0,
    "gradient_clipping 1.0: all blocks are updated during the next forward, after the norm": 1.0,
}
Spans = Sequence[tuple[str, str, float, float]]


def recorded(clipping: float) -> Spans:
    """Run the engine and return the spans of each lane."""
    settings = {"blocks": BLOCKS, "times": TIMES, "window": 3, "clipping": clipping}
    with Worker(Recorded, settings) as worker:
        spans: Spans = worker.call("timeline", STEPS)
    return spans


def draw(panels: dict[str, Spans]) -> bytes:
    """Draw a panel for each recording, all with the same time axis."""
    figure = empty_figure(figsize=(10.0, 4.6), dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (title, spans) in zip(axes, panels.items(), strict=True):
        axis.set_title(title, fontsize=9, loc="left")
        for span in spans:
            _draw_span(axis, *span)
        axis.set_yticks(range(len(LANES)), list(LANES.values()), fontsize=8)
        axis.invert_yaxis()
        axis.tick_params(axis="x", labelsize=8)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel(
        "seconds (simulated durations, in the engine's order); numbers are blocks; light: forward, "
        "dark: backward",
        fontsize=8,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _draw_span(axis: Any, lane: str, name: str, began: float, end: float) -> None:
    row = list(LANES).index("compute" if lane in (FORWARD, BACKWARD) else lane)
    colour = {FORWARD: OTHERS, BACKWARD: BASELINE}.get(lane, OURS)
    axis.barh(row, end - began, left=began, height=0.72, color=colour, edgecolor="white")
    dark = lane == BACKWARD
    axis.text(
        (began + end) / 2, row, name, ha="center", va="center", fontsize=7,
        color="white" if dark else "black",
    )  # fmt: skip


if __name__ == "__main__":
    write_atomically(PICTURE, draw({title: recorded(each) for title, each in PANELS.items()}))
