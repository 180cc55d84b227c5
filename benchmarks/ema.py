"""Seconds per EMA update, against diffusers' ``EMAModel`` and a plain memory copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from zerotune import EMAShadow

ROUNDS = 7


class Stack(torch.nn.Module):
    """48 million parameters in 24 matrices and 24 biases, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1410, 1410) for _ in range(24))


def measure() -> dict[str, Any]:
    """Alternate the contestants; report every sample and the medians."""
    from diffusers.training_utils import EMAModel

    model = Stack()
    parameters = list(model.parameters())
    shadow = EMAShadow(decay=0.999).attach(model)
    reference = EMAModel(parameters, decay=0.999, foreach=True)
    copies = [torch.empty_like(parameter) for parameter in parameters]

    def copy() -> None:
        with torch.no_grad():
            for target, parameter in zip(copies, parameters, strict=True):
                target.copy_(parameter)

    contestants: dict[str, Callable[[], object]] = {
        "EMAShadow.step": shadow.step,
        "diffusers.EMAModel.step(foreach)": lambda: reference.step(parameters),
        "memory copy": copy,
    }
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS + 1):
        for name, run in contestants.items():
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(1e-3)
            started = time.perf_counter()
            run()
            if turn:
                samples[name].append(time.perf_counter() - started)
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "rounds": ROUNDS,
        "unit": "seconds per update",
        "medians": {name: statistics.median(values) for name, values in samples.items()},
        "samples": samples,
    }
