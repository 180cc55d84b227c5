"""Predicted step times, compared with measured ones on CPUs, over plans and models.

Rates are measured as the recipe ``measure_rates.py`` does it, alternating with steps, in a separate
process: their allocations would change the C library's free lists, and so the steps' times. For the
same reason, processes of steps start with a fresh heap and import everything themselves, as a
script does. Both are measured as CPU time of one thread, which excludes other load on the machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from bench.memory import SMALL, TINY
from bench.runner import Benchmark, Case, Goal, Measured, alternate
from bench.workers import Worker, resolved
from tools.families import FLUX, SD3
from zerotune.diffusion.facts import example_inputs
from zerotune.training import Callback
from zerotune.training.events import StepMetrics
from zerotune.training.trainer import RunView

MEASURED, PREDICTED = "measured", "predicted"
PARTS: Final = ("forward", "backward", "optimizer", "ema")
WITHIN: Final = 0.2
"""Largest relative error of a prediction, for steps longer than ``FROM``."""
FROM: Final = 0.2
"""Seconds."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    # Use heads of 64 channels, like real models.
    "U-Net": SMALL | {"attention_head_dim": [1, 2, 4]},
    "tiny U-Net": TINY,
    "SD3": SD3
    | {
        "num_layers": 5,
        "num_attention_heads": 12,
        "caption_projection_dim": 768,
        "joint_attention_dim": 512,
        "pooled_projection_dim": 512,
    },
    "FLUX.1": FLUX
    | {
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 4,
        "joint_attention_dim": 512,
        "pooled_projection_dim": 256,
    },
}
_UNET: Mapping[str, Any] = {"model": "U-Net", "side": 256, "batch": 2}
_SD3: Mapping[str, Any] = {"model": "SD3", "side": 128, "batch": 1}
_FLUX: Mapping[str, Any] = {"model": "FLUX.1", "side": 256, "batch": 1}
_RAM2, _RAM3 = {"stage": 2, "offload": "cpu"}, {"stage": 3, "offload": "cpu"}
_CLIPPED, _FOUR = {"gradient_clipping": 1.0}, {"gradient_accumulation_steps": 4}
# Name, model, precision, rest of the plan, and other settings.
_TABLE: Final = (
    ("plain engine, U-Net, fp32", _UNET, "fp32", {"stage": 0}, {"deepspeed": False}),
    ("ZeRO-0, U-Net, fp32", _UNET, "fp32", {"stage": 0}, {}),
    ("ZeRO-2, U-Net, fp32, recomputed blocks", _UNET, "fp32", {"stage": 2},
     {"checkpointing": True}),
    ("ZeRO-2, U-Net, bf16", _UNET, "bf16", {"stage": 2}, {}),
    ("ZeRO-2, optimizer in RAM, U-Net, fp32, four micro batches", _UNET, "fp32", _RAM2 | _FOUR,
     {"batch": 1}),
    ("ZeRO-3, optimizer in RAM, U-Net, fp32", _UNET, "fp32", _RAM3, {}),
    ("ZeRO-1, SD3, fp32", _SD3, "fp32", {"stage": 1}, {}),
    ("ZeRO-2, optimizer in RAM, SD3, fp32, EMA", _SD3, "fp32", _RAM2, {"ema": True}),
    ("ZeRO-2, optimizer in RAM, SD3, bf16", _SD3, "bf16", _RAM2, {}),
    ("ZeRO-2, optimizer in RAM, SD3, bf16, DeepSpeed's separate passes, clipping, EMA", _SD3,
     "bf16", _RAM2 | _CLIPPED, {"ema": True, "engine": "deepspeed"}),
    ("ZeRO-3, SD3, fp32", _SD3, "fp32", {"stage": 3}, {}),
    ("ZeRO-3, optimizer and parameters in RAM, SD3, bf16, EMA", _SD3, "bf16",
     _RAM3 | {"offload_param": "cpu"}, {"ema": True}),
    ("ZeRO-2, optimizer in RAM, FLUX.1, fp32, recomputed blocks", _FLUX, "fp32", _RAM2,
     {"checkpointing": True}),
    ("ZeRO-3, optimizer in RAM, FLUX.1, bf16", _FLUX, "bf16", _RAM3, {}),
)  # fmt: skip
PLANS: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {**model, "plan": {**plan, "precision": precision}, **more}
    for name, model, precision, plan, more in _TABLE
}


def cases(quick: bool) -> Sequence[Case]:
    kinds = (
        {"ZeRO-2, optimizer in RAM": {"model": "tiny U-Net", "side": 64, "batch": 1,
                                      "plan": {"precision": "fp32", **_RAM2}, "ema": True}}
        if quick else PLANS
    )  # fmt: skip
    turns = {"rounds": 2, "steps": 1, "scale": 1 / 32} if quick else {"rounds": 3, "steps": 2}
    return tuple(Case(name, measure, {**kind, **turns}) for name, kind in kinds.items())


