"""A training script as a user writes it, for the launcher tests."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch

from zerotune.backend.launch import Launch
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.training.setup import build_engine


def main(output: Path) -> None:
    before = dict(os.environ)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plan = DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="fp32",
        micro_batch_size=4,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
    ).resolve(
        model=ModelFacts.from_module(model),
        world_size=Launch.from_environment().world_size,
        engine="deepspeed",
    )
    engine = build_engine(model=model, plan=OptimizerResolver().resolve(plan))
    losses = []
    for _ in range(12):
        x = torch.ones(4, 9)
        loss = (engine(x) - 3.0).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    rank, world_size = engine.group.rank, engine.group.world_size
    stage = engine.deepspeed_engine.zero_optimization_stage()
    engine.close()
    # OpenMP and DeepSpeed's compiler set other variables; these must be restored.
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "PATH")
    changed = [name for name in ours if os.environ.get(name) != before.get(name)]
    (output / f"rank{rank}.json").write_text(
        json.dumps(
            {
                "rank": rank,
                "world_size": world_size,
                "stage": stage,
                "losses": losses,
                "changed_environment": changed,
            }
        )
    )


def note_threads(output: Path) -> None:
    """Write the remaining threads' names; registered first, so it runs after all other handlers.

    Args:
        output: Folder of the notes.
    """
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    (output / f"threads-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(names))


if __name__ == "__main__":
    atexit.register(note_threads, Path(sys.argv[-1]))
    # The deepspeed launcher puts --local_rank=N before the arguments.
    main(Path(sys.argv[-1]))
