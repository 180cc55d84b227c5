"""Inject faults of every class: ``python -m stress.faults --seed 1 --minutes 30``.

``--only NAME --first N --times 1`` repeats the injection that a failure names.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable
from functools import partial

from stress.faults.acts import Acts
from stress.faults.campaign import Faults, campaign, table
from stress.faults.checkpoints import IN_HOST_MEMORY, Checkpoints
from stress.faults.disks import Disks
from stress.faults.interrupts import Interrupts
from stress.faults.killing import HostKills, Kills
from stress.faults.nans import NaNs
from stress.faults.ranks import RankFaults
from stress.faults.signals import Signals
from stress.faults.trainee import STREAMED

CLASSES: dict[str, Callable[[], Faults]] = {
    "damaged checkpoints": partial(Checkpoints, "damage"),
    "crafted checkpoints": partial(Checkpoints, "manifest", "header", "trainer"),
    "host optimizers": partial(Checkpoints, "damage", "manifest", "header", cases=IN_HOST_MEMORY),
    "kills": Kills,
    "kills in a host step": HostKills,
    "kills of streamed runs": partial(HostKills, tuple(STREAMED)),
    "NaN": NaNs,
    "rank faults": RankFaults,
    "agents per machine": partial(RankFaults, torchrun=True, machines=True),
    "signals": Signals,
    "interrupts": Interrupts,
    "disks": Disks,
    "acts between steps": Acts,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", action="append", choices=list(CLASSES), help="a class; repeat it")
    parser.add_argument("--first", type=int, default=0, help="number of the first injection")
    parser.add_argument("--times", type=int, help="injections of each class at most")
    arguments = parser.parse_args()
    # Skipped steps and their warnings are expected.
    logging.getLogger("zerotune").setLevel(logging.CRITICAL)
    print(f"seed {arguments.seed}", flush=True)
    rows = campaign(
        {name: CLASSES[name] for name in arguments.only or CLASSES},
        seed=arguments.seed,
        minutes=arguments.minutes,
        first=arguments.first,
        times=arguments.times,
    )
    print(table(rows), flush=True)
    return 1 if any(row.bad for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
