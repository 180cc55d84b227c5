"""One optimizer step over an accumulation window, with the time of each phase."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import whole
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.distributed import together
from zerotune.backend.engine import StepOutcome
from zerotune.backend.step_state import fault_of
from zerotune.checkpoint.folders import finite_checkpoint
from zerotune.decisions import Decision, announce
from zerotune.errors import DataError, TrainingError
from zerotune.training.batches import check_named
from zerotune.training.events import PHASES, StepMetrics
from zerotune.training.memory import device_peak, host_peak

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.data.batches import Batch
    from zerotune.diffusion.data.streams import BatchStream
    from zerotune.diffusion.objective import Objective
    from zerotune.training.view import RunView


class StepClock:
    """Measures the time of each phase of a step.

    The host runs ahead of a device with streams, so the clock times phases with the device's
    events, and synchronises only in ``finish``.
    """

    def __init__(
        self, device: torch.device, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._streams = accelerator_of(device).streams
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self._started = self._now()
        self.current: str | None = None
        """The current phase; after an error, the phase that raised it. ``None`` between phases."""

    def start(self) -> None:
        """Start a step."""
        self._host = dict.fromkeys(PHASES, 0.0)
        self._events = []
        self.current = None
        self._started = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; a step may enter a phase several times.

        Args:
            name: Name of the phase, from ``PHASES``.
        """
        self.current = name
        # Data are read on the host; the device's events would not measure that.
        if self._streams is not None and name != "data":
            begin, end = (self._streams.Event(enable_timing=True) for _ in range(2))
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
        """Return the seconds of the whole step and of each phase."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self._host[name] += begin.elapsed_time(end) / 1000
        return self._now() - self._started, dict(self._host)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the engine's device; page-locked tensors are copied asynchronously."""
    return {
        # Captions and similar values have their own ``to``, and no memory to page-lock.
        name: value.to(device, non_blocking=getattr(value, "is_pinned", bool)())
        for name, value in batch.items()
    }


class TrainStep:
    """Takes single optimizer steps, without callbacks.

    Args:
        engine: Engine to train.
        objective: Computes the loss of a micro batch.
        stream: Yields this rank's micro batches.
        generator: This rank's CPU generator for all random numbers of the objective.
        ema: EMA to update after each applied step: an ``EMAShadow`` or ``EMAShadows``.
        non_finite: Policy for non-finite steps; default ``RaiseNonFinite()``.
        clock: Clock that measures the phases; by default a new ``StepClock``.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        objective: Objective,
        stream: BatchStream,
        generator: torch.Generator,
        ema: Any = None,
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
            TrainingError: The loss or the gradient is not finite, and the policy raises.
            DataError: A batch does not have the plan's micro batch size.
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
        """Run one accumulation window; return its mean loss and the step's outcome."""
        engine, clock = self._engine, self._clock
        count = engine.plan.gradient_accumulation_steps
        total = torch.zeros((), device=engine.device)
        for index in range(count):
            with clock.phase("data"):
                batch = self._next_batch()
            with clock.phase("forward"):
                loss = self._objective(engine, batch, self._generator)
                check_loss(loss)
            total += loss.detach().float()
            is_last = index == count - 1
            # Checked before the weights change: a step on a bad loss could not be undone.
            if is_last and engine.steps_in_backward:
                mean = self._mean(float(total) / count)
                if not math.isfinite(mean):
                    return self._dropped(mean)
            with clock.phase("backward"):
                engine.backward(loss)
                del loss  # Frees its graph before the optimizer allocates memory.
                if is_last and not engine.steps_in_backward:
                    mean = self._mean(float(total) / count)
            with clock.phase("optimizer"):
                if is_last and not math.isfinite(mean):
                    return self._dropped(mean)
                outcome = engine.step()
        if not outcome.boundary:
            raise TrainingError(
                f"{count} micro batches did not complete an accumulation window",
                "do not call engine.step() while a trainer uses the engine",
                "engine.micro_step",
                engine.state.micro_step,
            )
        self._check_gradient(outcome)
        return mean, outcome

    def _dropped(self, mean: float) -> tuple[float, StepOutcome]:
        """Discard a window whose loss is not finite."""
        self._engine.discard()
        return mean, StepOutcome(applied=False, boundary=True)

    def _next_batch(self) -> Batch:
        batch = next(self._stream)
        check_named(batch, key="batch")
        wanted = self._engine.plan.micro_batch_size
        sizes = {name: len(tensor) for name, tensor in batch.items()}
        if any(size != wanted for size in sizes.values()):
            raise DataError(
                f"must have {wanted} samples, the plan's micro batch size",
                "set train_micro_batch_size_per_gpu to the loader's batch size, and set "
                "drop_last=True in the loader",
                "batch",
                sizes,
            )
        return on_device(batch, self._engine.device)

    def _mean(self, loss: float) -> float:
        """Return the mean over ranks; if it is not finite, the policy has decided to skip it."""
        group = self._engine.group
        mean = group.mean(loss, device=self._engine.device)
        if not math.isfinite(mean):
            each = group.gather(loss)
            bad = tuple(rank for rank, value in enumerate(each) if not math.isfinite(value))
            self._judge("loss", mean, ranks=bad, weights_changed=False)
        return mean

    def _check_gradient(self, outcome: StepOutcome) -> None:
        # In fp16, non-finite gradients are expected while the loss scale adapts.
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


def check_loss(loss: Any) -> None:
    """Check that an objective returned a scalar tensor that has an autograd graph.

    Raises:
        TrainingError: The objective returned any other value.
    """
    if (fault := fault_of(loss)) is not None:
        reason, value, fix = fault
        raise TrainingError(f"the loss {reason}", fix, "objective", value)


