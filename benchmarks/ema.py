"""Seconds per EMA update, against other libraries and a plain memory copy; gain in background.

timm and ema-pytorch take part where they are installed (``pip install --no-deps``).
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows

ROUNDS = 7
LAYERS = 24
DECAY = 0.999
BATCH = 64


class Stack(torch.nn.Module):
    """2 million parameters per layer, in matrices and biases as a transformer has them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1410, 1410) for _ in range(layers))

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        """Something to train: (batch, 1410) in, the same out."""
        for layer in self.layers:
            x_bc = torch.tanh(layer(x_bc))
        return x_bc


def measure(layers: int = LAYERS) -> dict[str, Any]:
    """Alternate the contestants; report every sample and the medians.

    Args:
        layers: Of 2 million parameters; 100 for 200 million.
    """
    updates = update_samples(Stack(layers))
    steps = step_samples(Stack(layers))
    samples = updates | {f"training step, {name}": values for name, values in steps.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in Stack(layers).parameters()),
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "unit": "seconds per update, or per training step",
        "medians": {name: statistics.median(values) for name, values in samples.items()},
        "samples": samples,
    }


def update_samples(model: Stack) -> dict[str, list[float]]:
    """Seconds of the update alone."""
    parameters = list(model.parameters())
    running = contestants(model)
    samples: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(ROUNDS + 1):
        for name, run in running.items():
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(1e-3)
            started = time.perf_counter()
            run()
            if turn:
                samples[name].append(time.perf_counter() - started)
    return samples


def contestants(model: Stack) -> dict[str, Callable[[], object]]:
    """What updates an average of ``model``, by name."""
    from diffusers.training_utils import EMAModel

    parameters = list(model.parameters())
    reference = EMAModel(parameters, decay=DECAY, foreach=True)
    pair = EMAShadows(shadows={"a": EMAShadow(decay=DECAY), "b": EMAShadow(decay=0.99)}).attach(
        model
    )
    copies = [torch.empty_like(parameter) for parameter in parameters]

    def copy() -> None:
        with torch.no_grad():
            for target, parameter in zip(copies, parameters, strict=True):
                target.copy_(parameter)

    found: dict[str, Callable[[], object]] = {
        "EMAShadow.step": EMAShadow(decay=DECAY).attach(model).step,
        "EMAShadows.step, two shadows": pair.step,
        "diffusers.EMAModel.step(foreach)": lambda: reference.step(parameters),
        "memory copy": copy,
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
    return {"timm.ModelEmaV3.update(foreach)": lambda: average.update(model)}


def _ema_pytorch(model: Stack) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("ema_pytorch") is None:
        return {}
    from ema_pytorch import EMA

    average = EMA(
        model, beta=DECAY, update_every=1, update_after_step=0, use_foreach=True,
        include_online_model=False,
    )  # fmt: skip
    return {"ema_pytorch.EMA.update(foreach)": average.update}


def step_samples(model: Stack) -> dict[str, list[float]]:
    """Seconds of a whole training step on this machine's CPU, by how the average is updated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, 1410)
    ema = EMAShadow(decay=DECAY).attach(model)
    samples: dict[str, list[float]] = {"no EMA": [], "EMAShadow": [], "BackgroundEMA": []}
    with BackgroundEMA(shadow=EMAShadow(decay=DECAY), optimizer=optimizer).attach(model) as later:
        updates: dict[str, Callable[[], object]] = {
            "no EMA": lambda: None,
            "EMAShadow": ema.step,
            "BackgroundEMA": later.step,
        }
        for turn in range(ROUNDS + 1):
            for name, update in updates.items():
                seconds = _two_steps(model, optimizer, x, update)
                if turn:
                    samples[name].append(seconds)
            later.join()
    return samples


def _two_steps(
    model: Stack, optimizer: torch.optim.Optimizer, x: torch.Tensor, update: Callable[[], object]
) -> float:
    # The update of the first step overlaps the second, and its end is waited for there.
    started = 0.0
    for repeat in range(3):
        if repeat == 1:
            started = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()
    return (time.perf_counter() - started) / 2
