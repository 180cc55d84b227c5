"""Run the checks of a ``Proof`` on this machine's device, in a few seconds.

The project's tests prove the order of streams on a simulated device. These checks examine what only
the real device can show: how it rounds, whether copies through page-locked memory are complete, and
whether a small model trains to exactly the results of DeepSpeed's own ZeRO-2 with CPU offload.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from zerotune._util.proc import environment
from zerotune.backend.accelerator import accelerator_for, accelerator_of
from zerotune.backend.host.engine import HostEngine
from zerotune.backend.op_causes import summary
from zerotune.backend.proof import VARIABLE, Combination, Outcome, Proof
from zerotune.backend.step.adams import torch_rounds_alike
from zerotune.backend.step.kernel import load_host_step
from zerotune.ema import EMAShadow
from zerotune.errors import MissingDependencyError, PlatformError
from zerotune.plan.context import Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform, detect_platform
from zerotune.training.setup import build_engine

_FEATURES: Final = 512
"""Features of a layer whose weights fill one part of a step."""
_LAYERS: Final = 6
_STEPS: Final = 5
_COPIES: Final = 40
_ELEMENTS: Final = 2**16


class DifferenceError(Exception):
    """The fast path's result differs from the plain path's result."""


class NotRunError(Exception):
    """The check does not apply to this machine."""


def check_rounding(_platform: Platform, device: torch.device) -> None:
    """Check that device, host and the op ``host_step`` round fp32 to bf16 identically."""
    high = torch.arange(2**16, dtype=torch.int32).mul_(2**16)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    wide = (high[:, None] + low).view(-1).view(torch.float32)
    wide = wide[wide.isfinite()]
    there = wide.to(device).bfloat16().cpu()
    if not torch.equal(there.view(torch.int16), wide.bfloat16().view(torch.int16)):
        raise DifferenceError(f"{device.type} rounds fp32 to bf16 differently from the host")
    if not torch_rounds_alike(load_host_step()):
        raise DifferenceError("torch rounds differently from the op host_step")


def check_page_locked(_platform: Platform, device: torch.device) -> None:
    """Check that asynchronous copies through page-locked memory transfer all data."""
    _copy_through(device, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))


def _copy_through(device: torch.device, allocate: Callable[[int], torch.Tensor]) -> None:
    streams = accelerator_of(device).streams
    if streams is None:
        raise NotRunError("training uses host memory, so nothing is copied")
    side, block = streams.Stream(device), allocate(_ELEMENTS)
    for value in range(_COPIES):
        source = torch.full((_ELEMENTS,), value, dtype=torch.uint8, device=device)
        back = torch.zeros_like(source)
        side.wait_stream(streams.current_stream(device))
        with streams.stream(side):
            block.copy_(source, non_blocking=True)
        side.synchronize()
        if not bool((block == value).all()):
            raise DifferenceError(f"copy {value} to the host differs from its source")
        with streams.stream(side):
            back.copy_(block, non_blocking=True)
        streams.current_stream(device).wait_stream(side)
        if not torch.equal(back, source):
            raise DifferenceError(f"copy {value} back to the device differs from its source")


def check_training(platform: Platform, _device: torch.device) -> None:
    """Check that zerotune's steps give exactly the results of DeepSpeed's own ZeRO-2.

    Master weights and moments are in host memory: once in the host engine with weights on the
    device, and once with streamed weights. With updates on the device, both must agree too.
    """
    if not platform.deepspeed.available:
        raise NotRunError("DeepSpeed, whose results zerotune's are compared with, is unavailable")
    load_host_step()  # Without the op, the check cannot run.
    ways: dict[str, dict[str, Any]] = {
        "host engine": {"engine": "host"},
        "streamed weights": {"streamed": Streaming(units=("Sequential",), window=2)},
    }
    wanted = train(platform, engine="deepspeed")
    for way, settings in ways.items():
        _compare(way, wanted, train(platform, **settings))
    if platform.bf16:
        there, streamed = (train(platform, update="device", **each) for each in ways.values())
        _compare("streamed weights updated on the device", there, streamed)


def _compare(
    way: str, wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> None:
    names = [n for n in {**wanted, **found} if not _equal(wanted.get(n), found.get(n))]
    if names:
        raise DifferenceError(
            f"{way}: {names[0]} and {len(names) - 1} others differ\n{', '.join(names)}"
        )


def _equal(wanted: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    return wanted is not None and found is not None and torch.equal(wanted, found)


def train(platform: Platform, **settings: Any) -> dict[str, torch.Tensor]:
    """Train a small model for a few steps.

    Args:
        platform: This machine.
        settings: Arguments of ``DeepSpeedPlan.resolve``.

    Returns:
        All losses, weights, moments and EMAs by name.
    """
    model = _Chain()
    engine = _small_engine(model, platform, settings)
    try:
        ema = EMAShadow(decay=0.9).attach(engine)
        found: dict[str, torch.Tensor] = {}
        for step in range(_STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, _FEATURES, generator=generator).to(engine.device, engine.dtype)
            loss = engine(x).float().square().mean()
            found[f"loss {step}"] = loss.detach()
            engine.backward(loss)
            engine.step()
            ema.step()
        if settings.get("engine") == "host" and not isinstance(engine, HostEngine):
            raise DifferenceError("the host engine did not run")
        if settings.get("streamed") and not engine.counts.evicted:
            raise DifferenceError("no weight was streamed")
        for fragment in engine.master_weights.read():
            found[f"weight {fragment.address.key}"] = fragment.value.clone()
            for name, state in fragment.states.items():
                found[f"{name} of {fragment.address.key}"] = state.clone()
        found |= {f"EMA {name}": value.clone() for name, value in ema.state_dict().items()}
        return {name: value.cpu() for name, value in found.items()}
    finally:
        engine.close()


def _small_engine(model: torch.nn.Module, platform: Platform, settings: Mapping[str, Any]) -> Any:
    plan = DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16" if platform.bf16 else "fp32",
        micro_batch_size=4,
        gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    )
    resolved = plan.resolve(
        platform=platform,
        model=ModelFacts.from_module(model),
        **{"streamed": False, **settings},
    )
    return build_engine(model=model, plan=resolved, timeout_s=60.0)


class _Chain(torch.nn.Module):
    """Layers of equal width, with the same initial weights at every call."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(_FEATURES, _FEATURES), torch.nn.Tanh())
                for _ in range(_LAYERS)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


