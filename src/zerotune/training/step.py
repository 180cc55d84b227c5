"""One optimizer step: an accumulation window of micro batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zerotune.errors import DataError, TrainingError
from zerotune.training.memory import device_peak, host_peak
from zerotune.training.metrics import StepMetrics
from zerotune.training.timing import StepClock

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine, StepOutcome
    from zerotune.diffusion.data import Batch, BatchStream
    from zerotune.diffusion.objective import Objective
    from zerotune.ema import EMAShadow


class TrainStep:
    """Takes optimizer steps; the whole of the loop without anything around it.

    Args:
        engine: What trains.
        objective: Gives the loss of a micro batch.
        stream: Gives this rank's micro batches.
        generator: A CPU generator of this rank's own, for all that the objective draws.
        ema: Follows each applied step.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        objective: Objective,
        stream: BatchStream,
        generator: torch.Generator,
        ema: EMAShadow | None = None,
    ) -> None:
        self._engine, self._objective, self._stream = engine, objective, stream
        self._generator, self._ema = generator, ema
        self._clock = StepClock(engine.device)

    def run(self) -> StepMetrics:
        """Take one optimizer step.

        Collective.

        Raises:
            TrainingError: The loss is not finite on some rank; the weights are left as they
                were before this step.
            DataError: A batch is not of the size the plan says.
        """
        engine, clock = self._engine, self._clock
        clock.start()
        lr = engine.lr
        loss, outcome = self._window()
        with clock.phase("ema"):
            if self._ema is not None and outcome.applied:
                self._ema.step()
        step = engine.state.global_step
        seconds, phases = clock.finish()
        return StepMetrics(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=outcome.grad_norm,
            applied=outcome.applied,
            samples=step * engine.plan.train_batch_size,
            seconds=seconds,
            phases=phases,
            host_peak=host_peak(),
            device_peak=device_peak(engine.device),
        )

    def _window(self) -> tuple[float, StepOutcome]:
        engine, clock = self._engine, self._clock
        count = engine.plan.gradient_accumulation_steps
        total = torch.zeros((), device=engine.device)
        for index in range(count):
            with clock.phase("data"):
                batch = self._next_batch()
            with clock.phase("forward"):
                loss = self._objective(engine, batch, self._generator)
            with clock.phase("backward"):
                engine.backward(loss)
                total += loss.detach().float()
                if index == count - 1:
                    # Before the weights change: a step on a bad loss could not be taken back.
                    mean = self._checked_mean(float(total) / count)
            with clock.phase("optimizer"):
                outcome = engine.step()
        if not outcome.boundary:
            raise TrainingError(
                f"{count} micro batches did not close an accumulation window",
                key="engine.micro_step",
                value=engine.state.micro_step,
                fix="call engine.step() only through the trainer, or only outside of it",
            )
        return mean, outcome

    def _next_batch(self) -> Batch:
        batch = next(self._stream)
        wanted = self._engine.plan.micro_batch_size
        sizes = {name: len(tensor) for name, tensor in batch.items()}
        if any(size != wanted for size in sizes.values()):
            raise DataError(
                f"a micro batch of the plan has {wanted} samples",
                key="batch",
                value=sizes,
                fix="set train_micro_batch_size_per_gpu to the loader's batch size, and "
                "drop_last=True in the loader",
            )
        device = self._engine.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def _checked_mean(self, loss: float) -> float:
        group = self._engine.group
        mean = group.mean(loss, device=self._engine.device)
        if math.isfinite(mean):
            return mean
        each = group.gather(loss)
        bad = [rank for rank, value in enumerate(each) if not math.isfinite(value)]
        raise TrainingError(
            f"not finite at step {self._engine.state.global_step + 1} on rank(s) "
            f"{', '.join(map(str, bad))}; the weights are still those of the step before",
            key="loss",
            value=mean,
            fix=f"lower the learning rate (now {self._engine.lr:g}), look for bad samples, "
            "clip gradients, or use bf16 or fp32 instead of fp16; resume from a checkpoint",
        )
