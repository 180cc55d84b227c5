"""8-bit moments in torch: what the compiled kernels must equal bit for bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from zerotune.backend.optimizers.classes import (
    BLOCK,
    AdamW8BitStates,
    Codebook,
    TensorByTensor,
    codebook,
    scale_of,
)

BOOKS = {"exp_avg": codebook(signed=True), "exp_avg_sq": codebook(signed=False)}


def encode(book: Codebook, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes, and the largest magnitude of each block as the block's scale."""
    padded = torch.nn.functional.pad(numbers.abs(), (0, -numbers.numel() % BLOCK))
    scales = padded.view(-1, BLOCK).amax(dim=1)
    divisors = torch.where(scales > 0, scales, 1.0).repeat_interleave(BLOCK)
    shares = numbers / divisors[: numbers.numel()]
    return torch.bucketize(shares, book.middles[:-1]).to(torch.uint8), scales


class Torch8BitAdam(TensorByTensor, AdamW8BitStates):
    """``AdamW8BitStates`` with a step that rounds after each operation, as the kernel does."""

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        weight, gradient, state = p.data.view(-1), grad.reshape(-1), self.state[p]
        self.create_states(state, weight.numel())
        state["step"] = step = int(state.get("step", 0)) + 1
        moments = {n: book.decode(state[n], state[scale_of(n)]) for n, book in BOOKS.items()}
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        first_share = float(torch.tensor(1.0 - beta1))
        kept = float(torch.tensor(1.0) - torch.tensor(first_share))
        first = moments["exp_avg"] * kept + gradient * first_share
        second = moments["exp_avg_sq"] * beta2 + gradient * gradient * (1.0 - beta2)
        root = torch.tensor(math.sqrt(1.0 - math.pow(beta2, step)), dtype=torch.float32)
        # torch's fp32 square root is not always correctly rounded.
        below = second.double().sqrt().float() / root + group["eps"]
        size = -lr / (1.0 - math.pow(beta1, step))
        weight.copy_(weight * (1.0 - lr * decay) + first * size / below)
        for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
            codes, scales = encode(BOOKS[name], moment)
            state[name].copy_(codes)
            state[scale_of(name)].copy_(scales)
