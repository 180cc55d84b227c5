"""One run under many plans: a checkpoint of one resumes under another.

All processes of a run share the same batch, whatever their number, so the losses of all plans are
those of one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

from tests.checkpoint.runs import fingerprint, shadow_of, swapped_groups
from tests.support.models import HostileNet
from tests.support.runs import PLAIN, Case, start
from zerotune.backend.launch import Launch
from zerotune.plan.context import Streaming

BEFORE, AFTER = 5, 20
"""Optimizer steps before the checkpoint and after it."""
_BATCH = 8

_WHOLE = ("stage3_param_persistence_threshold", 0)
"""Every parameter is partitioned, although the model is small."""
PLANS = {
    "plain": PLAIN,
    "plain-cpu": attrs.evolve(PLAIN, stage=2, offload="cpu"),
    "z0": Case(stage=0),
    "z1": Case(stage=1),
    "z2": Case(stage=2),
    "z2-cpu": Case(stage=2, offload="cpu", engine="deepspeed"),
    "host": Case(stage=2, offload="cpu", engine="host"),
    "streamed": Case(
        stage=2, offload="cpu", streamed=Streaming(units=("entry", "wide", "exit"), window=2)
    ),
    "z3": Case(stage=3, overrides=(("sub_group_size", 100_000), _WHOLE)),
    "z3-cpu": Case(
        stage=3,
        offload="cpu",
        offload_param="cpu",
        engine="deepspeed",
        overrides=(("sub_group_size", 100_000), _WHOLE),
    ),
    "z3-nvme": Case(
        stage=3,
        offload="nvme",
        offload_param="nvme",
        overrides=(("sub_group_size", 300_000), _WHOLE),
    ),
}
LEAN = {
    f"streamed-{name}": attrs.evolve(PLANS["streamed"], optimizer=optimizer)
    for name, optimizer in (("bf16", "AdamWBF16States"), ("8bit", "AdamW8BitStates"))
}
"""Plans whose optimizer stores moments in fewer bits; other plans load them exactly."""
ROUNDED = 1e-3
"""Largest relative loss difference if a run rounds its moments in every step, and the other not."""


class Net(HostileNet):
    """A model with hostile shapes, and layers of which each of two ranks swaps more than 1 MiB."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, scalar=False)
        # Checkpoints lack frozen weights, so every model must start with the same ones.
        self.frozen.load_state_dict(HostileNet(0, scalar=False).frozen.state_dict())
        self.entry = torch.nn.Linear(49, 760)
        self.wide = torch.nn.Linear(760, 760)
        self.exit = torch.nn.Linear(760, 49)

    def forward(self, x_b77: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.entry(x_b77.flatten(1)))))
        return super().forward(x_b77) + self.exit(hidden).view_as(x_b77)


def case_of(name: str, precision: str, world_size: int, swap: str) -> Case:
    """Return the plan of a run whose processes share one batch."""
    case = attrs.evolve((PLANS | LEAN)[name], precision=precision, micro_batch=_BATCH // world_size)
    return attrs.evolve(case, nvme_path=swap) if case.offload == "nvme" else case


def train(engine: Any, ema: Any, first: int, steps: int) -> list[float]:
    """Train on the batches that all ranks share; return the losses."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(_BATCH, 7, 7, generator=generator)
        # Noise that cannot be learned keeps the loss, and so the relative error, from shrinking.
        y = x.flip(1).tanh() + 0.5 * torch.randn(_BATCH, 7, 7, generator=generator)
        mine = slice(engine.group.rank, None, engine.group.world_size)
        output = engine(x[mine].to(engine.device, engine.dtype)).float()
        loss = (output - y[mine].to(engine.device)).pow(2).mean()
        losses.append(engine.group.mean(float(loss.detach()), device=engine.device))
        engine.backward(loss)
        if engine.step().applied:
            ema.step()
    return losses


def gathered(engine: Any, ema: Any) -> dict[str, str]:
    """Fingerprint whole weights, states and EMA by parameter, gathered from all ranks."""
    found = {}
    master = engine.master_weights
    sources = {"weights": None}
    sources |= {s: lambda f, s=s: f.states[s] for s in ("exp_avg", "exp_avg_sq")}
    for what, source in sources.items():
        found |= {f"{what} {name}": fingerprint(full) for name, full in master.gather(source)}
    found |= {f"ema {name}": fingerprint(full) for name, full in ema.gather()}
    found |= {f"step {f.address.name}": str(f.step) for f in master.read()}
    return found


def held(engine: Any) -> dict[str, Any]:
    """Report whether this plan partitions and swaps the weights as intended."""
    named = engine.module.named_parameters()
    return {
        "swapped": swapped_groups(engine),
        "whole": [name for name, p in named if p.numel() and p.requires_grad],
    }


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count bytes of tensors read inside the block, by kind of file."""
    from zerotune.checkpoint.tensors import TensorReader

    read: dict[str, int] = {}
    real = TensorReader._read

    def note(reader: Any, path: Path, into: torch.Tensor, offset: int) -> None:
        kind = path.name.partition("-")[0]
        read[kind] = read.get(kind, 0) + into.nbytes
        real(reader, path, into, offset)

    with mock.patch.object(TensorReader, "_read", note):
        yield read


def saved(name: str, precision: str, folder: str, swap: str) -> dict[str, Any]:
    """Train without interruption, saving a checkpoint on the way."""
    from zerotune.checkpoint import save_checkpoint

    world_size = Launch.from_environment().world_size
    engine = start(case_of(name, precision, world_size, swap), Net(0))
    ema = shadow_of(engine)
    train(engine, ema, 0, BEFORE)
    state = gathered(engine, ema)
    save_checkpoint(folder, engine=engine, shadows={"ema": ema}, extra={"plan": name})
    result = {"state": state, "losses": train(engine, ema, BEFORE, AFTER), **held(engine)}
    engine.close()
    return result


def resumed(name: str, precision: str, folders: list[str], swap: str) -> list[dict[str, Any]]:
    """Resume the same engine from one checkpoint after the other."""
    from zerotune.checkpoint import load_checkpoint

    world_size = Launch.from_environment().world_size
    engine = start(case_of(name, precision, world_size, swap), Net(1))
    ema = shadow_of(engine)
    results = []
    for folder in folders:
        with counting() as read:
            contents = load_checkpoint(folder, engine=engine, shadows={"ema": ema})
        results.append(
            {
                "read": dict(read),
                "owned": engine.master_weights.numel,
                "state": gathered(engine, ema),
                "step": engine.state.global_step,
                "lr": engine.lr,
                "decisions": [str(decision) for decision in contents.decisions],
                "losses": train(engine, ema, BEFORE, AFTER),
                **held(engine),
            }
        )
    engine.close()
    return results


def apart(left: list[float], right: list[float]) -> float:
    """Return the largest relative difference between two runs' losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True))


def folder_of(root: Path, name: str, precision: str, world_size: int) -> Path:
    """Return the path of a run's checkpoint."""
    return root / f"{name}-{precision}-{world_size}"
