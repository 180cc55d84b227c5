"""Streamed weights: how much copying and host work simulated computation hides, and real steps.

Computation, copies and passes are sleeps of given lengths, which leave the cores free; everything
else is the real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.ema import Stack
from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from bench.workers import Worker, resolved, together

RESIDENT, WAITS, HIDDEN = "computation alone", "no overlap", "weights on the device, hidden step"
STREAMED, EAGER = "streamed, hidden step", "streamed, eager steps"
PLAIN, ALL_HERE, ZERO_2 = "plain engine with offload", "streamed, all units stay", "ZeRO-2"
REAL: Final = "real steps on the CPU"
REGIMES: Final[Mapping[str, tuple[float, float, float, float, float]]] = {
    "optimizer pass half as long as the computation": (0.30, 0.90, 0.23, 0.23, 0.60),
    "optimizer pass 0.9 times as long as the computation": (0.30, 0.90, 0.23, 0.23, 1.08),
    "optimizer pass twice as long as the computation": (0.30, 0.90, 0.23, 0.23, 2.40),
    "transfers 1.5 times as long as the forward pass": (0.30, 0.90, 0.45, 0.45, 0.60),
}
"""Seconds per step: forward, backward, weights to the device (once), gradients to the host, host
pass."""
_MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    RESIDENT: {"window": 999, "clipping": 1.0, "free": True},
    WAITS: {"window": 2, "clipping": 1.0, "ahead": 0, "waits": True},
    HIDDEN: {"window": 999, "clipping": 1.0},
    STREAMED: {"window": 3, "clipping": 1.0},
    EAGER: {"window": 3, "clipping": 0.0},
}


def cases(quick: bool) -> Sequence[Case]:
    blocks, rounds = (4, 2) if quick else (24, 6)
    scale = 0.02 if quick else 1.0
    chosen = list(REGIMES)[:1] if quick else list(REGIMES)
    size = {"layers": 2, "width": 64, "rounds": 2, "steps": 1}
    real = size if quick else {"layers": 24, "width": 1410, "rounds": 15, "steps": 2}
    return (
        *(
            Case(
                name,
                simulated,
                {
                    "blocks": blocks,
                    "rounds": rounds,
                    "steps": 2,
                    "times": [seconds * scale for seconds in REGIMES[name]],
                },
            )
            for name in chosen
        ),
        Case(REAL, real_steps, real),
    )


def simulated(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure steps of a chain of blocks, in five modes."""
    made = {name: (Simulated, {**settings, **mode}) for name, mode in _MODES.items()}
    with together(made) as workers:
        samples = alternate(
            {name: _steps_of(worker) for name, worker in workers.items()},
            rounds=settings["rounds"],
        )
    forward, backward, weights, gradients, host = settings["times"]
    bound = max(max(forward, weights) + max(backward, weights, gradients), host)
    taken = samples[EAGER]["seconds"]
    samples[EAGER]["times_the_bound"] = [seconds / bound for seconds in taken]
    names = ("forward", "backward", "weights", "gradients", "host")
    facts = {
        "bound, seconds": bound,
        **dict(zip((f"{name}, seconds" for name in names), settings["times"], strict=True)),
    }
    return Measured(samples=samples, baseline=WAITS, facts=facts)


def _steps_of(worker: Worker) -> Callable[[], dict[str, float]]:
    return lambda: dict(worker.call("steps"))


