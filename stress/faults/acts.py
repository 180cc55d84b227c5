"""Somebody does something to the model between steps, in a configuration by chance.

The run goes on as under the optimizer's own step to the bit, or ends with an error of ours before
anything has been trained otherwise.
"""

from __future__ import annotations

import random
from pathlib import Path

from stress.faults.campaign import Found
from tests.backend.act_runs import cell, modes_of
from tests.backend.acts import ACTS, KINDS


class Acts:
    """Acts by chance; each run is a process of its own."""

    def inject(self, _work: Path, chance: random.Random) -> None:
        name = chance.choice(list(ACTS))
        # Where steps may be under way most of all.
        kinds = sorted(ACTS[name].kinds)
        kind = chance.choice([*kinds, *(each for each in kinds if KINDS[each].offload == "cpu")])
        modes = modes_of(KINDS[kind], ACTS[name])
        for mode, verdict in cell(name, KINDS[kind], modes).items():
            if verdict.startswith("FAIL"):
                kind_of_fault = "hung" if "no result within" in verdict else "lost"
                raise Found(kind_of_fault, f"{name}, {kind}, {mode}: {verdict}")

    def close(self) -> None:
        """Nothing is kept."""
