"""One optimizer step, an accumulation window of micro batches, and where its time goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from zerotune.backend.engine import StepOutcome
from zerotune.errors import DataError, TrainingError
from zerotune.training.events import PHASES, StepMetrics
from zerotune.training.memory import device_peak, host_peak
from zerotune.training.nonfinite import NonFinite, RaiseNonFinite, is_finite
from zerotune.training.streams import check_named

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.data import Batch, BatchStream
    from zerotune.diffusion.objective import Objective
    from zerotune.training.nonfinite import NonFinitePolicy


class StepClock:
    """Splits a step into phases.

    On a GPU the host runs ahead of the device, so events on the device's stream are timed; they
    cost no synchronisation until ``finish``.

    Args:
        device: Where the model runs.
        now: Tells the time on the host, in seconds.
    """

    def __init__(
        self, device: torch.device, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._on_cuda = device.type == "cuda"
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = self._now()
        self.current: str | None = None
        """The phase under way; stays where it is when that raises. ``None``: none, or between."""

    def start(self) -> None:
        """A step begins."""
        self._host = dict.fromkeys(PHASES, 0.0)
        self._events = []
        self.current = None
        self._started = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside; may be entered many times per step."""
        self.current = name
        # Reading data is the host's work; on the device's stream it would look like waiting.
        if self._on_cuda and name != "data":
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            self.current = None
            return
        begun = self._now()
        yield
        self._host[name] += self._now() - begun
        self.current = None

    def finish(self) -> tuple[float, dict[str, float]]:
        """Seconds of the whole step, and of each phase."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self._host[name] += begin.elapsed_time(end) / 1000
        return self._now() - self._started, dict(self._host)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Following(Protocol):
    def step(self) -> None: ...


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch where the engine needs it; only what is page-locked is copied behind other work."""
    return {
        # Captions and the like have a ``to`` of their own and no memory to lock.
        name: value.to(device, non_blocking=getattr(value, "is_pinned", bool)())
        for name, value in batch.items()
    }


class TrainStep:
    """Takes optimizer steps; the whole of the loop without anything around it.

    Args:
        engine: What trains.
        objective: Gives the loss of a micro batch.
        stream: Gives this rank's micro batches.
        generator: A CPU generator of this rank's own, for all that the objective draws.
        ema: Follows each applied step: an ``EMAShadow``, several, or one in the background.
        non_finite: Decides about steps that are not finite; ``RaiseNonFinite()`` when not given.
        clock: Splits the time into phases; a ``StepClock`` of its own when not given.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        objective: Objective,
        stream: BatchStream,
        generator: torch.Generator,
        ema: _Following | None = None,
        non_finite: NonFinitePolicy | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self._engine, self._objective, self._stream = engine, objective, stream
        self._generator, self._ema = generator, ema
        self._non_finite = non_finite or RaiseNonFinite()
        self._clock = clock or StepClock(engine.device)

    def run(self) -> StepMetrics:
        """Take one optimizer step.

        Collective.

        Raises:
            TrainingError: The loss is not finite on some rank and the policy does not go on; the
                weights are left as they were before this step.
            DataError: A batch is not of the size the plan says.
        """
        engine, clock = self._engine, self._clock
        clock.start()
        lr = engine.lr
        loss, outcome = self._window()
        with clock.phase("ema"):
            if self._ema is not None and outcome.applied and is_finite(outcome.grad_norm):
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
        """Mean loss and what became of the accumulation window."""
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
                del loss  # With its graph, before the optimizer needs memory of its own.
                if index == count - 1:
                    # Before the weights change: a step on a bad loss could not be taken back.
                    mean = self._mean(float(total) / count)
            with clock.phase("optimizer"):
                if index == count - 1 and not math.isfinite(mean):
                    engine.discard()
                    return mean, StepOutcome(applied=False, boundary=True)
                outcome = engine.step()
        _check_boundary(engine, outcome)
        self._check_gradient(outcome)
        return mean, outcome

    def _next_batch(self) -> Batch:
        batch = next(self._stream)
        check_named(batch, key="batch")
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
        return on_device(batch, self._engine.device)

    def _mean(self, loss: float) -> float:
        """Mean over the ranks; where it is not finite, the policy has agreed to drop it."""
        group = self._engine.group
        mean = group.mean(loss, device=self._engine.device)
        if not math.isfinite(mean):
            each = group.gather(loss)
            bad = tuple(rank for rank, value in enumerate(each) if not math.isfinite(value))
            self._judge("loss", mean, ranks=bad, weights_changed=False)
        return mean

    def _check_gradient(self, outcome: StepOutcome) -> None:
        # In fp16 a gradient that is not finite is how the loss scale finds its place.
        if is_finite(outcome.grad_norm) or self._engine.plan.precision == "fp16":
            return
        self._judge(
            "gradient norm",
            outcome.grad_norm or 0.0,
            ranks=tuple(range(self._engine.group.world_size)),
            weights_changed=outcome.applied,
        )

    def _judge(
        self,
        what: Literal["loss", "gradient norm"],
        value: float,
        *,
        ranks: tuple[int, ...],
        weights_changed: bool,
    ) -> None:
        taken = self._engine.state.global_step
        self._non_finite.judge(
            NonFinite(
                step=taken + 1 if what == "loss" else taken,
                what=what,
                value=value,
                ranks=ranks,
                lr=self._engine.lr,
                weights_changed=weights_changed,
            )
        )


def _check_boundary(engine: Engine, outcome: StepOutcome) -> None:
    if not outcome.boundary:
        raise TrainingError(
            f"{engine.plan.gradient_accumulation_steps} micro batches did not close an "
            "accumulation window",
            key="engine.micro_step",
            value=engine.state.micro_step,
            fix="call engine.step() only through the trainer, or only outside of it",
        )
