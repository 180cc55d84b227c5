"""One training run in three loops: zerotune's ``Trainer``, hand-written DeepSpeed, and accelerate.

All use the same model, configuration, batches and random numbers. Each runs in its own process,
because engines share global state.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from bench.ema import Stack
from bench.workers import alone, anon_bytes, load_libraries, resolved
from zerotune.training import Callback, Trainer

SEED = 0
UNETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1},
    "small": {"block_out_channels": (64, 128, 256), "layers_per_block": 1},
}


@attrs.frozen(kw_only=True, eq=False)
class Problem:
    """A model, its batches, and its loss, both hand-written and as a zerotune objective."""

    model: torch.nn.Module
    batches: list[dict[str, torch.Tensor]]
    by_hand: Callable[[Any, Mapping[str, torch.Tensor], torch.Generator], torch.Tensor]
    objective: Any


def unet_problem(kind: str, *, batch: int, side: int) -> Problem:
    """Build a diffusers U-Net that learns flow matching on random images."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DModel

    from zerotune import FlowMatchingObjective

    torch.manual_seed(SEED)
    levels = len(UNETS[kind]["block_out_channels"])
    model = UNet2DModel(
        sample_size=side,
        down_block_types=("DownBlock2D",) * (levels - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (levels - 1),
        **UNETS[kind],
    )
    batches = [{"images": torch.randn(batch, 3, side, side)} for _ in range(4)]
    scheduler = FlowMatchEulerDiscreteScheduler()
    sigmas, timesteps = scheduler.sigmas.clone(), scheduler.timesteps.clone()

    def by_hand(
        engine: Any, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        device, dtype = engine.device, next(engine.parameters()).dtype
        clean = batch["images"].to(device)
        noise = torch.randn(clean.shape, generator=generator).to(device)
        index = (torch.rand(len(clean), generator=generator) * len(timesteps)).long()
        sigma = sigmas[index].to(device).view(-1, 1, 1, 1)
        noisy = (1.0 - sigma) * clean + sigma * noise
        prediction = engine(noisy.to(dtype), timesteps[index].to(device)).sample
        return torch.nn.functional.mse_loss(prediction.float(), noise - clean)

    return Problem(model=model, batches=batches, by_hand=by_hand, objective=FlowMatchingObjective())


def stack_problem(layers: int, *, width: int) -> Problem:
    """Build wide linear layers: many parameters, little arithmetic."""
    torch.manual_seed(SEED)

    def loss(
        engine: Any, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        noise = torch.randn(batch["x"].shape, generator=generator)
        output: torch.Tensor = engine((batch["x"] + noise).to(engine.device))
        return (output.float() - batch["x"].to(engine.device)).square().mean()

    model, batches = Stack(layers, width), [{"x": torch.randn(2, width)} for _ in range(2)]
    return Problem(model=model, batches=batches, by_hand=loss, objective=loss)


def problem(settings: Mapping[str, Any]) -> Problem:
    if settings["model"] == "stack":
        return stack_problem(settings["layers"], width=settings["width"])
    return unet_problem(settings["model"], batch=settings["batch"], side=settings["side"])


class Loop:
    """Base class of the three loops.

    Args:
        settings: ``plan`` for ``DeepSpeedPlan.build``, and the settings of the problem.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._losses: list[float] = []
        self._ends: list[float] = []
        self._inside: list[float] = []
        self._generator = torch.Generator().manual_seed(SEED)

    def held(self) -> int:
        return load_libraries()

    def start(self) -> int:
        """Create model and engine; return the number of parameters."""
        torch.manual_seed(SEED)
        self._problem = problem(self._settings)
        count = sum(parameter.numel() for parameter in self._problem.model.parameters())
        self._begin()
        gc.collect()
        return count

    def steps(self, count: int) -> dict[str, float]:
        """Train ``count`` steps; return seconds per step, measured from end to end."""
        self._ends = []
        # One extra, untimed step: the previous contestant left cold caches.
        self._train(count + 1)
        return {"seconds": (self._ends[-1] - self._ends[0]) / count}

    def bytes_now(self) -> int:
        gc.collect()
        return anon_bytes()

    def losses(self) -> list[float]:
        return self._losses

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration that zerotune renders from the plan."""
        return dict(self.plan().to_deepspeed())

    def plan(self) -> Any:
        batch = self._settings.get("batch", 2)
        return resolved(self._problem.model, self._settings["plan"], batch=batch)

    def _begin(self) -> None:
        raise NotImplementedError

    def _train(self, count: int) -> None:
        raise NotImplementedError


class _Watch(Callback):
    def __init__(self, note: Callable[[Any], None]) -> None:
        self._note = note

    def on_step_end(self, trainer: Any, metrics: Any) -> None:  # noqa: ARG002
        self._note(metrics)


class TrainerLoop(Loop):
    """zerotune's ``Trainer``."""

    def _begin(self) -> None:
        self._trainer = Trainer(
            model=self._problem.model, plan=self.plan(), data=self._problem.batches,
            objective=self._problem.objective, callbacks=(_Watch(self._note),), seed=SEED,
        )  # fmt: skip
        self._generator = self._trainer._generator
        self._generator.manual_seed(SEED)

    def _note(self, metrics: Any) -> None:
        self._losses.append(metrics.loss)
        phases = metrics.phases
        self._inside.append(phases["forward"] + phases["backward"] + phases["optimizer"])
        self._ends.append(time.perf_counter())

    def _train(self, count: int) -> None:
        self._trainer.fit(steps=self._trainer.step + count)

    def steps(self, count: int) -> dict[str, float]:
        """Return seconds per step, and the share spent outside engine and objective."""
        del self._inside[:]
        found = super().steps(count)
        inside = sum(self._inside[1:]) / count
        return {**found, "own_share": 1 - inside / found["seconds"]}

    def save(self, path: str) -> None:
        self._trainer.save(path)

    def load(self, path: str) -> None:
        self._trainer.resume(path)

    def close(self) -> None:
        self._trainer.close()


class ByHand(Loop):
    """A loop over batches, as scripts write it."""

    _engine: Any

    def _train(self, count: int) -> None:
        engine, batches = self._engine, self._problem.batches
        engine.train()
        for _ in range(count):
            batch = batches[len(self._losses) % len(batches)]
            self._losses.append(self._step(batch).item())
            self._ends.append(time.perf_counter())

    def _step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        self._engine.destroy()


class DeepSpeedLoop(ByHand):
    """``deepspeed.initialize`` and a loop, as DeepSpeed's tutorials write them."""

    def _begin(self) -> None:
        os.environ.update(alone())
        import deepspeed

        self._engine, *_ = deepspeed.initialize(
            model=self._problem.model,
            model_parameters=self._problem.model.parameters(),
            config=self.config(),
        )

    def _step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self._problem.by_hand(self._engine, batch, self._generator)
        self._engine.backward(loss)
        self._engine.step()
        return loss

    def save(self, path: str) -> None:
        self._engine.save_checkpoint(path)

    def load(self, path: str) -> None:
        self._engine.load_checkpoint(path)


class AccelerateLoop(ByHand):
    """accelerate's ``Accelerator`` around DeepSpeed, as diffusers' examples write it."""

    def _begin(self) -> None:
        os.environ.update(alone())
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import DummyOptim

        plugin = DeepSpeedPlugin(hf_ds_config=self.config())
        self._accelerator = Accelerator(deepspeed_plugin=plugin)
        optimizer = DummyOptim(self._problem.model.parameters(), lr=1e-4)
        self._engine, self._optimizer = self._accelerator.prepare(self._problem.model, optimizer)

    def _step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self._accelerator.accumulate(self._engine):
            loss = self._problem.by_hand(self._engine, batch, self._generator)
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.detach()

    def save(self, path: str) -> None:
        self._accelerator.save_state(path)

    def load(self, path: str) -> None:
        self._accelerator.load_state(path)


LOOPS: Mapping[str, type[Loop]] = {
    "hand-written DeepSpeed": DeepSpeedLoop,
    "zerotune Trainer": TrainerLoop,
    "hand-written accelerate": AccelerateLoop,
}
BY_HAND, OURS, _ = LOOPS
