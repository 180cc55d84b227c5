"""Draw docs/images/streaming.png: ``python docs/generate_streaming.py``; takes a few minutes.

The picture shows what each lane does in two steps of SD3 Medium on a catalogued card. The real
engine runs on the simulated accelerator, in virtual time (``bench/on_card.py``).
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

from bench.on_card import BACKWARD, COMPUTE, FORWARD, HOST, IN, OUT  # noqa: E402
from bench.stream import CLIPPED, EAGER, rehearse  # noqa: E402
from zerotune._util.files import write_atomically  # noqa: E402
from zerotune._util.palette import BASELINE, OTHERS, OURS, empty_figure  # noqa: E402

PICTURE = DOCS / "images" / "streaming.png"
CASE = {"model": "sd3-medium", "card": "RTX 4090", "batch": 8}
LANES = {COMPUTE: "compute", IN: IN, OUT: "gradients to the host", HOST: "optimizer pass"}
PANELS = {
    "gradient_clipping 0: a block is updated as soon as its gradients are on the host": EAGER,
    "gradient_clipping 1.0: all blocks are updated in the next forward, after the norm": CLIPPED,
}
NARROWEST = 0.006
"""Share of the picture's width that a span with a number needs."""
Spans = Sequence[tuple[str, str, float, float]]


def draw(panels: dict[str, Spans]) -> bytes:
    """Draw a panel for each recording, all with the same time axis."""
    figure = empty_figure(figsize=(14.0, 4.6), dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    last = max(end for spans in panels.values() for *_, end in spans)
    for axis, (title, spans) in zip(axes, panels.items(), strict=True):
        axis.set_title(title, fontsize=9, loc="left")
        for span in spans:
            _draw_span(axis, *span, last=last)
        axis.set_yticks(range(len(LANES)), list(LANES.values()), fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, last)
        axis.tick_params(axis="x", labelsize=8)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel(
        "seconds in virtual time; numbers are blocks; light: forward, dark: backward", fontsize=8
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _draw_span(axis: Any, lane: str, label: str, began: float, end: float, *, last: float) -> None:
    phase, _, block = label.rpartition("|")
    number = block.rpartition(".")[2]
    row, began = list(LANES).index(lane), max(began, 0.0)
    colour = {FORWARD: OTHERS, BACKWARD: BASELINE}.get(phase, OURS)
    axis.barh(row, end - began, left=began, height=0.72, color=colour, edgecolor="white", lw=0.3)
    if number.isdigit() and end - began > NARROWEST * last:
        axis.text(
            (began + end) / 2, row, number, ha="center", va="center", fontsize=5,
            color="white" if phase == BACKWARD else "black",
        )  # fmt: skip


if __name__ == "__main__":
    panels = {title: rehearse({**CASE, "plan": plan}).spans for title, plan in PANELS.items()}
    write_atomically(PICTURE, draw(panels))
