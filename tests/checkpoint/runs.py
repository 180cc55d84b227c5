"""Functions that the ranks of the checkpoint tests run, each in a process of its own."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import attrs
import numpy as np
import torch

from tests.support.models import HostileNet, WideNet
from tests.support.runs import Case, start
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow, RampDecay

BEFORE, AFTER = 3, 5
"""Optimizer steps before the checkpoint and after it."""


class BufferedNet(HostileNet):
    """``HostileNet`` with buffers that change in training and affect the output."""

    def __init__(self, seed: int = 0, *, scalar: bool = True) -> None:
        super().__init__(seed, scalar)
        # Checkpoints lack frozen weights, so every model must start with the same ones.
        twin = HostileNet(0, scalar)
        self.frozen.load_state_dict(twin.frozen.state_dict())
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(7))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x_b77: torch.Tensor) -> torch.Tensor:
        output = super().forward(x_b77)
        if self.training:
            self.calls += 1
            self.average.lerp_(output.detach().mean((0, 1)).to(self.average.dtype), 0.1)
        return output + self.average.to(output.dtype)


class WideBufferedNet(WideNet, BufferedNet):
    """``BufferedNet`` with layers large enough to swap."""


def hostile(case: Case, seed: int) -> Any:
    if case.offload == "nvme":
        return start(case, WideBufferedNet(seed))
    return start(case, BufferedNet(seed, scalar=not case.deepspeed))


def swapped_groups(engine: Any) -> int:
    """Count the optimizer's sub-groups that are on NVMe now."""
    wrapper = getattr(getattr(engine, "deepspeed_engine", None), "optimizer", None)
    groups = getattr(wrapper, "fp32_partitioned_groups_flat", ())
    return sum(group.numel() == 0 for group in groups)


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def train(engine: Any, ema: Any, steps: int) -> list[float]:
    """Train on inputs drawn from all three global generators; return the losses."""
    losses = []
    for _ in range(steps * engine.plan.gradient_accumulation_steps):
        x = torch.randn(4, 7, 7) * float(np.random.rand()) + random.random()
        x += random.gauss(0, 0.1) + float(np.random.normal())
        loss = (engine(x.to(engine.device, engine.dtype)).float() - 0.5).pow(2).mean()
        losses.append(loss.item())
        engine.backward(loss)
        if engine.step().applied:
            ema.step()
    return losses


def fingerprint(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return f"{tuple(tensor.shape)} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}"


def everything(engine: Any, ema: Any) -> dict[str, Any]:
    """Fingerprint the whole state of a run on this rank, by name."""
    found: dict[str, Any] = {"state": attrs.asdict(engine.state), "lr": engine.lr}
    for fragment in engine.master_weights.read():
        key = fragment.address.key
        found[f"master {key}"] = fingerprint(fragment.value)
        found[f"step {key}"] = fragment.step
        for name, state in fragment.states.items():
            found[f"{name} {key}"] = fingerprint(state)
    for key, tensor in ema.state_dict().items():
        found[f"ema {key}"] = fingerprint(tensor)
    for name, parameter in engine.module.named_parameters():
        found[f"low {name}"] = (tuple(parameter.shape), fingerprint(held_part(parameter, engine)))
    for name, buffer in engine.module.named_buffers():
        if name != "scratch":
            found[f"buffer {name}"] = fingerprint(buffer)
    found["random"] = (torch.rand(2).tolist(), np.random.rand(), random.random())
    return found


def held_part(parameter: Any, engine: Any) -> torch.Tensor:
    """Return this rank's part of a low-precision weight, without stage 3's padding."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    size = parameter.ds_tensor.ds_numel
    left = parameter.ds_numel - size * engine.group.rank
    return parameter.ds_tensor.narrow(0, 0, max(0, min(size, left)))


def shadow_of(engine: Any) -> EMAShadow:
    return EMAShadow(decay=RampDecay(decay=0.99)).attach(engine)


def uninterrupted(case: Case, folder: str) -> dict[str, Any]:
    """Train, save on the way, and continue."""
    engine = hostile(case, seed=0)
    ema = shadow_of(engine)
    reseed(100 + engine.group.rank)
    losses = train(engine, ema, BEFORE)
    path = save_checkpoint(
        folder, engine=engine, extra={"position": [BEFORE, 0.1]}, shadows={"ema": ema}
    )
    whole = {name for name, p in engine.module.named_parameters() if p.numel()}
    losses = train(engine, ema, AFTER)
    result = {
        "losses": losses,
        "path": str(path),
        "whole": whole,
        "swapped": swapped_groups(engine),
        **everything(engine, ema),
    }
    engine.close()
    return result


def resumed(case: Case, folder: str, astray: int) -> dict[str, Any]:
    """Load into another model's engine after ``astray`` steps of its own, and continue."""
    engine = hostile(case, seed=1)
    ema = shadow_of(engine)
    reseed(7)
    train(engine, ema, astray)
    contents = load_checkpoint(folder, engine=engine, shadows={"ema": ema})
    losses = train(engine, ema, AFTER)
    result = {"losses": losses, "extra": contents.extra, "decisions": contents.decisions}
    result |= everything(engine, ema)
    engine.close()
    return result
