"""Adam in host memory: zerotune's single pass against DeepSpeed's separate passes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from bench.workers import Worker

CHAIN, PASS, COPY = "DeepSpeed's separate passes", "one pass", "memory copy"
AVERAGES: Mapping[str, int] = {"": 0, ", one EMA": 1, ", two EMAs": 2}
LEAN: Mapping[str, tuple[str, bool]] = {
    "fp32 moments": ("AdamW", False),
    "fp32 moments, split masters": ("AdamW", True),
    "bf16 moments": ("AdamWBF16States", False),
    "bf16 moments, split masters": ("AdamWBF16States", True),
    "8-bit moments": ("AdamW8BitStates", False),
    "8-bit moments, split masters": ("AdamW8BitStates", True),
}
"""Optimizers, and whether they split master weights."""
DECAY = 0.999
STATES = "lean states"


def cases(quick: bool) -> Sequence[Case]:
    by_itself = {"parameters": 2**20 if quick else 6 * 2**24, "rounds": 2 if quick else 15}
    return (
        Case("step alone", step_alone, by_itself),
        Case(STATES, lean_states, {**by_itself, "rounds": 2 if quick else 41}),
    )


def step_alone(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure clipping, AdamW, cast and EMAs of one slab whose gradient is ready."""
    with Worker(Slab, dict(settings)) as worker:
        samples: dict[str, dict[str, list[float]]] = worker.call("measure")
    facts = {"parameters": settings["parameters"], "bytes moved per parameter by the pass": 28}
    return Measured(samples=samples, baseline=CHAIN + ", one EMA", facts=facts)