CHECKS: Final[Mapping[str, Callable[[Platform, torch.device], None]]] = {
    "bf16 rounding": check_rounding,
    "page-locked copies": check_page_locked,
    "training": check_training,
}
"""The checks by name; ``zerotune.backend.proof.PATHS`` names what each fast path requires."""


def prove(*, platform: Platform | None = None) -> Proof:
    """Run every check that applies to this machine.

    Args:
        platform: The machine to check; detected by default.

    Returns:
        The proof; save it with ``store_proof``.
    """
    platform = platform or detect_platform(log=False)
    outcomes = {name: run_check(name, platform) for name in CHECKS}
    return Proof(combination=Combination.here(platform.accelerator), checks=outcomes)


def run_check(name: str, platform: Platform) -> Outcome:
    """Run one check, and return its outcome, even if the check raises an error.

    Args:
        name: Name of the check, from ``CHECKS``.
        platform: This machine.
    """
    began = time.perf_counter()
    passed: bool | None = True
    detail = evidence = ""
    try:
        with _deterministic():
            CHECKS[name](platform, accelerator_for(platform.accelerator).device)
    except NotRunError as reason:
        passed, detail = None, str(reason)
    except (PlatformError, MissingDependencyError) as error:
        passed, detail = None, summary(error)
    except DifferenceError as difference:
        passed, (detail, _, evidence) = False, str(difference).partition("\n")
    except Exception as error:  # noqa: BLE001 - a path that fails is not taken, whatever it meets
        passed, detail, evidence = False, summary(error), traceback.format_exc()
    seconds = time.perf_counter() - began
    return Outcome(passed=passed, detail=detail, evidence=evidence, seconds=seconds)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make the device deterministic, and keep engines from starting their own proof."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with environment(**{"CUBLAS_WORKSPACE_CONFIG": workspace, VARIABLE: "off"}):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warning)
