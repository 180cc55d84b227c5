"""Steps of large models on catalogued cards, in virtual time, and real steps on the CPU.

``python -m bench.stream MODEL PLAN`` rehearses one case; ``--trace FILE`` writes what each lane
does, for Chrome's tracing page or https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.ema import Stack
from bench.on_card import COMPUTE, HOST, IN, OUT, PLANS, OnCard, Rehearsed
from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from bench.workers import Worker, alone, resolved, together
from zerotune.plan.memory.rates import CARDS

CLIPPED, EAGER, _, *UPDATED = PLANS
PLAIN, ALL_HERE, DEEPSPEED = "plain engine with offload", "streamed, all units stay", "ZeRO-2"
REAL: Final = "real steps on the CPU"
LANES: Final[Mapping[str, str]] = {COMPUTE: "device", IN: "in", OUT: "out", HOST: "host"}
"""Lanes of the clock, and those of the time model."""
MODELS: Final[Mapping[str, tuple[str, str, int, Sequence[str]]]] = {
    "SDXL, batch 4, on an RTX 4090": ("sdxl", "RTX 4090", 4, tuple(PLANS)[:3]),
    "SDXL, batch 4, on an RTX 3090": ("sdxl", "RTX 3090", 4, tuple(PLANS)[:3]),
    "SD3 Medium, batch 4, on an RTX 4090": ("sd3-medium", "RTX 4090", 4, tuple(PLANS)[:3]),
    # Their weights fill the card unless they are streamed.
    "FLUX.1, batch 4, on an RTX 4090": ("flux", "RTX 4090", 4, (CLIPPED, EAGER)),
    "Qwen-Image, batch 4, on an RTX 4090": ("qwen-image", "RTX 4090", 4, (CLIPPED, EAGER)),
    "SD3 Medium, batch 1, on an RTX 4090": ("sd3-medium", "RTX 4090", 1, (CLIPPED, *UPDATED)),
}
_QUICKEST: Final = "SD3 Medium, batch 4, on an RTX 4090"


def cases(quick: bool) -> Sequence[Case]:
    size = {"layers": 2, "width": 64, "rounds": 2, "steps": 1}
    real = size if quick else {"layers": 24, "width": 1410, "rounds": 15, "steps": 2}
    chosen = {_QUICKEST: MODELS[_QUICKEST]} if quick else MODELS
    return (
        *(
            Case(name, rehearsed, {"model": model, "card": card, "batch": batch, "plans": plans})
            for name, (model, card, batch, plans) in chosen.items()
        ),
        Case(REAL, real_steps, real),
    )


def rehearsed(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Run steps in virtual time, and compare them with the plan's prediction."""
    samples: dict[str, Mapping[str, Sequence[float]]] = {}
    facts: dict[str, Any] = {}
    for plan in settings["plans"]:
        found = rehearse({**settings, "plan": plan})
        expected = found.predicted.expected
        error = max(found.seconds / expected, expected / found.seconds)
        quantities = {
            "seconds": found.seconds,
            "predicted_seconds": expected,
            "times_apart": error,
        }
        if plan in (CLIPPED, EAGER):
            quantities["late_fetches"] = found.late
        # Virtual time repeats exactly.
        samples[plan] = {name: [value, value] for name, value in quantities.items()}
        modelled = lanes_of(found)
        facts |= {f"{plan}, {lane}": [found.lanes.get(lane, 0.0), modelled[lane]] for lane in LANES}
    return Measured(samples=samples, baseline=settings["plans"][0], facts=facts)


def rehearse(settings: Mapping[str, Any]) -> Rehearsed:
    """Run steps in virtual time, in a process of its own."""
    off = {"ZEROTUNE_PROOF": "off", **alone()}
    with Worker(OnCard, dict(settings), environment=off, fresh=True, patience_s=3000) as worker:
        found: Rehearsed = worker.call("rehearse")
    return found


def lanes_of(found: Rehearsed) -> dict[str, float]:
    """Return the seconds that the time model gives each lane of the clock."""
    own = {
        lane: sum(part.seconds for part in found.predicted.parts if part.lane == name)
        for lane, name in LANES.items()
    }
    # The clock lets copies slow down the host instead.
    own[HOST] -= sum(
        part.seconds for part in found.predicted.parts if "through host memory" in part.what
    )
    return own


def trace(found: Rehearsed) -> list[dict[str, Any]]:
    """Return events for Chrome's tracing page."""
    lanes = list(LANES)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    return [
        *names,
        *(
            {"ph": "X", "name": label, "pid": 0, "tid": lanes.index(lane), "ts": 1e6 * start,
             "dur": 1e6 * (end - start)}
            for lane, label, start, end in found.spans
        ),
    ]  # fmt: skip


def main() -> None:
    """Rehearse one plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted({model for model, *_ in MODELS.values()}))
    parser.add_argument("plan", choices=list(PLANS))
    parser.add_argument("--card", choices=[card.name for card in CARDS], default="RTX 4090")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--trace", type=Path, help="file for what each lane does")
    given = vars(parser.parse_args())
    file = given.pop("trace")
    found = rehearse(given)
    print(f"{found.seconds:.3f} s per step, predicted {found.predicted.expected:.3f} s")
    for lane, modelled in lanes_of(found).items():
        print(f"{lane}: {found.lanes.get(lane, 0.0):.3f} s, predicted {modelled:.3f} s")
    if file is not None:
        file.write_text(json.dumps(trace(found)), encoding="utf-8")


def _steps_of(worker: Worker) -> Callable[[], dict[str, float]]:
    return lambda: dict(worker.call("steps"))


def real_steps(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure steps of a model of many weights, with all weights resident in memory."""
    made = {
        PLAIN: (RealSteps, {**settings, "deepspeed": False}),
        ALL_HERE: (RealSteps, {**settings, "streamed": True}),
        DEEPSPEED: (RealSteps, dict(settings)),
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
        from zerotune.plan.context import Streaming
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


BENCHMARK = Benchmark(
    name="stream",
    title="rehearsed steps of large models on catalogued cards, and real steps on the CPU",
    cases=cases,
    ours=(*PLANS, ALL_HERE),
    goals=(
        *(
            Goal(f"{case}, {plan}: the predicted time is within 10 %", case, plan,
                 "times_apart", 1.10)
            for case, (*_, plans) in MODELS.items()
            for plan in plans
        ),
        *(
            Goal(f"{case}, {plan}: no weights arrive late", case, plan, "late_fetches", 0.0)
            for case, (*_, plans) in MODELS.items()
            for plan in (CLIPPED, EAGER)
            if plan in plans
        ),
        Goal("with all units on the device, a step takes at most 3 % longer than in the plain "
             "engine", REAL, ALL_HERE, "seconds", 1.03, PLAIN),
    ),
)  # fmt: skip


if __name__ == "__main__":
    main()