def lean_states(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure the pass with moments and master weights in fewer bits, cast included."""
    with Worker(LeanSlabs, dict(settings)) as worker:
        samples: dict[str, dict[str, list[float]]] = worker.call("measure")
    return Measured(samples=samples, baseline=next(iter(LEAN)))


class LeanSlabs:
    """The same number of weights for each state format, a sixth of ``Slab``'s."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.step.kernel import load_host_step
        from zerotune.backend.upstream import require_deepspeed

        require_deepspeed(accelerator="cpu")
        self._rounds, self._count = settings["rounds"], max(2**18, settings["parameters"] // 6)
        self._gradient = (torch.randn(self._count) * 1e-2).bfloat16()
        self._op = load_host_step()

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Measure seconds, and this thread's CPU time, which other load does not change."""
        steps = {name: self._stepped(*how) for name, how in LEAN.items()}
        return alternate(
            {name: functools.partial(self._timed, step) for name, step in steps.items()},
            rounds=self._rounds, warm_up=2,
        )  # fmt: skip

    def _timed(self, step: Callable[[], None]) -> dict[str, float]:
        began = time.thread_time()
        return {**timed(step)(), "thread_seconds": time.thread_time() - began}

    def _stepped(self, name: str, split: bool) -> Callable[[], None]:
        from zerotune.backend.optimizers.client import CLASSES
        from zerotune.backend.step.adams import SplitMasters, WholeMasters, stepper_of
        from zerotune.backend.step.kernel import Piece

        weights = torch.randn(self._count)
        high = weights.bfloat16()
        masters, key = WholeMasters(weights), torch.nn.Parameter(weights)
        if split:
            low = torch.zeros(self._count, dtype=torch.int16)
            masters, key = SplitMasters(high=high, low=low), torch.nn.Parameter(low, False)
        kind: Any = CLASSES.get(name, _cpu_adam_over)
        adam = kind([key], lr=1e-4, weight_decay=0.01)
        stepper = stepper_of(adam)(op=self._op, adam=adam)

        def step() -> None:
            begun = stepper.begin(
                key, gradient=self._gradient, group=adam.param_groups[0], factor=0.999,
                out=None if split else high, masters=masters, places=[(0, 0)],
            )  # fmt: skip
            begun.run([Piece(0, self._count)])

        return step


class Slab:
    """96 million weights with a bf16 gradient, once for the chain and once for the pass."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.step.adams import HostAdam, WholeMasters
        from zerotune.backend.step.kernel import EMAPart, Piece, load_host_step
        from zerotune.backend.upstream import require_deepspeed

        require_deepspeed(accelerator="cpu")
        self._settings = settings
        self._count = count = settings["parameters"]
        self._chain, self._pass = (_cpu_adam(count) for _ in range(2))
        self._host = HostAdam(op=load_host_step(), adam=self._pass)
        self._masters = WholeMasters(_only(self._pass).data)
        self._ema_part, self._piece = EMAPart, Piece
        self._gradient = torch.randn(count).bfloat16()
        self._out = torch.empty(count, dtype=torch.bfloat16)
        self._shadows = [torch.randn(count) for _ in range(2)]
        # The chain starts after DeepSpeed has copied the gradient into its fp32 buffer.
        _only(self._chain).grad = self._gradient.float()
        self._factor = torch.tensor(0.999)

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Measure both by the number of EMAs, and a copy of as many fp32 numbers."""
        target = torch.empty(self._count)
        running: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(self._shadows[0])}
        for name, count in AVERAGES.items():
            running[CHAIN + name] = functools.partial(self._step_in_turns, count)
            running[PASS + name] = functools.partial(self._step_at_once, count)
        samples = alternate(
            {name: timed(act) for name, act in running.items()}, rounds=self._settings["rounds"]
        )
        moved = {COPY: 8} | {PASS + name: 28 + 8 * count for name, count in AVERAGES.items()}
        for name, nbytes in moved.items():
            rates = [nbytes * self._count / seconds for seconds in samples[name]["seconds"]]
            samples[name]["bytes_per_second"] = rates
        return samples

    @torch.no_grad()
    def _step_in_turns(self, averages: int) -> None:
        weight = _only(self._chain)
        assert weight.grad is not None
        weight.grad.mul_(self._factor)
        self._chain.step()
        self._out.copy_(weight)
        for shadow in self._shadows[:averages]:
            shadow.lerp_(weight, 1 - DECAY)

    def _step_at_once(self, averages: int) -> None:
        step = self._host.begin(
            _only(self._pass), gradient=self._gradient, group=self._pass.param_groups[0],
            factor=float(self._factor), out=self._out, masters=self._masters, places=[(0, 0)],
        )  # fmt: skip
        shadows = self._shadows[:averages]
        emas = [self._ema_part(tensor=s, weight=1 - DECAY) for s in shadows]
        step.run([self._piece(0, self._count, emas)])


def _cpu_adam(count: int) -> Any:
    return _cpu_adam_over([torch.nn.Parameter(torch.randn(count))], weight_decay=0.01)


def _cpu_adam_over(parameters: Any, **settings: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotune.backend.op_builds import same_ninja

    with same_ninja():
        return DeepSpeedCPUAdam(parameters, **settings)


def _only(adam: Any) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = adam.param_groups[0]["params"][0]
    return parameter


_ONE_PASS = "a single pass takes at most 0.65 times as long as DeepSpeed's separate passes"

BENCHMARK = Benchmark(
    name="step",
    title="a single-pass Adam step in host memory, compared with DeepSpeed's separate passes",
    cases=cases,
    ours=(*(PASS + name for name in AVERAGES), *list(LEAN)[1:]),
    goals=(
        *(
            Goal(f"{_ONE_PASS}, with{name.removeprefix(',')}", "step alone", PASS + name,
                 "seconds", 0.65, CHAIN + name)
            for name in list(AVERAGES)[1:]
        ),
        Goal("a single pass with one EMA reaches at least 90 % of the bandwidth of a memory copy",
             "step alone", PASS + ", one EMA", "bytes_per_second", 0.9, COPY),
        Goal("a single pass with bf16 moments takes at most 0.75 times as long as with fp32 "
             "moments", STATES, "bf16 moments", "thread_seconds", 0.75, "fp32 moments"),
    ),
)  # fmt: skip
