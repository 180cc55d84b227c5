"""AdamW whose moments are bf16, beside fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim.adamw import adamw

_WIDENED: Final = {"cpu": 2**19}
"""Elements widened at a time: on a CPU what its cache holds, …"""
_WIDENED_ON_DEVICE: Final = 2**22
"""… on a device enough to keep it busy, in 64 MiB."""
_FUSED: Final = frozenset({"cpu", "cuda", "xpu"})
NOISE_PERIOD: Final = 2**22
"""Elements of a group after which the random bits of a step repeat. Elements may share bits: the
errors of one cancel over the steps as long as its own bits are new at each step."""
_WORD: Final = 2**32 - 1


class AdamWBF16States(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) with moments in bf16.

    4 bytes of states per weight, not 8; weights, gradients and the arithmetic are fp32. Chunk by
    chunk the moments are widened, updated by torch's own AdamW and rounded back stochastically
    (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): up or down by chance, right on average.
    Rounding to nearest would stop the second moment, whose step of ``1 - beta2`` is smaller than
    half a unit in the last place of bf16.

    The noise is a function of the step, the group, and an element's place among those of the group
    that are stepped, so a resumed run is the uninterrupted one and replicas agree. Works element by
    element, so ZeRO's flat shards change nothing.

    Args:
        params: Parameters or groups, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Keeps the denominator off zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    state_dtype: torch.dtype = torch.bfloat16
    """Dtype of the moments, also for code that creates them before the first step."""
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
        self._noise = Noise()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        self._noise.rewind()
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                # Of a small parameter another rank may hold all.
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, group, index)
        return loss

    def _update(
        self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], index: int
    ) -> None:
        state = self.state[p]
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=self.state_dtype)
        taken = int(state.get("step", 0))
        state["step"] = taken + 1
        flat = _in_memory_order(p, grad, state["exp_avg"], state["exp_avg_sq"])
        first, key = self._noise.place(index, p.numel()), noise_key(taken, index)
        size = min(p.numel(), _WIDENED.get(p.device.type, _WIDENED_ON_DEVICE))
        room = [torch.empty(size, device=p.device) for _ in range(2)]
        for start, (weight, slope, *moments) in zip(
            range(0, p.numel(), size),
            zip(*(torch.split(t, size) for t in flat), strict=True),
            strict=True,
        ):
            update_chunk(
                weight, slope, moments, taken=taken, group=group,
                wide=[each[: weight.numel()] for each in room],
                noise=self._noise.of(key, first + start, weight),
            )  # fmt: skip


def noise_key(taken: int, group: int) -> int:
    """What the random bits of a step and a group are drawn from: 32 bits."""
    return int(_mixed(_mixed(taken + 1) ^ (group + 1) * 0x9E3779B9 & _WORD))


def noise_bits(key: int, positions: torch.Tensor) -> torch.Tensor:
    """Random bits of elements: ``drawn`` in ``step/host_step.cpp``.

    Args:
        key: A ``noise_key``.
        positions: int64, places of elements within their group.

    Returns:
        int64 from 0 to ``2 ** 32 - 1``: 16 bits for the first moment, and above them 16 for the
        second.
    """
    bits: torch.Tensor = _mixed(positions % NOISE_PERIOD ^ key)
    return bits


def _mixed(x: Any) -> Any:
    """Chris Wellons' "lowbias32" (https://github.com/skeeto/hash-prospector)."""
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16


class Noise:
    """Random bits to round by, and the places of the tensors of a step in them."""

    def __init__(self) -> None:
        self._drawn: tuple[torch.device, int] | None = None
        self._bits = torch.empty(0, dtype=torch.int32)
        self._next: dict[int, int] = {}

    def rewind(self) -> None:
        """Begin with the first tensor of each group."""
        self._next.clear()

    def place(self, group: int, numel: int) -> int:
        """Where the next tensor of a group begins."""
        start = self._next.get(group, 0)
        self._next[group] = start + numel
        return start

    def of(self, key: int, start: int, like: torch.Tensor) -> list[torch.Tensor]:
        """int32 from 0 to 65,535 for both moments of as many elements as ``like`` has.

        Drawn once for all that a step asks for on a device.
        """
        start %= NOISE_PERIOD
        stop = start + like.numel()
        if self._drawn != (like.device, key) or self._bits.numel() < stop:
            size = min(NOISE_PERIOD, 2 ** (stop - 1).bit_length())
            bits = noise_bits(key, torch.arange(size, device=like.device))
            # Whatever is asked for is one piece.
            self._bits = bits.repeat(-(-stop // size)).int()
            self._drawn = like.device, key
        bits = self._bits[start:stop]
        return [bits & 0xFFFF, bits >> 16 & 0xFFFF]


def update_chunk(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    *,
    wide: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    taken: int,
    group: Mapping[str, Any],
) -> None:
    """Widen moments, have torch update them and the weights, and round them back.

    Args:
        weight: fp32, 1-D.
        grad: fp32.
        moments: Both, bf16.
        wide: Room for both in fp32.
        noise: int32 from 0 to 65,535, for both.
        taken: Steps before this one.
        group: The optimizer's arguments.
    """
    exact = [room.copy_(moment) for room, moment in zip(wide, moments, strict=True)]
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [grad], [exact[0]], [exact[1]], [],
        [torch.full((), float(taken), device=weight.device)],
        fused=weight.device.type in _FUSED, foreach=False, amsgrad=False, maximize=False,
        lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
        weight_decay=group["weight_decay"],
    )  # fmt: skip
    for each, bits, moment in zip(exact, noise, moments, strict=True):
        round_stochastically(each, bits, into=moment)


def round_stochastically(exact: torch.Tensor, bits: torch.Tensor, *, into: torch.Tensor) -> None:
    """Round fp32 to one of the two nearest bf16 numbers, to each as often as the other is far.

    Args:
        exact: fp32; overwritten. What is not finite stays as it is.
        bits: int32 from 0 to 65,535, evenly distributed, of the same shape.
        into: bf16, of the same shape; receives the result.
    """
    # A NaN of all ones, CUDA's usual one, would become 0 by the carry; this one has room for it.
    exact.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    # bf16 is the upper half of an fp32 number: the carry out of the lower half is the chance.
    exact.view(torch.int32).add_(bits).bitwise_and_(-(2**16))
    into.copy_(exact)


def _in_memory_order(
    p: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor
) -> list[torch.Tensor]:
    """All in the order in which ``p`` lies in memory, which may be channels_last."""
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    first, *rest = (tensor.permute(order).view(-1) for tensor in (p, *states))
    # Gradients alone may lie otherwise than their weights; a copy serves as well.
    return [first, grad.permute(order).reshape(-1), *rest]
