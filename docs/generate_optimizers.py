"""Write the table of optimizers, stages and offload into docs/optimizers.md.

``docs/results/capabilities.json`` is the source. Run ``python docs/generate_optimizers.py``; a test
fails if the page differs.
"""

from __future__ import annotations

from pathlib import Path

from tools.capability_table import CapabilityTable
from zerotune.plan.optimizer.catalogue import OPTIMIZERS

PAGE = Path(__file__).with_name("optimizers.md")
BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
_LEGEND = (
    "✓: works; ◐: works with a change that `capability(…)` names; ✗: cannot work; ·: not run. "
    "Every combination with ✓ or ◐ was run."
)


def rendered(table: CapabilityTable) -> str:
    """Return the table for the docs: one row per optimizer, one column per stage and offload."""
    columns = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"),
               (3, "cpu"), (3, "nvme")]  # fmt: skip
    head = [
        f"Z{stage}" + ("" if offload == "none" else f" {offload}") for stage, offload in columns
    ]
    versions = ", ".join(f"{package} {number}" for package, number in table.versions.items())
    machine = f"{table.platform} (accelerator {table.accelerator})"
    lines = [
        f"The table was measured on {machine} with {versions}.",
        "If a cell has two marks, the first is for fp32 and the second for bf16.",
        "",
        f"| name | {' | '.join(head)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    notes: dict[str, list[str]] = {}
    for name in OPTIMIZERS:
        row = [_mark(table, name, place, notes) for place in columns]
        lines.append(f"| {name} | {' | '.join(row)} |")
    lines += [
        "",
        _LEGEND,
    ]
    lines += [""]
    for number, (reason, names) in enumerate(notes.items(), 1):
        lines += [f"{number}. {', '.join(names)}: {reason}."]
    return "\n".join(lines)


def _mark(
    table: CapabilityTable, name: str, place: tuple[int, str], notes: dict[str, list[str]]
) -> str:
    marks = []
    for precision in ("fp32", "bf16"):
        cell = table.cells.get((name, *place, precision))
        mark = (
            "·" if cell is None else {"works": "✓", "works with": "◐", "cannot": "✗"}[cell.outcome]
        )
        if cell is not None and cell.reason:
            names = notes.setdefault(cell.reason, [])
            if name not in names:
                names.append(name)
            mark += f"<sup>{list(notes).index(cell.reason) + 1}</sup>"
        marks.append(mark)
    return marks[0] if marks[0] == marks[1] else " ".join(marks)


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rendered(CapabilityTable.stored())}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
