"""Rank functions of these tests, in a separate module that processes can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.models import digits_batch, tiny_unet
from zerotune import (
    ClassConditional,
    DeepSpeedPlan,
    EMAShadow,
    FlowMatchingObjective,
    ImageTensors,
    MetricsFile,
    Trainer,
)
from zerotune.backend.host.engine import HostEngine
from zerotune.plan.facts import UNIT_ALIGNED
from zerotune.training import Callback

FAMILY = ClassConditional(null_label=10, dropout=0.2)


def dataset(size: int = 22) -> ImageTensors:
    images, labels = digits_batch(size)
    return ImageTensors(images=images, labels=labels)


def model_with_dropout() -> Any:
    model = tiny_unet()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def plan(stage: int = 2, offload: str = "cpu", **changes: Any) -> DeepSpeedPlan:
    options: dict[str, Any] = {
        "stage": stage,
        "offload": offload,
        "precision": "fp32",
        "train_batch_size": 8,
        "micro_batch_size": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    return DeepSpeedPlan.build(**(options | changes))


def trainer(deepspeed: bool = True, wanted: Any = None, **changes: Any) -> Trainer:
    if wanted is None:
        wanted = plan() if deepspeed else plan(stage=0, offload="none")
    options: dict[str, Any] = {
        "model": tiny_unet(),
        "plan": wanted,
        "data": dataset(),
        "objective": FlowMatchingObjective(family=FAMILY),
        "callbacks": [],
        "deepspeed": deepspeed,
        "seed": 3,
    }
    return Trainer(**(options | changes))


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.events: list[str] = []

    def on_fit_start(self, trainer, *, steps):
        self.events.append(f"start {trainer.step} of {steps}")

    def on_step_end(self, _trainer, metrics):
        self.losses.append(metrics.loss)

    def on_save(self, _trainer, path):
        self.events.append(f"save {path.name}")

    def on_resume(self, _trainer, path):
        self.events.append(f"resume {path.name}")

    def on_fit_end(self, _trainer):
        self.events.append("end")


def whole_run(deepspeed: bool, folder: str) -> dict[str, Any]:
    """Train, save, sample and report, as a user does."""
    losses = Losses()
    with trainer(
        deepspeed,
        ema=EMAShadow(decay=0.9),
        callbacks=[losses, MetricsFile(Path(folder) / "metrics.jsonl")],
    ) as running:
        report = running.fit(steps=5)
        saved = running.save(Path(folder) / "checkpoint")
        labels = torch.tensor([3, 1, 4])
        sampled = {
            ema: running.sample(labels=labels, steps=2, guidance_scale=1.5, ema=ema)
            for ema in (True, False)
        }
        trained = running.fit(steps=5).steps
        if running.is_main:
            report.save(folder)
        return {
            "losses": losses.losses,
            "events": losses.events,
            "report": report,
            "steps_after": trained,
            "saved": saved,
            "samples": {ema: images.numpy() for ema, images in sampled.items()},
            "memory": memory(running),
            "explanation": running.explain(),
            "printed": str(running),
            "distance": running.ema.distance(),
        }


def uninterrupted(deepspeed: bool, folder: str) -> tuple[list[float], dict[str, Any]]:
    """Train six steps, with a checkpoint after three."""
    with trainer(deepspeed, model=model_with_dropout(), ema=EMAShadow(decay=0.9)) as running:
        first = running.fit(steps=3).losses
        running.save(folder)
        whole = running.fit(steps=6).losses
        assert whole[:3] == first
        return list(whole), weights(running)


def resumed(deepspeed: bool, folder: str) -> tuple[list[float], dict[str, Any], int]:
    """Train the last three of the six in new processes, with another seed and initial model."""
    model = model_with_dropout()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    with trainer(deepspeed, model=model, ema=EMAShadow(decay=0.9), seed=99) as running:
        running.resume(folder)
        report = running.fit(steps=6)
        return list(report.losses), weights(running), report.first_step


def weights(running: Trainer) -> dict[str, Any]:
    """Return whole master weights and EMA. Collective."""
    return {
        "master": {n: full.numpy() for n, full in running.engine.master_weights.gather()},
        "ema": {n: full.numpy() for n, full in running.ema.gather()},
    }


def regression(engine: Any, batch: Any, generator: Any) -> torch.Tensor:
    """Return a loss without randomness: reproduce the image."""
    images = batch["images"].to(engine.device)
    times = torch.zeros(len(images))
    output = engine(images, times, class_labels=batch["labels"]).sample
    return torch.nn.functional.mse_loss(output, images)


def memory(running: Trainer) -> dict[str, Any]:
    """Return the estimated parts and the bytes of the tensors. Collective."""
    master = running.engine.master_weights
    fragments = [
        (fragment.value.nbytes, sum(state.nbytes for state in fragment.states.values()))
        for fragment in master.read()
    ]
    sizes = [torch.Size(shape).numel() for shape in master.parameters.values()]
    # The host engine aligns each parameter.
    aligned = UNIT_ALIGNED if isinstance(running.engine, HostEngine) else 1
    return {
        "parts": parts_during_a_step(running.report().estimate),
        "master weights": sum(value for value, _ in fragments),
        "optimizer states": sum(states for _, states in fragments),
        "EMA": running.ema.nbytes,
        "elements": sum(sizes),
        "stored": sum(-(-size // aligned) * aligned for size in sizes),
    }


def parts_during_a_step(estimate: Any) -> dict[str, int]:
    parts: dict[str, int] = {}
    for place in ("host", "device", "nvme"):
        for item in estimate.at(place, "optimizer step"):
            parts[item.component] = parts.get(item.component, 0) + item.nbytes
    return parts
