"""AdamW whose moments are one byte each, beside fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any, Final

import attrs
import torch
from typing_extensions import override

from zerotune.backend.optimizers.classes import TensorByTensor

BLOCK: Final = 256
"""Codes that share a scale."""
_BITS: Final = 8
_NEAR: Final = (0, 1, -1, 2, -2)
"""Units in the last place by which a scale may be off that is computed back."""


@attrs.frozen(kw_only=True, eq=False)
class Codebook:
    """What codes of one byte stand for: shares of the largest number of their block."""

    values: torch.Tensor
    """fp32, 256 in ascending order."""
    middles: torch.Tensor
    """fp32, 256: between each value and the next; infinite behind the last."""
    lowest: torch.Tensor
    """uint8, 65,536: by the upper half of an fp32 number, the lowest code of those that have it."""

    @property
    def zero(self) -> int:
        """The code of 0."""
        return int((self.values == 0).nonzero()[0])

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """fp32 numbers of codes (1-D, uint8) and the scales of their blocks."""
        return self.values[codes.long()] * _spread(scales, codes.numel())

    def encode(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest codes, and the scales of their blocks: the largest numbers in these.

        Args:
            numbers: fp32, 1-D.
        """
        scales = _largest(numbers)
        return self._nearest(numbers, scales), scales

    def encode_again(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``encode``, but numbers that ``decode`` returned keep every bit.

        The largest number of a block need not be its scale: where that was negative, its code
        stands for a little less.
        """
        codes, scales = self.encode(numbers)
        exact = self._agree(numbers, codes, scales)
        for off in _NEAR:
            if exact.all():
                break
            bits = (scales / -self.values[0]).view(torch.int32) + off
            others = torch.where(exact, scales, bits.view(torch.float32))
            found = self._nearest(numbers, others)
            better = ~exact & self._agree(numbers, found, others)
            codes = torch.where(_spread(better, codes.numel()), found, codes)
            scales = torch.where(better, others, scales)
            exact |= better
        return codes, scales

    def _nearest(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        shares = numbers / _spread(torch.where(scales > 0, scales, 1.0), numbers.numel())
        return torch.bucketize(shares, self.middles[:-1]).to(torch.uint8)

    def _agree(
        self, numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Whether all numbers of each block are those of its codes."""
        differs = self.decode(codes, scales) != numbers
        return _largest(differs.float()) == 0


def _spread(of_blocks: torch.Tensor, numel: int) -> torch.Tensor:
    return of_blocks.repeat_interleave(BLOCK)[:numel]


def _largest(numbers: torch.Tensor) -> torch.Tensor:
    """Of each block, by magnitude."""
    padded = torch.nn.functional.pad(numbers.abs(), (0, -numbers.numel() % BLOCK))
    return padded.view(padded.numel() // BLOCK, BLOCK).amax(dim=1)


@cache
def codebook(*, signed: bool) -> Codebook:
    """The dynamic tree of Dettmers (https://arxiv.org/abs/1511.04561), as bitsandbytes has it.

    Seven decades; the larger the decade, the more equal steps it is divided into.
    """
    values = [0.0, 1.0]
    decades = _BITS - 1
    for decade in range(decades):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        above = (10 ** (decade + 1 - decades) * middles).tolist()
        values += [*above, *(-value for value in above)] if signed else above
    ordered = torch.tensor(sorted(values), dtype=torch.float32)
    between = (ordered[:-1] + ordered[1:]) / 2
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    # Of all numbers with this upper half the smallest: towards zero, or away from it.
    ends = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    lowest = torch.bucketize(ends.nan_to_num(nan=0.0), between).to(torch.uint8)
    infinite = torch.tensor([math.inf])
    return Codebook(values=ordered, middles=torch.cat([between, infinite]), lowest=lowest)


_MOMENTS: Final[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
"""Moments, and whether they have a sign."""


class AdamW8BitStates(TensorByTensor):
    """AdamW (https://arxiv.org/abs/1711.05101) with moments of one byte each.

    2.03 bytes of states per weight, not 8: codes of a dynamic tree, and one fp32 scale for each
    block of 256 (8-bit optimizers, https://arxiv.org/abs/2110.02861). Each step decodes moments,
    updates them in fp32 and encodes them to the nearest codes, as bitsandbytes' AdamW8bit does.

    Streamed weights are stepped with these numbers in one pass. By itself it is slow: use
    bitsandbytes.

    Args:
        params: Parameters or groups, fp32, contiguous.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Keeps the denominator off zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    adam_w_mode = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @staticmethod
    def create_states(state: MutableMapping[str, Any], numel: int) -> None:
        """Make those of so many weights before their first step: all zero."""
        for name, signed in _MOMENTS.items():
            if name not in state:
                zero = codebook(signed=signed).zero
                state[name] = torch.full((numel,), zero, dtype=torch.uint8)
                state[scale_of(name)] = torch.zeros(-(-numel // BLOCK))

    @staticmethod
    def decode_states(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The moments in fp32, 1-D, by name; empty before the first step."""
        return {
            name: codebook(signed=signed).decode(state[name], state[scale_of(name)])
            for name, signed in _MOMENTS.items()
            if name in state
        }

    @staticmethod
    def encode_states(state: MutableMapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        """Set the moments; those of ``decode_states`` stay what they are."""
        for name, moment in moments.items():
            codes, scales = codebook(signed=_MOMENTS[name]).encode_again(moment)
            state[name].copy_(codes)
            state[scale_of(name)].copy_(scales)

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """As ``update_plainly`` in ``step/host_step.cpp``: each operation is rounded by itself."""
        weight, gradient, state = p.data.view(-1), grad.reshape(-1), self.state[p]
        self.create_states(state, weight.numel())
        state["step"] = step = int(state.get("step", 0)) + 1
        moments = self.decode_states(state)
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        first_share = float(torch.tensor(1.0 - beta1))
        kept = float(torch.tensor(1.0) - torch.tensor(first_share))
        first = moments["exp_avg"] * kept + gradient * first_share
        second = moments["exp_avg_sq"] * beta2 + gradient * gradient * (1.0 - beta2)
        root = torch.tensor(math.sqrt(1.0 - math.pow(beta2, step)), dtype=torch.float32)
        # torch's square root in fp32 is not always the nearest number.
        below = second.double().sqrt().float() / root + group["eps"]
        size = -lr / (1.0 - math.pow(beta1, step))
        weight.copy_(weight * (1.0 - lr * decay) + first * size / below)
        for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
            codes, scales = codebook(signed=_MOMENTS[name]).encode(moment)
            state[name].copy_(codes)
            state[scale_of(name)].copy_(scales)


def scale_of(moment: str) -> str:
    """Name of the state that holds the scales of a moment's blocks."""
    return f"{moment}_scale"
