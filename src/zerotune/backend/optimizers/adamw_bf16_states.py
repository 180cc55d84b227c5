"""AdamW whose moments are bf16, beside fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch.optim.adamw import adamw

_WIDENED: Final = {"cpu": 2**19}
"""Elements widened at a time: on a CPU what its cache holds, …"""
_WIDENED_ON_DEVICE: Final = 2**22
"""… on a device enough to keep it busy, in 64 MiB."""
_FUSED: Final = frozenset({"cpu", "cuda", "xpu"})
_STRIDE: Final = 104_729
"""A prime, so that chunks begin all over the noise."""


class AdamWBF16States(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) with moments in bf16.

    4 bytes of states per weight, not 8; weights, gradients and the arithmetic are fp32. Chunk by
    chunk the moments are widened, updated by torch's own AdamW and rounded back stochastically
    (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): up or down by chance, right on average.
    Rounding to nearest would stop the second moment, whose step of ``1 - beta2`` is smaller than
    half a unit in the last place of bf16.

    The noise is a function of the step alone, so a resumed run is the uninterrupted one and
    replicas agree. Works element by element, so ZeRO's flat shards change nothing.

    Args:
        params: Parameters or groups, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Keeps the denominator off zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    state_dtype: torch.dtype = torch.bfloat16
    """Of the moments; whoever creates them before the first step follows it."""
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
        groups = self.param_groups
        self._noise.rewind(max((p.numel() for group in groups for p in group["params"]), default=0))
        for group in groups:
            for p in group["params"]:
                # Of a small parameter another rank may hold all.
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=self.state_dtype)
        taken = int(state.get("step", 0))
        state["step"] = taken + 1
        flat = _in_memory_order(p, grad, state["exp_avg"], state["exp_avg_sq"])
        noise = self._noise.take(p, seed=taken)
        room = [torch.empty(min(noise.size, p.numel()), device=p.device) for _ in range(2)]
        for start, (weight, slope, *moments) in zip(
            range(0, p.numel(), noise.size),
            zip(*(torch.split(t, noise.size) for t in flat), strict=True),
            strict=True,
        ):
            stop = start + weight.numel()
            update_chunk(
                weight, slope, moments, taken=taken, group=group,
                wide=[each[: weight.numel()] for each in room],
                noise=[noise.of(moment, start, stop) for moment in range(2)],
            )  # fmt: skip


@attrs.frozen(kw_only=True, eq=False)
class TensorNoise:
    """The random bits of one tensor at one step."""

    size: int
    """Elements of a chunk."""
    _bits: torch.Tensor = attrs.field(alias="bits")
    _cuts: int = attrs.field(alias="cuts")

    def of(self, moment: int, start: int, stop: int) -> torch.Tensor:
        """int32 from 0 to 65,535 for moment 0 or 1, of elements that lie within one chunk."""
        # Chunks may share bits with other chunks: an element's errors cancel over the steps as
        # long as its own bits are new at each step.
        cut = self._cuts + 2 * (start // self.size) + moment + 1
        first = cut * _STRIDE % (self._bits.numel() // 2) + start % self.size
        return self._bits[first : first + stop - start]


class Noise:
    """Random bits to round by: a function of the step alone."""

    def __init__(self) -> None:
        self._drawn: tuple[torch.device, int, int] | None = None
        self._bits = torch.empty(0, dtype=torch.int32)
        self._cuts = self._largest = 0

    def rewind(self, largest: int) -> None:
        """Begin with the first chunk of a step over tensors of at most ``largest`` elements."""
        self._cuts, self._largest = 0, largest

    def take(self, tensor: torch.Tensor, *, seed: int) -> TensorNoise:
        """Those of the next tensor of a step; drawn once for all tensors on a device."""
        device = tensor.device
        size = min(self._largest, _WIDENED.get(device.type, _WIDENED_ON_DEVICE))
        if self._drawn != (device, size, seed):
            generator = torch.Generator(device).manual_seed(seed)
            self._bits = torch.randint(
                0, 2**16, (2 * size,), dtype=torch.int32, device=device, generator=generator
            )
            self._drawn = device, size, seed
        noise = TensorNoise(size=size, bits=self._bits, cuts=self._cuts)
        self._cuts += 2 * math.ceil(tensor.numel() / size)
        return noise


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