class Simulated:
    """A chain of small blocks under the engine, with the timing of a large one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.plan.model import Streaming
        from zerotune.training.setup import build_engine

        self._settings = settings
        count = settings["blocks"]
        forward, backward, *rest = (seconds / count for seconds in settings["times"])
        torch.manual_seed(0)
        blocks = [_Block(str(index), forward, backward) for index in range(count)]
        model = torch.nn.Sequential(*blocks)
        plan = resolved(
            model,
            {
                "stage": 2, "offload": "cpu", "precision": "bf16",
                "gradient_clipping": settings["clipping"],
            },
            batch=2,
            streamed=Streaming(units=("_Block",), window=settings["window"]),
        )  # fmt: skip
        self._engine: Any = build_engine(model=model, plan=plan)
        self._x_bc = torch.randn(2, 16).bfloat16()
        if not settings.get("free"):
            pace(*rest, ahead=settings.get("ahead"))

    def steps(self) -> dict[str, float]:
        """Return seconds per step, and uploads per step that were not prefetched."""
        # One untimed step, so that nothing pending from other contestants' turns is left.
        self.step()
        count, counts = self._settings["steps"], self._engine.counts
        late, began = counts.late, time.perf_counter()
        for _ in range(count):
            self.step()
        return {
            "seconds": (time.perf_counter() - began) / count,
            "late_fetches": (counts.late - late) / count,
        }

    def step(self) -> None:
        """Train one step; unless it must wait, its passes run on into the next step."""
        engine = self._engine
        engine.backward(engine(self._x_bc).float().square().mean())
        engine.step()
        if self._settings.get("waits"):
            engine.master_weights.settle()


class Recorded(Simulated):
    """``Simulated``, which also records the spans of each lane."""

    def timeline(self, steps: int) -> list[tuple[str, str, float, float]]:
        """Return lane, block, start and end of each span, in seconds since the first."""
        for _ in range(3):
            self.step()
        self._engine.master_weights.settle()
        hosts = {unit.host.data_ptr(): unit.name for unit in self._engine._units}
        SPANS.clear()
        for _ in range(steps):
            self.step()
        self._engine.master_weights.settle()
        first = min(began for _, _, began, _ in SPANS)
        return [
            (lane, hosts[int(name)] if lane == IN else name, began - first, end - first)
            for lane, name, began, end in SPANS
        ]


FORWARD, BACKWARD, IN, OUT, PASS = (
    "forward", "backward", "weights to the device", "gradients off it", "host pass",
)  # fmt: skip
SPANS: Final[list[tuple[str, str, float, float]]] = []
"""Recorded spans of this process: lane, block, start, end."""


def pace(weights: float, gradients: float, host: float, *, ahead: int | None = None) -> None:
    """Patch this process so that each unit's copies and pass take so many seconds.

    Args:
        weights: Seconds of a unit's copy to the device.
        gradients: Seconds of its gradients' copy to the host.
        host: Seconds of its pass.
        ahead: Number of units to prefetch.
    """
    from zerotune.backend.stream import passes, residency, steps

    changed: Any = residency
    if ahead is not None:
        changed._AHEAD = ahead
    changed._copy = _slowed(changed._copy, IN, weights, lambda host, _: str(host.data_ptr()))
    land: Any = steps.StreamedSteps
    land._land = _slowed(land._land, OUT, gradients, lambda _self, unit, *_: unit.name)
    take: Any = passes.UnitPass
    take.take = _slowed(take.take, PASS, host, lambda taken: taken.unit.name)


def _slowed(
    function: Callable[..., Any], lane: str, seconds: float, name: Callable[..., str]
) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        _spend(lane, name(*args), seconds)
        return function(*args)

    return slow


def _spend(lane: str, name: str, seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    SPANS.append((lane, name, began, time.perf_counter()))


class _Block(torch.nn.Module):
    """A few weights that sleep in forward and backward, without using a core."""

    def __init__(self, name: str, forward: float, backward: float) -> None:
        super().__init__()
        self.inner, self._times = torch.nn.Linear(16, 16), (name, forward, backward)

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Elsewhere.apply(x_bc + self.inner(x_bc), *self._times)  # type: ignore[no-untyped-call]
        return found


class _Elsewhere(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_bc: torch.Tensor, name: str, forward: float, backward: float
    ) -> torch.Tensor:
        ctx.name, ctx.seconds = name, backward
        _spend(FORWARD, name, forward)
        return x_bc.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _spend(BACKWARD, ctx.name, ctx.seconds)
        return gradients[0], None, None, None


def real_steps(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure steps of a model of many weights, with all weights resident in memory."""
    made = {
        PLAIN: (RealSteps, {**settings, "deepspeed": False}),
        ALL_HERE: (RealSteps, {**settings, "streamed": True}),
        ZERO_2: (RealSteps, dict(settings)),
    }
    with together(made) as workers:
        samples = alternate(
            {name: _steps_of(worker) for name, worker in workers.items()},
            rounds=settings["rounds"],
            warm_up=3,
        )
    return Measured(samples=samples, baseline=PLAIN)


class RealSteps:
    """Steps of ``Stack`` under an engine with the optimizer in host memory."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune.plan.model import Streaming
        from zerotune.training.setup import build_engine

        torch.manual_seed(0)
        self._count, width = settings["steps"], settings["width"]
        model = Stack(settings["layers"], width)
        plan = resolved(
            model,
            {"stage": 2, "offload": "cpu", "precision": "bf16", "gradient_clipping": 1.0},
            batch=2,
            deepspeed=settings.get("deepspeed", True),
            streamed=Streaming(units=("Linear",), window=999)
            if settings.get("streamed")
            else False,
        )
        self._engine: Any = build_engine(model=model, plan=plan)
        self._x_bc = torch.randn(2, width).to(self._engine.dtype)

    def steps(self) -> dict[str, float]:
        """Return seconds per step, including its pending work."""
        return {"seconds": timed(self._steps)()["seconds"] / self._count}

    def _steps(self) -> None:
        for _ in range(self._count):
            self._engine.backward(self._engine(self._x_bc).float().square().mean())
            self._engine.step()
            self._engine.master_weights.settle()


def _if(case: str) -> str:
    """Return the name of a case as a condition."""
    subject, verb = ("optimizer pass", "takes") if "optimizer" in case else ("transfers", "take")
    article = "the " if verb == "takes" else ""
    return case.replace(subject, f"if {article}{subject} {verb}", 1)


BENCHMARK = Benchmark(
    name="stream",
    title="steps with streamed weights, both real and with simulated computation and transfers",
    cases=cases,
    ours=(STREAMED, EAGER, ALL_HERE),
    goals=(
        *(
            goal
            for case in REGIMES
            for goal in (
                Goal(f"{_if(case)}, a step takes at most 1.10 times the lower bound", case, EAGER,
                     "times_the_bound", 1.10),
                Goal(f"{_if(case)}, no weights arrive late", case, EAGER, "late_fetches", 0.0),
                Goal(f"{_if(case)}, a step takes at most 0.60 times as long as without overlap",
                     case, EAGER, "seconds", 0.60, WAITS),
                Goal(f"{_if(case)}, a step takes at most 0.85 times as long as with a hidden "
                     "optimizer step", case, EAGER, "seconds", 0.85, HIDDEN),
            )
        ),
        Goal("with all units on the device, a step takes at most 3 % longer than in the plain "
             "engine", REAL, ALL_HERE, "seconds", 1.03, PLAIN),
    ),
)  # fmt: skip
