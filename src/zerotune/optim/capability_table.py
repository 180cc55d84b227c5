"""What was really run, cell by cell: ``data/capabilities.json``.

Written by ``python -m benchmarks.capabilities``, which starts the real engine for every name,
stage, offload and precision and trains a small network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import attrs

from zerotune.optim.situation import Situation, release_of

Outcome = Literal["works", "works with", "cannot"]


@attrs.frozen(kw_only=True)
class Cell:
    """One optimizer at one stage, offload and precision."""

    name: str
    """Canonical name."""
    stage: int
    offload: str
    precision: str
    outcome: Outcome
    """``"cannot"`` also where it ran, but the weights did not move or the loss did not fall."""
    reason: str = ""
    """Why it cannot, in the words of the engine; else empty."""
    implementation: str = ""
    """Class that did the update."""
    first_loss: float | None = None
    """Mean of the first losses."""
    last_loss: float | None = None
    """Mean of the last losses."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Name, stage, offload, precision."""
        return self.name, self.stage, self.offload, self.precision


def _by_key(cells: Any) -> Mapping[tuple[str, int, str, str], Cell]:
    return {cell.key: cell for cell in cells}


@attrs.frozen(kw_only=True)
class CapabilityTable:
    """Cells with the machine and the versions they were run on."""

    accelerator: str = "cpu"
    """DeepSpeed's accelerator."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Versions by package."""
    platform: str = ""
    """Operating system and processor."""
    cells: Mapping[tuple[str, int, str, str], Cell] = attrs.field(factory=dict, converter=_by_key)

    @classmethod
    def stored(cls) -> CapabilityTable:
        """The table that comes with zerotune."""
        return _stored()

    @classmethod
    def from_json(cls, text: str) -> CapabilityTable:
        """Read what ``to_json`` wrote."""
        content = json.loads(text)
        cells = [Cell(**cell) for cell in content.pop("cells")]
        return cls(**content, cells=cells)

    def to_json(self) -> str:
        """The table as text, one cell a line, so that a change is a readable difference."""
        head = {
            "accelerator": self.accelerator,
            "platform": self.platform,
            "versions": dict(self.versions),
        }
        lines = [json.dumps(attrs.asdict(cell)) for _, cell in sorted(self.cells.items())]
        body = ",\n  ".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n  {body}\n ]\n}}\n'

    def find(self, name: str, situation: Situation) -> Cell | None:
        """The cell for ``name`` in ``situation``; ``None`` when that was not run.

        A cell speaks for other patch releases of its DeepSpeed, not for another minor one.
        """
        if not situation.uses_deepspeed or situation.accelerator != self.accelerator:
            return None
        if not self._same_release(situation.versions.get("deepspeed")):
            return None
        return self.cells.get((name, situation.stage, situation.offload, situation.precision))

    def _same_release(self, version: str | None) -> bool:
        if version is None:
            return True
        return release_of(version)[:2] == release_of(self.versions.get("deepspeed", ""))[:2]


@cache
def _stored() -> CapabilityTable:
    source = files("zerotune.optim") / "data" / "capabilities.json"
    return CapabilityTable.from_json(source.read_text(encoding="utf-8"))
