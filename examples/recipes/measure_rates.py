"""Measure within seconds how fast this machine computes and moves data.

    python examples/recipes/measure_rates.py

The rates are stored in the user's cache, and predictions of step times use them from then on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerotune
from zerotune.backend.accelerator import accelerator_of, current_accelerator
from zerotune.backend.step.kernel import AdamNumbers, Piece, load_host_step
from zerotune.diffusion.passes import moves_memory
from zerotune.errors import PlatformError
from zerotune.plan.memory.rates import store_rates

_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    options = parse(arguments)
    found = measure_rates(scale=options.scale)
    for name, rate in found.items():
        print(f"{name:20} {rate:.3g} per second")
    print(f"saved in {store_rates(zerotune.detect_platform(), found)}")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of sizes and durations")
    return parser.parse_args(arguments)


def measure_rates(
    *,
    device: torch.device | None = None,
    scale: float = 1.0,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Measure this machine's rates in a few seconds, with torch's current number of threads.

    Disks are not measured; for disks, use DeepSpeed's ``ds_nvme_tune``.

    Args:
        device: Device for training; default: the first accelerator, or the CPU.
        scale: Multiplier for the sizes and durations of the measurements; below 1 only in tests.
        now: Function that returns the time in seconds. On a busy machine, ``time.process_time``
            excludes the time of other processes.

    Returns:
        The rates by name.
    """
    if device is None:
        device = current_accelerator().device
    with torch.no_grad():
        return dict(_Rates(device=device, scale=scale, now=now).measured())


