"""Measures within seconds how fast this machine computes and moves bytes.

What ``zerotune.plan.memory.rates`` names, each by the kind of work that a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from zerotune.backend.ops.host_step import AdamNumbers, load_host_step
from zerotune.errors import PlatformError

_MIB = 2**20


def measure_rates(*, device: torch.device | None = None, scale: float = 1.0) -> dict[str, float]:
    """Rates by name, of torch's present number of threads; takes some seconds.

    Disks are measured by ``zerotune offload bench ROOT``.

    Args:
        device: What training runs on; the first accelerator, or the CPU, when not given.
        scale: Share of the usual sizes and times; for tests.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
    with torch.no_grad():
        return dict(_measured(device, _Timer(device=device, seconds=0.25 * scale), scale))


def _measured(device: torch.device, timer: _Timer, scale: float) -> Iterator[tuple[str, float]]:
    for suffix, dtype in (("_fp32", torch.float32), ("", torch.bfloat16)):
        yield f"products{suffix}", _products(device, dtype, timer, scale)
        yield f"convolutions{suffix}", _convolutions(device, dtype, timer, scale)
        yield f"attention{suffix}", _attention(device, dtype, timer, scale)
    size = max(1, int(32 * scale)) * _MIB
    left, right = (torch.ones(size // 4, device=device) for _ in range(2))
    yield "device_memory", 3 * size / timer(lambda: torch.add(left, right, out=left))
    if device.type != "cpu":
        yield from _bus(left, timer)
    yield "host_memory", copy_rate(scale=scale)
    yield "host_step", _host_step(scale, _Timer(device=torch.device("cpu"), seconds=0.25 * scale))


class _Timer:
    """Seconds of a call, the best of those that fit into a time."""

    def __init__(self, *, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def __call__(self, act: Callable[[], object]) -> float:
        self._once(act)
        best, until = float("inf"), time.perf_counter() + self._seconds
        while best == float("inf") or time.perf_counter() < until:
            best = min(best, self._once(act))
        return best

    def _once(self, act: Callable[[], object]) -> float:
        repeats = 1 if self._device.type == "cpu" else 10
        begun = time.perf_counter()
        for _ in range(repeats):
            act()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return (time.perf_counter() - begun) / repeats


def _products(device: torch.device, dtype: torch.dtype, timer: _Timer, scale: float) -> float:
    side = max(64, int((8192 if device.type != "cpu" else 1024) * scale))
    left = torch.ones(side, side, device=device, dtype=dtype)
    right = torch.ones(side, side, device=device, dtype=dtype)
    return 2 * side**3 / timer(lambda: left @ right)


def _convolutions(device: torch.device, dtype: torch.dtype, timer: _Timer, scale: float) -> float:
    batch, channels, side = (8, 640, 64) if device.type != "cpu" else (1, 128, 32)
    channels = max(16, int(channels * scale))
    image = torch.ones(batch, channels, side, side, device=device, dtype=dtype)
    weight = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype)
    seconds = timer(lambda: torch.nn.functional.conv2d(image, weight, padding=1))
    return 2 * 9 * channels**2 * batch * side**2 / seconds


def _attention(device: torch.device, dtype: torch.dtype, timer: _Timer, scale: float) -> float:
    heads, length, width = (64, 4096, 64) if device.type != "cpu" else (8, 512, 64)
    length = max(64, int(length * scale))
    query = torch.ones(1, heads, length, width, device=device, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return 4 * heads * length**2 * width / timer(lambda: attend(query, query, query))


def _bus(there: torch.Tensor, timer: _Timer) -> Iterator[tuple[str, float]]:
    here = torch.empty(there.shape, pin_memory=True)
    yield "to_host", there.nbytes / timer(lambda: here.copy_(there, non_blocking=True))
    yield "to_device", there.nbytes / timer(lambda: there.copy_(here, non_blocking=True))


def copy_rate(*, scale: float = 1.0) -> float:
    """Bytes per second that a copy in host memory reads and writes together, best of four."""
    source = torch.ones(max(1, int(64 * scale)) * _MIB // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begun)
    return 2 * source.nbytes / best


def _host_step(scale: float, timer: _Timer) -> float:
    count = max(2**12, int(2**23 * scale))
    weight, first, second, gradient = (torch.full((count,), 0.5) for _ in range(4))
    try:
        op = load_host_step()
    except PlatformError:
        # Without a compiler there is no Adam in host memory but torch's own.
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        adam = torch.optim.AdamW([parameter], fused=True)
        return 28 * count / timer(adam.step)
    numbers = AdamNumbers(
        factor=1.0, beta1=0.9, beta2=0.999, one_minus_beta1=0.1, one_minus_beta2=0.001,
        inverse_root=1.0, eps=1e-8, step_size=-1e-3, decay=0.0, decays=0,
    )  # fmt: skip

    def step() -> None:
        op.adam(weight=weight, exp_avg=first, exp_avg_sq=second, gradient=gradient, numbers=numbers)

    return 28 * count / timer(step)
