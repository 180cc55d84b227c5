"""8-bit moments in torch: what the compiled kernels must equal bit for bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from zerotune.backend.optimizers.classes import (
    BLOCK,
    AdamW8BitStates,
    TensorByTensor,
    decode,
    noise_bits,
    noise_key,
    scale_of,
)

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""Whether each moment can be negative."""


def encode(
    numbers: torch.Tensor, *, signed: bool, key: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, and the largest magnitude of each block as the block's scale.

    Codes are the nearest ones, or with a ``key`` the next lower or higher one by chance.
    """
    padded = torch.nn.functional.pad(numbers.abs(), (0, -numbers.numel() % BLOCK))
    scales = padded.view(-1, BLOCK).amax(dim=1)
    inverses = torch.where(scales < 2.0**-126, 0.0, 1 / scales).repeat_interleave(BLOCK)
    shares = numbers * inverses[: numbers.numel()]
    bits = shares.abs().view(torch.int32).long() - (127 - (15 if signed else 31) << 23)
    added = torch.full((BLOCK,), 2**19)
    if key is not None:
        bits_of_places = noise_bits(key, torch.arange(BLOCK, dtype=torch.int32))
        added = (bits_of_places >> 16 & 0xFFFF).long() * 16 + 8
    codes = (bits + added.repeat(len(scales))[: numbers.numel()] >> 20).clamp(min=0)
    return (codes + 128 * (shares.signbit() & (codes > 0) & signed)).to(torch.uint8), scales


class Torch8BitAdam(TensorByTensor, AdamW8BitStates):
    """``AdamW8BitStates`` with a step that rounds after each operation, as the kernel does."""

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        weight, gradient, state = p.data.view(-1), grad.reshape(-1), self.state[p]
        self.create_states(state, weight.numel())
        state["step"] = step = int(state.get("step", 0)) + 1
        moments = {n: decode(state[n], state[scale_of(n)], signed=s) for n, s in SIGNED.items()}
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        first_share = float(torch.tensor(1.0 - beta1))
        kept = float(torch.tensor(1.0) - torch.tensor(first_share))
        first = moments["exp_avg"] * kept + gradient * first_share
        second = moments["exp_avg_sq"] * beta2 + gradient * gradient * (1.0 - beta2)
        root = torch.tensor(math.sqrt(1.0 - math.pow(beta2, step)), dtype=torch.float32)
        # torch's fp32 square root is not always correctly rounded.
        below = second.double().sqrt().float() * (1 / root) + group["eps"]
        size = -lr / (1.0 - math.pow(beta1, step))
        weight.copy_(weight * (1.0 - lr * decay) + first * size / below)
        for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
            key = None if SIGNED[name] else noise_key(step - 1, 0)
            codes, scales = encode(moment, signed=SIGNED[name], key=key)
            state[name].copy_(codes)
            state[scale_of(name)].copy_(scales)
