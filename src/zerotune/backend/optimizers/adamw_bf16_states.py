"""AdamW whose moments are bf16, beside fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.optim.adamw import adamw

_CHUNK: Final = {"cpu": 2**19}
"""Elements widened at a time: on a CPU what its cache holds, …"""
_CHUNK_ON_DEVICE: Final = 2**22
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
        self._scratch = _Scratch()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        groups = self.param_groups
        self._scratch.rewind(
            max((p.numel() for group in groups for p in group["params"]), default=0)
        )
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
        beta1, beta2 = group["betas"]
        flat = _flat(p, grad, state["exp_avg"], state["exp_avg_sq"])
        size = self._scratch.prepare(p.device, seed=taken)
        for weight, slope, *moments in zip(*(torch.split(t, size) for t in flat), strict=True):
            wide = self._scratch.widen(moments)
            adamw(
                [weight], [slope], [wide[0]], [wide[1]], [],
                [torch.full((), float(taken), device=weight.device)],
                fused=weight.device.type in _FUSED, foreach=False, amsgrad=False, maximize=False,
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
            for exact, moment in zip(wide, moments, strict=True):
                round_stochastically(exact, self._scratch.bits(exact.numel()), into=moment)


class _Scratch:
    """Room for one chunk: its moments in fp32, and random bits to round them by."""

    def __init__(self) -> None:
        self._drawn: tuple[torch.device, int, int] | None = None
        self._wide: tuple[torch.Tensor, ...] = ()
        self._bits = torch.empty(0, dtype=torch.int32)
        self._cuts = self._largest = 0

    def rewind(self, largest: int) -> None:
        """Begin with the first chunk of a step over tensors of at most ``largest`` elements."""
        self._cuts, self._largest = 0, largest

    def prepare(self, device: torch.device, *, seed: int) -> int:
        """Draw the random bits of a step, once for all tensors on a device.

        Returns:
            Elements of a chunk.
        """
        size = min(self._largest, _CHUNK.get(device.type, _CHUNK_ON_DEVICE))
        if self._drawn == (device, size, seed):
            return size
        if self._drawn is None or self._drawn[:2] != (device, size):
            self._wide = tuple(torch.empty(size, device=device) for _ in range(2))
        generator = torch.Generator(device).manual_seed(seed)
        self._bits = torch.randint(
            0, 2**16, (2 * size,), dtype=torch.int32, device=device, generator=generator
        )
        self._drawn = device, size, seed
        return size

    def widen(self, moments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The moments of a chunk in fp32."""
        pairs = zip(self._wide, moments, strict=True)
        return [wide[: moment.numel()].copy_(moment) for wide, moment in pairs]

    def bits(self, numel: int) -> torch.Tensor:
        """int32 from 0 to 65,535."""
        # Chunks may share bits with other chunks: an element's errors cancel over the steps as
        # long as its own bits are new at each step.
        self._cuts += 1
        start = self._cuts * _STRIDE % (self._bits.numel() // 2)
        return self._bits[start : start + numel]


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


def _flat(p: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
    """All in the order in which ``p`` lies in memory, which may be channels_last."""
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    first, *rest = (tensor.permute(order).view(-1) for tensor in (p, *states))
    # Gradients alone may lie otherwise than their weights; a copy serves as well.
    return [first, grad.permute(order).reshape(-1), *rest]
