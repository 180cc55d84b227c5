"""Seconds and bytes of an EMA update, against other libraries and a plain memory copy.

timm and ema-pytorch take part where they are installed (``pip install --no-deps``).
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.framework import Benchmark, Case, Context, Goal, Measured, alternate, timed
from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows

DECAY = 0.999
WIDTH = 1410
OURS, TWO, COPY = "EMAShadow", "EMAShadows, two", "memory copy"
NONE, FOREGROUND, BACKGROUND = "no EMA", "EMAShadow.step", "BackgroundEMA.step"


class Stack(torch.nn.Module):
    """2 million parameters per layer, in matrices and biases as a transformer has them."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        """Something to train: (batch, width) in, the same out."""
        for layer in self.layers:
            x_bc = torch.tanh(layer(x_bc))
        return x_bc


def cases(quick: bool) -> Sequence[Case]:
    size = {"layers": 2, "width": 256} if quick else {"layers": 100, "width": WIDTH}
    rounds = 2 if quick else 15
    return (
        Case(name="update", settings={**size, "rounds": rounds}, measure=update),
        Case(
            name="training step",
            settings={**size, "rounds": 2 if quick else 7, "batch": 8 if quick else 128},
            measure=training_step,
        ),
    )


def update(settings: Mapping[str, Any], context: Context) -> Measured:
    """The update alone, in the foreground."""
    model = Stack(settings["layers"], settings["width"])
    parameters = list(model.parameters())

    def move() -> None:
        with torch.no_grad():
            torch._foreach_add_(parameters, 1e-3)

    running = _contestants(model)
    context.log(f"  {', '.join(running)}")
    samples = alternate(
        {name: timed(act) for name, act in running.items()},
        rounds=settings["rounds"],
        warm_up=4,  # The first three updates of a shadow are checked.
        before=move,
    )
    return Measured(samples=_with_rates(samples, model), baseline=COPY, facts=_facts(model))


def _with_rates(
    samples: Mapping[str, Mapping[str, list[float]]], model: torch.nn.Module
) -> dict[str, dict[str, list[float]]]:
    """Adds the rate at which memory was moved, counting what must move and nothing else."""
    count = sum(parameter.numel() for parameter in model.parameters())
    # fp32: a copy reads and writes, an average reads two and writes one.
    moved = dict.fromkeys(samples, 12 * count) | {COPY: 8 * count, TWO: 20 * count}
    return {
        name: {
            **found,
            "bytes_per_second": [moved[name] / seconds for seconds in found["seconds"]],
        }
        for name, found in samples.items()
    }


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": count,
        "threads": torch.get_num_threads(),
        "bytes moved per update": 12 * count,
        "bytes moved per copy": 8 * count,
    }


def _contestants(model: Stack) -> dict[str, Callable[[], object]]:
    """What updates an average of ``model``, by name."""
    from diffusers.training_utils import EMAModel

    parameters = list(model.parameters())
    one_by_one = EMAModel(parameters, decay=DECAY)
    at_once = EMAModel(parameters, decay=DECAY, foreach=True)
    pair = EMAShadows(shadows={"a": EMAShadow(decay=DECAY), "b": EMAShadow(decay=0.99)}).attach(
        model
    )
    copies = [torch.empty_like(parameter) for parameter in parameters]

    def copy() -> None:
        with torch.no_grad():
            for target, parameter in zip(copies, parameters, strict=True):
                target.copy_(parameter)

    found: dict[str, Callable[[], object]] = {
        COPY: copy,
        OURS: EMAShadow(decay=DECAY).attach(model).step,
        TWO: pair.step,
        "diffusers EMAModel": functools.partial(one_by_one.step, parameters),
        "diffusers EMAModel, foreach": functools.partial(at_once.step, parameters),
    }
    return found | _timm(model) | _ema_pytorch(model)


def _timm(model: Stack) -> dict[str, Callable[[], object]]:
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    # The file alone: the package wants torchvision, which an average does not.
    path = Path(spec.submodule_search_locations[0], "utils", "model_ema.py")
    alone = importlib.util.spec_from_file_location("timm_model_ema", path)
    if alone is None or alone.loader is None:
        return {}
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    average = module.ModelEmaV3(model, decay=DECAY, foreach=True)
    return {"timm ModelEmaV3, foreach": functools.partial(average.update, model)}


def _ema_pytorch(model: Stack) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("ema_pytorch") is None:
        return {}
    from ema_pytorch import EMA

    average = EMA(
        model, beta=DECAY, update_every=1, update_after_step=0, use_foreach=True,
        include_online_model=False,
    )  # fmt: skip
    return {"ema-pytorch EMA, foreach": average.update}


def training_step(settings: Mapping[str, Any], context: Context) -> Measured:
    """A whole step, by how the average is updated; forward and backward use the same cores."""
    model = Stack(settings["layers"], settings["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x_bc = torch.randn(settings["batch"], settings["width"])
    ema = EMAShadow(decay=DECAY).attach(model)
    context.log("  with and without")
    with BackgroundEMA(shadow=EMAShadow(decay=DECAY), optimizer=optimizer).attach(model) as later:
        updates = {NONE: _nothing, FOREGROUND: ema.step, BACKGROUND: later.step}
        samples = alternate(
            {
                name: functools.partial(_two_steps, model, optimizer, x_bc, step)
                for name, step in updates.items()
            },
            rounds=settings["rounds"],
            warm_up=2,
            before=later.join,
        )
    return Measured(samples=samples, baseline=NONE, facts=_facts(model))


def _two_steps(
    model: Stack,
    optimizer: torch.optim.Optimizer,
    x_bc: torch.Tensor,
    update_average: Callable[[], object],
) -> dict[str, float]:
    # The update of the first step overlaps the second, and its end is waited for there.
    started = 0.0
    for repeat in range(3):
        if repeat == 1:
            started = time.perf_counter()
        model(x_bc).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_average()
    return {"seconds": (time.perf_counter() - started) / 2}


def _nothing() -> None:
    pass


BENCHMARK = Benchmark(
    name="ema",
    title="an EMA update against other libraries and a memory copy, 200 million parameters",
    cases=cases,
    ours=frozenset({OURS, TWO, FOREGROUND, BACKGROUND}),
    goals=(
        Goal(
            text="an update of `EMAShadow` takes at most 1.3 times a copy of the weights",
            case="update",
            contestant=OURS,
            against=COPY,
            quantity="seconds",
            limit=1.3,
        ),
        Goal(
            text="faster than diffusers' `EMAModel` with foreach",
            case="update",
            contestant=OURS,
            against="diffusers EMAModel, foreach",
            quantity="seconds",
            limit=1.0,
        ),
        Goal(
            text="a step with `BackgroundEMA` takes at most 3 % longer",
            case="training step",
            contestant=BACKGROUND,
            against=NONE,
            quantity="seconds",
            limit=1.03,
        ),
    ),
)
