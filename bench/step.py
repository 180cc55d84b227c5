"""Adam in host memory: zerotune's single pass against DeepSpeed's chain, alone and in training."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.ema import Stack
from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from bench.workers import Worker, alone, resolved, together

CHAIN, PASS, COPY = "DeepSpeed's separate passes", "one pass", "memory copy"
BY_HAND, THEIRS, OURS = "hand-written DeepSpeed", "zerotune, DeepSpeed's engine", "zerotune"
BEHIND, BEFORE = "zerotune, host engine", "zerotune, DeepSpeed's own step"
AVERAGES: Mapping[str, int] = {"": 0, ", one EMA": 1, ", two EMAs": 2}
_RAM = {"offload": "cpu", "precision": "bf16"}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-2 with EMA": {"stage": 2, **_RAM},
    "ZeRO-3 with EMA": {"stage": 3, **_RAM, "stage3_param_persistence_threshold": 0},
}
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
SIMULATED = "ZeRO-2 with EMA, simulated device"


def cases(quick: bool) -> Sequence[Case]:
    by_itself = {"parameters": 2**20 if quick else 6 * 2**24, "rounds": 2 if quick else 15}
    small = {"layers": 2, "width": 256, "rounds": 2, "steps": 1}
    size = small if quick else {"layers": 24, "width": 1410, "rounds": 15, "steps": 2}
    slow = small if quick else {"layers": 24, "width": 2000, "rounds": 10, "steps": 1}
    slow = {
        **slow,
        "plan": dict(PLANS["ZeRO-2 with EMA"]),
        "forward_seconds": 0.01 if quick else 0.3,
    }
    names = list(PLANS)[:1] if quick else list(PLANS)
    return (
        Case("step alone", step_alone, by_itself),
        Case(STATES, lean_states, {**by_itself, "rounds": 2 if quick else 41}),
        *(Case(name, training, {"plan": dict(PLANS[name]), **size}) for name in names),
        Case(SIMULATED, hidden, slow),
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
        from zerotune.backend.step.adams import SplitMasters, stepper_of

        weights = torch.randn(self._count)
        high = weights.bfloat16()
        masters, key = None, torch.nn.Parameter(weights)
        if split:
            low = torch.zeros(self._count, dtype=torch.int16)
            masters, key = SplitMasters(high=high, low=low), torch.nn.Parameter(low, False)
        kind: Any = CLASSES.get(name, _cpu_adam_over)
        adam = kind([key], lr=1e-4, weight_decay=0.01)
        stepper = stepper_of(adam)(op=self._op, adam=adam)

        def step() -> None:
            stepper.rewind()
            begun = stepper.begin(
                key, gradient=self._gradient, group=adam.param_groups[0], factor=0.999,
                out=None if split else high, masters=masters,
            )  # fmt: skip
            begun.run(0, self._count)

        return step


class Slab:
    """96 million weights with a bf16 gradient, once for the chain and once for the pass."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.step.adams import HostAdam
        from zerotune.backend.step.kernel import EMAPart, load_host_step
        from zerotune.backend.upstream import require_deepspeed

        require_deepspeed(accelerator="cpu")
        self._settings = settings
        self._count = count = settings["parameters"]
        self._chain, self._pass = (_cpu_adam(count) for _ in range(2))
        self._host = HostAdam(op=load_host_step(), adam=self._pass)
        self._ema_part = EMAPart
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
            factor=float(self._factor), out=self._out,
        )  # fmt: skip
        shadows = self._shadows[:averages]
        step.run(0, self._count, [self._ema_part(tensor=s, weight=1 - DECAY) for s in shadows])


def _cpu_adam(count: int) -> Any:
    return _cpu_adam_over([torch.nn.Parameter(torch.randn(count))], weight_decay=0.01)


