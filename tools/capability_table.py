"""The table of test runs that ``python -m tools.capabilities`` measures.

A run starts the real engine for every name, stage, offload and precision, and trains a small
network. A test compares the rules of ``zerotune.plan.optimizer.capability`` with the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from zerotune.plan.optimizer.capability import Status

TABLE = Path(__file__).resolve().parents[1] / "docs" / "results" / "capabilities.json"


@attrs.frozen(kw_only=True)
class Cell:
    """Measured result for one optimizer with one combination of stage, offload and precision."""

    name: str
    """Canonical name."""
    stage: int
    offload: str
    precision: str
    outcome: Status
    """Measured status; also ``"cannot"`` if the optimizer ran but some weights did not change or
    the loss did not decrease."""
    reason: str = ""
    """Why the optimizer cannot run, as reported by the engine; empty if it can."""
    implementation: str = ""
    """Class that performed the update."""
    first_loss: float | None = None
    """Mean loss of the first three steps."""
    last_loss: float | None = None
    """Mean loss of the last three steps."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Tuple of name, stage, offload and precision."""
        return self.name, self.stage, self.offload, self.precision


def _cells_by_key(cells: Any) -> Mapping[tuple[str, int, str, str], Cell]:
    return {cell.key: cell for cell in cells}


@attrs.frozen(kw_only=True)
class CapabilityTable:
    """Measured results of optimizers, with the machine and the package versions."""

    accelerator: str = "cpu"
    """Accelerator in DeepSpeed's spelling."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Versions by package."""
    platform: str = ""
    """Operating system and processor."""
    cells: Mapping[tuple[str, int, str, str], Cell] = attrs.field(
        factory=dict, converter=_cells_by_key
    )

    @classmethod
    def stored(cls) -> CapabilityTable:
        """Return the table of the latest measurements."""
        return cls.from_json(TABLE.read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> CapabilityTable:
        """Parse the output of ``to_json``.

        Args:
            text: JSON text.
        """
        content = json.loads(text)
        cells = [Cell(**cell) for cell in content.pop("cells")]
        return cls(**content, cells=cells)

    def to_json(self) -> str:
        """Return the table as text, one cell per line, for readable diffs."""
        head = {
            "accelerator": self.accelerator,
            "platform": self.platform,
            "versions": dict(self.versions),
        }
        lines = [json.dumps(attrs.asdict(cell)) for _, cell in sorted(self.cells.items())]
        body = ",\n  ".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n  {body}\n ]\n}}\n'
