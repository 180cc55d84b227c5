"""Write what each optimizer can do where into docs/optimizers.md, from the package's table.

``python docs/generate_optimizers.py``; a test fails when the page is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from zerotune.optim.capability import CapabilityTable
from zerotune.optimizers.catalogue import OPTIMIZERS

PAGE = Path(__file__).with_name("optimizers.md")
BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
_LEGEND = (
    "✓ works, ◐ works with a change that `capability(…)` names (both were run), "
    "✗ cannot, · not run."
)


def rendered(table: CapabilityTable) -> str:
    """The table for the docs: a row a name, a column a place."""
    columns = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"),
               (3, "cpu"), (3, "nvme")]  # fmt: skip
    head = [
        f"Z{stage}" + ("" if offload == "none" else f" {offload}") for stage, offload in columns
    ]
    versions = ", ".join(f"{package} {number}" for package, number in table.versions.items())
    lines = [
        f"Run with {versions} on {table.platform}, accelerator {table.accelerator}.",
        "A cell with two marks: fp32, then bf16.",
        "",
        f"| name | {' | '.join(head)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    notes: dict[str, int] = {}
    for name in OPTIMIZERS:
        row = [_mark(table, name, place, notes) for place in columns]
        lines.append(f"| {name} | {' | '.join(row)} |")
    lines += [
        "",
        _LEGEND,
    ]
    lines += [""] + [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join(lines)


def _mark(table: CapabilityTable, name: str, place: tuple[int, str], notes: dict[str, int]) -> str:
    marks = []
    for precision in ("fp32", "bf16"):
        cell = table.cells.get((name, *place, precision))
        mark = (
            "·" if cell is None else {"works": "✓", "works with": "◐", "cannot": "✗"}[cell.outcome]
        )
        if cell is not None and cell.reason:
            mark += f"<sup>{notes.setdefault(cell.reason, len(notes) + 1)}</sup>"
        marks.append(mark)
    return marks[0] if marks[0] == marks[1] else " ".join(marks)


def page() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rendered(CapabilityTable.stored())}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