@attrs.frozen(kw_only=True)
class _Rates:
    """Measure each rate by repeated calls; the fastest call counts."""

    device: torch.device
    scale: float
    """Factor of the usual sizes and times."""
    now: Callable[[], float]
    others: torch.Tensor = attrs.field(factory=lambda: torch.zeros(12 * _MIB))
    """Data that fill the processor's caches before each call, like other layers of a model."""

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def sized(self, number: int, least: int = 16) -> int:
        return max(least, int(number * self.scale))

    def randn(self, count: int, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(shape, device=self.device, dtype=dtype) for _ in range(count)]

    def __call__(self, act: Callable[[], object]) -> float:
        self._once(act)
        best, until = float("inf"), self.now() + 0.25 * self.scale
        while best == float("inf") or self.now() < until:
            best = min(best, self._once(act))
        return best

    def _once(self, act: Callable[[], object]) -> float:
        repeats = 1 if self.on_cpu else 10
        if self.on_cpu:
            self.others.add_(1)
        begun = self.now()
        for _ in range(repeats):
            act()
        if not self.on_cpu:
            accelerator_of(self.device).synchronize()
        return (self.now() - begun) / repeats

    def measured(self) -> Iterator[tuple[str, float]]:
        for suffix, dtype in (("_fp32", torch.float32), ("", torch.bfloat16)):
            yield f"products{suffix}", self._products(dtype)
            yield f"device_memory{suffix}", self._simple_rate(dtype)
        if not self.on_cpu:
            there = torch.ones(max(1, int(32 * self.scale)) * _MIB // 4, device=self.device)
            here = torch.empty(there.shape, pin_memory=True)
            yield "to_host", there.nbytes / self(lambda: here.copy_(there, non_blocking=True))
            yield "to_device", there.nbytes / self(lambda: there.copy_(here, non_blocking=True))
        on_host = attrs.evolve(self, device=torch.device("cpu"))
        yield "host_memory", copy_rate(scale=self.scale, now=self.now)
        yield "operators", self._operator_rate()
        yield "host_step", on_host._host_step()

    def _products(self, dtype: torch.dtype) -> float:
        rows, width = (8192, 1280) if not self.on_cpu else (256, 768)
        rows, width = self.sized(rows), self.sized(width)
        (inputs,) = self.randn(1, rows, width, dtype=dtype)
        # More weights than any cache holds, so that each is read from memory, as in a model.
        shapes = [(4 * width, width), (width, 4 * width)] * 3
        weights = [weight for shape in shapes for weight in self.randn(1, *shape, dtype=dtype)]

        def forward(value: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                value = torch.nn.functional.linear(value, weight)
            return value

        flops = 3 * 2 * rows * sum(weight.numel() for weight in weights)
        return flops / self(_both_ways(forward, inputs, *weights))

    def _simple_rate(self, dtype: torch.dtype) -> float:
        """Bytes per second of norms, activations and sums, in both passes."""
        tokens, width = (8192, 1280) if not self.on_cpu else (512, 640)
        tokens = max(1, int(tokens * self.scale / 32)) * 32
        given, other = self.randn(2, tokens, width, dtype=dtype)
        scaled, shift = self.randn(2, width, dtype=dtype)
        functions = torch.nn.functional

        def forward(given: torch.Tensor, other: torch.Tensor, *modulation: torch.Tensor) -> Any:
            image = given.view(1, tokens // 16, width // 8, 128)
            image = functions.silu(functions.group_norm(image, tokens // 32))
            value = image.view(tokens, width) + other
            value = functions.layer_norm(value, (width,)) * modulation[0] + modulation[1]
            return other + functions.gelu(value, approximate="tanh")

        act = _both_ways(forward, given, other, scaled, shift)
        with _OperatorCounter() as counter:
            act()
        return float(counter.moved) / self(act)

    def _operator_rate(self) -> float:
        """Operators per second of modules with almost nothing to compute, in both passes."""
        nn = torch.nn
        kinds = nn.SiLU, lambda: nn.LayerNorm(4), lambda: nn.Unflatten(1, (2, 2)), nn.Flatten
        layers = (kind() for _ in range(_SMALL_LAYERS) for kind in kinds)
        model = nn.Sequential(*layers).to(self.device)
        given = torch.ones(4, 4, device=self.device)
        act = _both_ways(lambda given, *_weights: model(given), given, *model.parameters())
        with _OperatorCounter() as counter:
            act()
        return float(counter.begun) / self(act)

    def _host_step(self) -> float:
        count = self.sized(2**23, least=2**12)
        weight, first, second, gradient = (torch.full((count,), 0.5) for _ in range(4))
        try:
            op = load_host_step()
        except PlatformError:
            # Without a compiler, the only Adam in host memory is torch's own.
            parameter = torch.nn.Parameter(weight)
            parameter.grad = gradient
            adam = torch.optim.AdamW([parameter], fused=True)
            return 28 * count / self(adam.step)
        numbers = AdamNumbers(
            factor=1.0, beta1=0.9, beta2=0.999, one_minus_beta1=0.1, one_minus_beta2=0.001,
            inverse_root=1.0, eps=1e-8, step_size=-1e-3, decay=0.0, decays=0,
        )  # fmt: skip

        def step() -> None:
            op.step(
                numbers, [Piece(0, count)],
                weight=weight, exp_avg=first, exp_avg_sq=second, gradient=gradient,
            )  # fmt: skip

        return 28 * count / self(step)


def _both_ways(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs a forward and a backward pass with gradients of all inputs."""
    leaves = [one.requires_grad_() for one in inputs]

    def act() -> object:
        with torch.enable_grad():
            output = forward(*leaves)
        return torch.autograd.grad(output, leaves, output.detach())

    return act


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operators, including views, and the bytes that operators other than views access."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begun = self.moved = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.begun += 1
        if moves_memory(func):
            leaves = tree_leaves((args, kwargs, result))
            self.moved += sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor))
        return result


_SMALL_LAYERS: Final = 20
"""Number of consecutive small layers, so that their time exceeds the clock's error."""


def copy_rate(*, scale: float = 1.0, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the fastest rate of four host memory copies: bytes read and written per second.

    Args:
        scale: Multiplier for the number of copied bytes; below 1 only in tests.
        now: Function that returns the time in seconds.
    """
    source = torch.ones(max(1, int(64 * scale)) * _MIB // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        begun = now()
        target.copy_(source)
        best = min(best, now() - begun)
    return 2 * source.nbytes / best


if __name__ == "__main__":
    main()