def measure(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure steps and rates in turns."""
    single, scale = {"OMP_NUM_THREADS": "1"}, settings.get("scale", 1.0)
    with (
        Worker(Run, dict(settings), environment=single, fresh=True) as worker,
        Worker(Doctor, environment=single) as doctor,
    ):
        samples = alternate(
            {
                MEASURED: functools.partial(worker.call, "steps", settings["steps"]),
                PREDICTED: lambda: worker.call("predict", doctor.call("rates", scale)),
            },
            rounds=settings["rounds"],
            # The EMA overlaps the step after three updates have been checked.
            warm_up=2,
        )
        facts = worker.call("facts")
    return Measured(samples=samples, baseline=MEASURED, facts=facts)


class Doctor:
    """Measures rates as the recipe ``measure_rates.py`` does, in CPU time of one thread."""

    def rates(self, scale: float) -> dict[str, float]:
        from examples.recipes.measure_rates import measure_rates

        torch.set_num_threads(1)
        return measure_rates(device=torch.device("cpu"), scale=scale, now=time.process_time)


class Run:
    """A ``Trainer`` whose steps are measured in CPU time, and the plan's prediction for them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from zerotune import EMAShadow, Trainer
        from zerotune.training.step import StepClock

        torch.manual_seed(0)
        model, data, loss = _problem(settings)
        deepspeed = settings.get("deepspeed", True)
        self._last = _Last()
        self._trainer = Trainer(
            model=model,
            plan=resolved(
                model, settings["plan"], batch=settings["batch"], deepspeed=deepspeed,
                engine=settings.get("engine"),
            ),
            data=data, objective=loss, deepspeed=deepspeed, threads=1, callbacks=(self._last,),
            ema=EMAShadow(decay=0.999) if settings.get("ema") else None,
            gradient_checkpointing=settings.get("checkpointing", False),
        )  # fmt: skip
        self._trainer.running.clock = StepClock(self._trainer.engine.device, now=time.process_time)
        self._numel = sum(p.numel() for p in model.parameters())
        self._predicted: Any = None

    def steps(self, count: int) -> dict[str, float]:
        """Return the shortest of ``count`` steps, whole and by part, in CPU time."""
        found: list[dict[str, float]] = []
        for _ in range(count):
            self._trainer.fit(steps=self._trainer.step + 1)
            metrics = self._last.metrics
            parts = {name: metrics.phases[name] for name in PARTS}
            found.append(_quantities(metrics.seconds, parts))
        return {name: min(one[name] for one in found) for name in found[0]}

    def predict(self, found: Mapping[str, float]) -> dict[str, float]:
        """Predict the step's time from these rates."""
        from zerotune.plan.memory.rates import catalogued_rates

        plan = self._trainer.engine.plan
        rates = catalogued_rates(plan.platform).with_measured(found, origin="measured")
        estimate = self._trainer.report().estimate
        assert estimate is not None
        self._predicted = estimate.step_time(rates)
        assert self._predicted is not None
        phases = self._predicted.phases
        parts = {name: phases.get(name, 0.0) for name in PARTS}
        parts["optimizer"] += phases.get("weights", 0.0)
        return _quantities(self._predicted.seconds, parts)

    def facts(self) -> dict[str, Any]:
        """Return the size of the model, and the rates that the prediction uses."""
        return {
            "parameters": self._numel,
            "threads": torch.get_num_threads(),
            "rates": sorted({one.rate for one in self._predicted.parts}),
        }

    def close(self) -> None:
        self._trainer.close()


def _quantities(seconds: float, parts: Mapping[str, float]) -> dict[str, float]:
    return {"seconds": seconds} | {f"{name}_seconds": parts[name] for name in PARTS}


class _Last(Callback):
    """Keeps the metrics of the latest step."""

    metrics: StepMetrics

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        self.metrics = metrics


def _problem(settings: Mapping[str, Any]) -> tuple[torch.nn.Module, list[Any], Any]:
    """Return a model of random weights, data that gives the image size, and a loss."""
    import diffusers

    config = dict(MODELS[settings["model"]])
    kind = getattr(diffusers, config["_class_name"])
    model = kind.from_config(config)
    side, batch = settings["side"], settings["batch"]
    made = example_inputs(model)(batch, side, side)
    arguments = tree_map_only(torch.Tensor, lambda leaf: torch.rand(leaf.shape), made)
    latents = torch.randn(batch, 4, side // 8, side // 8)

    def loss(engine: Any, _batch: Any, _generator: torch.Generator) -> torch.Tensor:
        dtype = next(engine.module.parameters()).dtype
        given = tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype), arguments)
        found: torch.Tensor = engine(**given).sample
        return found.float().square().mean()

    return model, [{"latents": latents}] * 2, loss


BENCHMARK = Benchmark(
    name="prediction",
    title="the CPU time of a step on one thread, compared with the predicted time",
    cases=cases,
    ours=(PREDICTED,),
    better="the closer the prediction is to the measured time, the better",
    goals=tuple(
        Goal(f"{name}: {text}", name, one, "seconds", limit, other)
        for name in PLANS
        for text, one, other, limit in (
            (
                "the predicted time is at most 1.2 times the measured time",
                PREDICTED,
                MEASURED,
                1 + WITHIN,
            ),
            (
                "the measured time is at most 1.25 times the predicted time",
                MEASURED,
                PREDICTED,
                1 / (1 - WITHIN),
            ),
        )
    ),
)
