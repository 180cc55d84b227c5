"""Lamb: Adam with a trust ratio for each parameter."""

from __future__ import annotations

from typing import Any

import torch

from zerotune.backend.optimizers.shards import ShardAware


class Lamb(ShardAware):
    """Lamb of You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).

    The trust ratio needs the norms of whole parameters, which a flat shard of ZeRO does not have:
    each rank sums the squares of its parts, and one small sum over the ranks makes them whole.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Keeps the denominator off zero.
        weight_decay: Decay, inside the trust ratio.
        bias_correction: Whether the moments are corrected for their start at zero.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        update = self._direction(p, group).view(-1)
        flat, pieces = p.view(-1), self.pieces_of(p)
        squares = torch.zeros(max(1, self._parameters), 2, dtype=torch.float64, device=p.device)
        for piece in pieces:
            for column, values in enumerate((flat, update)):
                part = values.narrow(0, piece.offset, piece.numel)
                # torch's own norm of a float32 tensor sums in blocks; only the few sums of
                # different ranks are added in float64.
                squares[piece.index, column] = part.norm().double().square()
        norms = self.sum_over_ranks(squares).sqrt_()
        for piece in pieces:
            weight, step = (float(value) for value in norms[piece.index])
            trust = weight / step if weight > 0 and step > 0 else 1.0
            trust = min(max(trust, group["min_coeff"]), group["max_coeff"])
            part = flat.narrow(0, piece.offset, piece.numel)
            part.add_(update.narrow(0, piece.offset, piece.numel), alpha=-group["lr"] * trust)

    def _direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Adam's step with the weight decay, before the trust ratio."""
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        grad = p.grad.to(p.dtype) if p.grad is not None else torch.zeros_like(p)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first = second = 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        adam: torch.Tensor = (state["exp_avg"] / first).div_(denominator)
        return adam.add_(p, alpha=group["weight_decay"])