# -- Policies for a NaN or infinite loss or gradient: raise, skip, or roll back.


@attrs.frozen(kw_only=True)
class NonFinite:
    """Description of a step with a non-finite loss, gradient or weight; the same on every rank."""

    step: int
    """Number of the optimizer step."""
    what: Literal["loss", "gradient norm", "weights"]
    value: float
    """The non-finite value; for a loss, the mean over the ranks."""
    ranks: tuple[int, ...]
    """Ranks with a non-finite loss; all ranks if the gradient or the weights are not finite."""
    lr: float
    weights_changed: bool
    """Whether the non-finite value was detected after the step had already changed the weights."""

    def __str__(self) -> str:
        weights = (
            "the weights already contain the update"
            if self.weights_changed
            else "the weights are unchanged"
        )
        ranks = ", ".join(map(str, self.ranks))
        return f"not finite at step {self.step} on rank(s) {ranks}; {weights}"

    def decision(self) -> Decision:
        """Return the decision that records this step as skipped."""
        return Decision(self.what, self.value, "skipped", str(self), "warning")

    def error(self, *, because: str = "") -> TrainingError:
        """Return the exception for this step.

        Args:
            because: Clause to append to the message.
        """
        return TrainingError(
            f"{self}{because}",
            f"lower the learning rate (now {self.lr:g}), check for bad samples, clip "
            "gradients, or use bf16 or fp32 instead of fp16; then resume from a checkpoint",
            self.what,
            self.value,
        )


@runtime_checkable
class NonFinitePolicy(Protocol):
    """Policy for non-finite steps; every rank must make the same decision."""

    def judge(self, found: NonFinite) -> None:
        """Raise an error to end the run, or return normally to drop the step on all ranks.

        Args:
            found: Description of the non-finite step.
        """
        ...

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Called with the metrics of every step, including dropped steps.

        Args:
            trainer: The trainer that runs ``fit``.
            metrics: Loss, learning rate, times and memory of the step.
        """
        ...


class RaiseNonFinite:
    """Default policy: stop the run with a ``TrainingError``.

    The loss is checked before the weights change, so a non-finite loss cannot damage them.
    """

    def judge(self, found: NonFinite) -> None:
        """Raise a ``TrainingError``."""
        raise found.error()

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Do nothing."""


class SkipNonFinite:
    """Policy that drops a non-finite step on all ranks and continues with the next step.

    A dropped step leaves weights, optimizer, schedule and EMA unchanged. It counts as skipped
    (``metrics.applied`` is ``False``), like an fp16 step whose gradients overflowed.

    Args:
        most_in_a_row: Maximum number of consecutive dropped steps; one more raises an error.
    """

    def __init__(self, *, most_in_a_row: int = 10) -> None:
        self._most = whole(most_in_a_row, key="most_in_a_row")
        self._in_a_row = 0
        self.skipped = 0
        """Number of dropped steps."""

    def judge(self, found: NonFinite) -> None:
        """Count the step; raise an error if the limit is exceeded or the weights have changed."""
        self._in_a_row += 1
        if found.weights_changed:
            raise found.error()
        if self._in_a_row > self._most:
            raise found.error(because=f", number {self._in_a_row} in a row")
        self.skipped += 1
        announce((found.decision(),))

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Reset the count after an applied step."""
        if metrics.applied:
            self._in_a_row = 0


class RollBackNonFinite:
    """Policy that drops non-finite steps, and rolls the run back after several in a row.

    A rollback loads weights, optimizer, schedule, step and EMA from the newest checkpoint without
    NaN or infinity. The data position and the random state are kept, because training on the same
    batches would fail again.

    Args:
        root: Checkpoint folder of ``SaveEvery``.
        after: Number of consecutive non-finite steps that cause a rollback; 1 or more. If a
            non-finite step has already changed the weights, the rollback is immediate.
        most: Maximum number of rollbacks; if one more is needed, an error is raised.
    """

    def __init__(self, *, root: str | os.PathLike[str], after: int = 3, most: int = 3) -> None:
        self._root = Path(root)
        self._after = whole(after, key="after")
        self._most = whole(most, key="most")
        self._in_a_row = 0
        self._latest: NonFinite | None = None
        self.rolled_back = 0
        """Number of rollbacks."""

    def judge(self, found: NonFinite) -> None:
        """Count and drop the step."""
        self._in_a_row += 1
        self._latest = found
        announce((found.decision(),))

    def settle(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Roll back if a rollback is due."""
        latest = self._latest
        if latest is None or latest.step != metrics.step:
            self._in_a_row = 0 if metrics.applied else self._in_a_row
            return
        if self._in_a_row < self._after and not latest.weights_changed:
            return
        if self.rolled_back == self._most:
            raise latest.error(because=f", after {self._most} rollbacks")
        group = trainer.engine.group
        look = f"check for a checkpoint in {self._root}"
        path = together(group, look, lambda: self._newest(group.is_main))[0]
        if path is None:
            raise latest.error(because=f", and {self._root} contains no finite checkpoint")
        self.rolled_back += 1
        self._in_a_row, self._latest = 0, None
        trainer.roll_back(path, reason=str(latest))

    def _newest(self, is_main: bool) -> Path | None:
        return finite_checkpoint(self._root) if is_main else None


def is_finite(norm: float | None) -> bool:
    """Return whether a gradient norm is finite; DeepSpeed's error value -1 counts as non-finite."""
    return norm is None or (math.isfinite(norm) and norm >= 0)
