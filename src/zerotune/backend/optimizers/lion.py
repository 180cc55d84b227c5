"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion of Chen et al. 2023, algorithm 2 (https://arxiv.org/abs/2302.06675).

    Works element by element, so ZeRO's flat shards change nothing.

    Args:
        params: Parameters or groups.
        lr: Learning rate, 3 to 10 times smaller than Adam's.
        betas: Weights of the momentum in the update, and of its decay.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum, grad = state["exp_avg"], p.grad.to(p.dtype)
                update = torch.lerp(grad, momentum, beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(grad, 1 - beta2)
        return loss
