"""User code changes the model between steps, in a random configuration.

The run either stays bit-identical to one with the optimizer's own step, or ends with a zerotune
error before it trains anything differently.
"""

from __future__ import annotations

import random
from pathlib import Path

from stress.faults.campaign import Found
from tests.backend.act_runs import MODES, cell
from tests.backend.acts import ACTS, KINDS


class Acts:
    """Random acts; each run has its own process."""

    def inject(self, _work: Path, chance: random.Random) -> None:
        name = chance.choice(list(ACTS))
        kind = chance.choice(sorted(ACTS[name].kinds))
        for mode, verdict in cell(name, KINDS[kind], tuple(MODES)).items():
            if verdict.startswith("FAIL"):
                kind_of_fault = "hung" if "no result within" in verdict else "lost"
                raise Found(kind_of_fault, f"{name}, {kind}, {mode}: {verdict}")

    def close(self) -> None:
        """Do nothing: no state is kept."""
