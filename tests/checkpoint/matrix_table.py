"""Write ``docs/resume-matrix.md`` from the measurements of the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "resume-matrix.md"

_HEAD = """# Resuming every plan under every plan

`nox -s nightly` generates this page with real processes and real engines. For each cell, a run is
saved after 5 optimizer steps under the row's plan, and resumed for 20 steps under the column's
plan. In plan names, x1 and x2 stand for one and two processes, which share one batch. Each cell
gives the largest relative difference between the losses of the resumed run and those of an
uninterrupted run under the row's plan. In every cell, the loaded weights, Adam's moments, counters
and EMA equal those of the checkpoint bit for bit. `streamed-bf16` and `streamed-8bit` store Adam's
moments in fewer bits, so their uninterrupted runs also round the moments in every later step.

"""


def write_table(measured: dict[str, Any], rows: Sequence[str], columns: Sequence[str]) -> None:
    """Write the documentation page.

    Args:
        measured: Difference of each ``"source -> target"`` by precision, and the spread.
        rows: The plans under which the runs were saved.
        columns: The plans under which they were resumed.
    """
    parts = [_HEAD]
    for precision in ("fp32", "bf16"):
        values = measured[precision]
        parts.append(
            f"## {precision}\n\nLosses of uninterrupted {precision} runs under different plans "
            f"differ by up to {measured['spread'][precision]:.1e}. The largest difference in the "
            f"{precision} table is {max(values.values()):.1e}. In "
            f"{sum(not v for v in values.values())} of {len(values)} cells, all losses "
            "equal those of the uninterrupted run bit for bit.\n\n"
        )
        parts.append("| saved under | " + " | ".join(columns) + " |\n")
        parts.append("|---" * (len(columns) + 1) + "|\n")
        for source in rows:
            cells = [_cell(values[f"{source} -> {target}"]) for target in columns]
            parts.append(f"| {source} | " + " | ".join(cells) + " |\n")
        parts.append("\n")
    PAGE.write_text("".join(parts).rstrip() + "\n", encoding="utf-8")


def _cell(value: float) -> str:
    return f"{value:.1e}" if value else "0"
