"""Muon: orthogonalised momentum for hidden matrices, Adam for the rest."""

from __future__ import annotations

from typing import Any

import torch

from zerotune.backend.optimizers.shards import ShardAware

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(ShardAware):
    """Muon of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/).

    A group with ``use_muon`` is updated by the orthogonalised momentum; convolutions are seen as
    matrices of (out, in x height x width), as its authors do. Other groups get AdamW. Under ZeRO
    a matrix that is split over ranks is put together for the orthogonalisation, one at a time;
    each rank then keeps its own part of the result.

    Args:
        params: Groups; each may hold ``use_muon``, ``lr``, ``momentum``, ``weight_decay``,
            ``betas``, ``eps``.
        lr: Learning rate of groups without one.
        momentum: Decay of the momentum.
        nesterov: Whether the update looks one step ahead.
        ns_steps: Newton-Schulz iterations.
        betas: Decay rates of Adam's moments.
        eps: Keeps Adam's denominator off zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if group["use_muon"]:
            self._matrices(p, group)
        else:
            self._adam(p, group)

    def _matrices(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[p], _gradient(p)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        direction = torch.lerp(grad, momentum, group["momentum"]) if group["nesterov"] else momentum
        flat = p.view(-1).mul_(1 - group["lr"] * group["weight_decay"])
        for piece in self.pieces_of(p):
            matrix = self.whole(direction, piece)
            if matrix is None:
                continue
            update = orthogonalise(matrix.flatten(1), steps=group["ns_steps"]).reshape(-1)
            part = update.narrow(0, piece.start, piece.numel)
            flat.narrow(0, piece.offset, piece.numel).add_(part, alpha=-group["lr"])

    def _adam(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[p], _gradient(p)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / first)


def orthogonalise(matrix: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix, roughly: singular values come to lie between 0.7 and 1.2.

    A quintic Newton-Schulz iteration with the coefficients of Jordan et al.; then scaled by
    ``sqrt(max(1, rows / columns))`` as in their code.

    Args:
        matrix: (rows, columns).
        steps: Iterations.

    Returns:
        (rows, columns), in the dtype of ``matrix``.
    """
    a, b, c = _COEFFICIENTS
    # bf16 is enough for the iteration and fast on GPUs; CPUs without bf16 units emulate it.
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if tall else x
    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    result: torch.Tensor = (x * scale).to(matrix.dtype)
    return result


def _gradient(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.to(p.dtype)