def _cpu_adam_over(parameters: Any, **settings: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotune.backend.ops import same_ninja

    with same_ninja():
        return DeepSpeedCPUAdam(parameters, **settings)


def _only(adam: Any) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = adam.param_groups[0]["params"][0]
    return parameter


def training(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure training steps with an EMA, on a model of many weights and little arithmetic."""
    contestants: dict[str, tuple[type[_Loop], dict[str, Any]]] = {
        BY_HAND: (RawLoop, {}),
        THEIRS: (EngineLoop, {"engine": "deepspeed"}),
        OURS: (EngineLoop, {}),
    }
    return _interleaved(contestants, settings)


def hidden(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure how much of the step overlaps the next forward, if a device runs the forward."""
    contestants: dict[str, tuple[type[_Loop], dict[str, Any]]] = {
        BEFORE: (SleepingLoop, {"engine": "deepspeed"}),
        BEHIND: (SleepingLoop, {}),
    }
    found = _interleaved(contestants, settings)
    # Leave out the backward pass: its variation is larger than the difference.
    before, behind = (
        [
            forward + step + ema - device
            for forward, step, ema, device in zip(
                *(taken[f"{part}_seconds"] for part in ("forward", "step", "ema", "device")),
                strict=True,
            )
        ]
        for taken in found.samples.values()
    )
    shares = [rest / whole for rest, whole in zip(behind, before, strict=True)]
    samples = {**found.samples, BEHIND: {**found.samples[BEHIND], "visible_share": shares}}
    return Measured(samples=samples, baseline=BEFORE, facts=found.facts)


def _interleaved(
    contestants: Mapping[str, tuple[type[_Loop], dict[str, Any]]], settings: Mapping[str, Any]
) -> Measured:
    """Measure the steps of each contestant; the first is the baseline."""
    made = {name: (loop, {**settings, **more}) for name, (loop, more) in contestants.items()}
    with together(made) as workers:
        samples = alternate(
            {
                name: functools.partial(worker.call, "steps", settings["steps"])
                for name, worker in workers.items()
            },
            rounds=settings["rounds"],
            # The EMA overlaps the step after three updates have been checked.
            warm_up=max(3, 6 // settings["steps"]),
        )
        losses = [worker.call("losses") for worker in workers.values()]
    same = all(found == losses[0] for found in losses)
    facts = {"losses are equal bit for bit": same}
    return Measured(samples=samples, baseline=next(iter(contestants)), facts=facts)


class _Loop:
    """Steps of ``Stack``; subclasses create the engine and the EMA."""

    engine: Any

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self._settings = settings
        self._model = self._made()
        self._x_bc = torch.randn(2, settings["width"]).bfloat16()
        self._losses: list[float] = []

    def steps(self, count: int) -> dict[str, float]:
        """Return seconds per step, whole and by part."""
        parts = {"forward": self._forward, "backward": lambda: self.engine.backward(self._loss),
                 "step": self.engine.step, "ema": self.average}  # fmt: skip
        names = ("seconds", "device_seconds", *(f"{part}_seconds" for part in parts))
        found = dict.fromkeys(names, 0.0)
        for _ in range(count):
            for part, act in parts.items():
                seconds = timed(act)()["seconds"] / count
                found[f"{part}_seconds"] += seconds
                found["seconds"] += seconds
                if part == "backward":
                    found["device_seconds"] += self.device_seconds() / count
            self._losses.append(float(self._loss.detach()))
        return found

    def _forward(self) -> None:
        self._loss: torch.Tensor = self.engine(self._x_bc).float().square().mean()

    def device_seconds(self) -> float:
        """Return the seconds of a forward with no step pending, where a subclass measures it."""
        return 0.0

    def _made(self) -> torch.nn.Module:
        return Stack(self._settings["layers"], self._settings["width"])

    def average(self) -> None:
        pass

    def losses(self) -> list[float]:
        return self._losses

    def _resolved(self) -> Any:
        plan = {**self._settings["plan"], "gradient_clipping": 1.0}
        return resolved(self._model, plan, batch=2, engine=self._settings.get("engine"))


class EngineLoop(_Loop):
    """zerotune's engine and ``EMAShadow``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.ema import EMAShadow
        from zerotune.training.setup import build_engine

        super().__init__(settings)
        self.engine = build_engine(model=self._model, plan=self._resolved())
        self._ema = EMAShadow(decay=DECAY).attach(self.engine)

    def average(self) -> None:
        self._ema.step()


class SleepingLoop(EngineLoop):
    """``EngineLoop`` with simulated device computation: this process sleeps meanwhile."""

    def device_seconds(self) -> float:
        """Time a forward with nothing else running."""
        loss = self._loss
        with self.engine.evaluating():
            seconds = timed(self._forward)()["seconds"]
        self._loss = loss
        return seconds

    def _made(self) -> torch.nn.Module:
        layers, width = self._settings["layers"], self._settings["width"]
        share = self._settings["forward_seconds"] / layers
        return torch.nn.Sequential(*(_Sleeping(width * width, share) for _ in range(layers)))


class _Sleeping(torch.nn.Module):
    """A layer that sleeps in forward, and twice as long in backward, without using a core."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(numel))
        self.register_buffer("gradient", torch.randn(numel).bfloat16(), persistent=False)
        self._seconds = seconds

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Elsewhere.apply(x_bc, self.weight, self.gradient, self._seconds)
        return found


class _Elsewhere(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_bc: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x_bc + weight[:1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], ctx.gradient.clone(), None, None


class RawLoop(_Loop):
    """DeepSpeed with the same configuration, and ``lerp_`` on its flat master weights."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.backend.ops import same_ninja
        from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

        super().__init__(settings)
        config = self._resolved().to_deepspeed()
        os.environ.update(alone())
        deepspeed = require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        with same_ninja():
            self.engine, *_ = deepspeed.initialize(
                model=self._model,
                model_parameters=list(self._model.parameters()),
                config=config,
            )
        three = settings["plan"]["stage"] == 3
        name = "fp32_partitioned_groups_flat" if three else "single_partition_of_fp32_groups"
        self._slabs = getattr(self.engine.optimizer, name)
        self._shadows = [slab.detach().clone() for slab in self._slabs]

    @torch.no_grad()
    def average(self) -> None:
        for shadow, slab in zip(self._shadows, self._slabs, strict=True):
            shadow.lerp_(slab, 1 - DECAY)


_WHOLE = "a training step takes at most 0.85 times as long as in a hand-written loop"
_ONE_PASS = "a single pass takes at most 0.65 times as long as DeepSpeed's separate passes"

BENCHMARK = Benchmark(
    name="step",
    title="a single-pass Adam step in host memory, compared with DeepSpeed's separate passes",
    cases=cases,
    ours=(OURS, BEHIND, *(PASS + name for name in AVERAGES), *list(LEAN)[1:]),
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
        *(Goal(f"{case}: {_WHOLE}", case, OURS, "seconds", 0.85, BY_HAND) for case in PLANS),
        Goal("at least 90 % of the time that Adam and the EMA need overlaps with a simulated "
             "device's computation",
             SIMULATED, BEHIND, "visible_share", 0.1),
    ),
)  # fmt: skip
