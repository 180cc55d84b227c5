"""A training script that swaps and fails on one rank; a test starts it under torchrun."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from tests.offload.plans import swapping_plan
from tests.training.faulty import small
from zerotune.offload import OffloadManager
from zerotune.training.setup import leased


def loss(engine, batch, _generator):
    if engine.group.rank == 1 and engine.state.global_step == 1:
        raise ValueError("no such thing")
    return (engine(batch["images"]) - 1).pow(2).mean()


def main(root: Path, *, closing: bool) -> None:
    resources = ExitStack()
    # Lease only the folder: swapping itself needs libaio.
    leased(swapping_plan(world_size=2), OffloadManager(root=root), resources, 30.0)
    assert list(root.glob("zerotune-*"))
    trainer = small(objective=loss, timeout_s=30.0)
    trainer.resources.push(resources)
    if not closing:
        trainer.fit(steps=5)
    with trainer:
        trainer.fit(steps=5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), closing=sys.argv[2] == "closing")
