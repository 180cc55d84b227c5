"""Training of a whole model by a torch optimizer on fp32 master weights, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.backend.host.streaming import FAMILIES

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def train_whole(
    run: Any,
    model: Any,
    make: Make,
    *,
    norms: list[float],
    device: str = "cpu",
    masters: str = "fp32",
    batches: Any = FAMILIES,
    ranks: int = 1,
) -> Any:
    """Train; return losses, norms, and the contents by name: weight, master weight, states.

    Args:
        run: Settings, a ``Run`` or a ``Case``; its schedule is not used.
        model: The model in fp32.
        make: Function that creates the optimizer of the master weights.
        norms: Gradient norms to clip by; they depend on the order in which squares are summed.
        device: Where the model computes and is updated.
        masters: ``"fp32"`` or ``"split"``, which rounds ties up.
        batches: Functions that draw a batch, by family.
        ranks: Number of ranks, whose gradients are averaged; losses are those of the first.
    """
    model = model.bfloat16().to(device)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = [torch.nn.Parameter(p.detach().float()) for p in named.values()]
    optimizer = make(kept)
    losses, own = [], []
    for step in range(run.steps):
        for micro in range(run.accumulation):
            came: dict[str, torch.Tensor] = {}
            for rank in range(ranks):
                random_ = torch.Generator().manual_seed(100 * step + micro + 10_000 * rank)
                batch = batches[run.family][1](random_, torch.bfloat16)
                out = model(**tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch))
                loss = (getattr(out, "sample", out).float() - 0.5).square().mean()
                losses += [] if rank else [float(loss.detach())]
                gradients = torch.autograd.grad(
                    loss / run.accumulation, list(named.values()), allow_unused=True
                )
                for name, gradient in zip(named, gradients, strict=True):
                    if gradient is not None:
                        mean = gradient / ranks
                        came[name] = came[name] + mean if name in came else mean
            for name, gradient in came.items():
                earlier = named[name].grad
                named[name].grad = gradient if earlier is None else earlier + gradient
        squares = [p.grad.double().square().sum() for p in named.values() if p.grad is not None]
        own.append(float(torch.stack(squares).sum().sqrt()))
        norm = torch.tensor(norms[step])
        factor = 1.0
        if run.clipping:
            factor = float(1.0 / torch.clamp((norm + 1e-6) / run.clipping, min=1.0))
        for parameter, master in zip(named.values(), kept, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float() * factor
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(named.values(), kept, strict=True):
                parameter.copy_(master)
                if masters == "split":
                    bits = master.view(torch.int32)
                    up = parameter.float().view(torch.int32) - bits == 0x8000
                    bits.add_(up)
    contents = {
        name: [
            parameter.detach().cpu(),
            master.detach().flatten().cpu(),
            *_states(optimizer, master),
        ]
        for (name, parameter), master in zip(named.items(), kept, strict=True)
    }
    return {"losses": losses, "norms": own, "contents": contents}


def _states(optimizer: torch.optim.Optimizer, key: torch.Tensor) -> list[torch.Tensor]:
    found = optimizer.state[key].items()
    return [torch.as_tensor(value).detach().flatten().cpu() for _, value in sorted(found)]


def contents_of(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Copy weights, master weights and states of an engine with its update on the device."""
    engine.master_weights.settle()
    slabs = [slab for unit in engine._units for slab in unit.slabs if slab.parts]
    weights = dict(engine.module.named_parameters())
    return {
        slab.members[0].name: [
            weights[slab.members[0].name].detach().clone().cpu(),
            slab.masters.read().clone().flatten(),
            *_states(engine.optimizer, slab.key),
        ]
        for slab in slabs
    }


def unlike(mine: Any, whole: Any) -> list[str]:
    """Return the results of an engine that are not those of the whole model, to the bit."""
    found = [] if mine["losses"] == whole["losses"] else ["losses"]
    pairs = zip(mine["norms"], whole["norms"], strict=True)
    found += ["norms"] if any(abs(one / other - 1) > 1e-6 for one, other in pairs) else []
    ours, theirs = mine["contents"], whole["contents"]
    found += sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        same = len(ours[name]) == len(theirs[name])
        if not same or not all(map(torch.equal, ours[name], theirs[name])):
            found.append(name)
    return found
