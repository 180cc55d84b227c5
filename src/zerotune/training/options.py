"""What a trainer does for a run beside training: watch it, measure it, and set it up well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from zerotune.backend.compilation import Compilation, compiled_for
from zerotune.backend.cpu_threads import cpu_threads
from zerotune.decisions import Decision, announce
from zerotune.training.activations import (
    Activations,
    keep_activations,
    known_activations,
    recomputes,
    set_recomputing,
)
from zerotune.training.bounds import copy_rate
from zerotune.training.events import Callback
from zerotune.training.memory import expected_memory
from zerotune.training.out_of_memory import Situation
from zerotune.training.profile import Operator, Profile, Profiler
from zerotune.training.step import StepClock
from zerotune.training.stop import StopBeforeDiskFills
from zerotune.training.watchdog import Watchdog

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.activations import ActivationOffload
    from zerotune.ema import EMAShadow
    from zerotune.plan.advise import Advice
    from zerotune.plan.memory.model import EMAPlace, MemoryEstimate
    from zerotune.training.events import RunView, StepMetrics


class RunOptions(TypedDict, total=False):
    """Options of ``Trainer`` that change how a run goes, never what is trained."""

    compile: bool | Mapping[str, Any] | Compilation
    """``True``, or options of ``Compilation``, compiles the forward pass; off by default."""
    gradient_checkpointing: bool | Literal["auto"]
    """Recompute blocks in the backward pass; ``"auto"``, the default: if memory demands it."""
    threads: int | None
    """OpenMP threads of this rank; ``None``, the default: its share of the machine's cores, where
    the CPU computes and the user has not chosen."""
    profile: Profile | None
    """A torch profiler trace of a few steps; none by default."""
    watchdog: Watchdog | bool
    """Ends a run whose ranks wait for each other for ever; on by default with several ranks."""


class Running:
    """The run around a trainer's steps. Collective to make.

    Args:
        engine: What trains.
        data: What the trainer was given.
        timeout_s: Seconds after which a collective gives up.
        advice: Decides about activations, where the plan comes from it and nothing else does.
        activations: Keeps the inputs of recomputed blocks in host memory.
        options: As ``RunOptions``; ``compile`` is the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        data: Any,
        timeout_s: float,
        advice: Advice | None = None,
        activations: ActivationOffload | None = None,
        options: RunOptions,
    ) -> None:
        unknown = options.keys() - RunOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"Trainer() got an unexpected keyword argument {min(unknown)!r}")
        self._engine, self._data = engine, data
        self.timeout_s = timeout_s
        self.clock = StepClock(engine.device)
        """Knows the phase under way."""
        self._activations: Activations | None = None
        workers = int(getattr(data, "num_workers", 0) or 0)
        wanted = options.get("threads")
        threads = cpu_threads(engine.plan, engine.group, wanted=wanted, workers=workers)
        decisions = engine.resources.enter_context(threads)
        recompute = options.get("gradient_checkpointing", "auto")
        if recompute != "auto" or (advice is None and activations is None):
            decisions += set_recomputing(engine, data, recompute)
        announce(decisions, rank=engine.group.rank)
        compiled = compiled_for(engine)
        self.decisions: tuple[Decision, ...] = (
            *(() if compiled is None else compiled.decisions),
            *decisions,
            *keep_activations(engine, advice=advice, activations=activations),
        )
        """What was chosen."""
        profile = options.get("profile")
        self._profiler = None if profile is None else Profiler(profile)
        folders = [folder for folder in engine.plan.nvme_paths.values() if folder is not None]
        around = (
            _watchdog(options.get("watchdog", True)),
            self._profiler,
            None if compiled is None else _CompileCheck(),
            StopBeforeDiskFills(Path(folder) for folder in folders) if folders else None,
        )
        self.callbacks: tuple[Callback, ...] = tuple(one for one in around if one is not None)
        """What is told of each step for all this."""

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The most expensive operators; empty without a profile."""
        return () if self._profiler is None else self._profiler.operators

    def estimate(
        self, shadows: Iterable[EMAShadow], *, measure: bool = False
    ) -> MemoryEstimate | None:
        """What this run should need; ``None`` where the model is not known.

        Args:
            shadows: The EMAs that run along.
            measure: Measure the activations of the batch too, once; takes about a second.
        """
        plan = self._engine.plan
        if plan.model is None:
            return None
        if measure and self._activations is None:
            self._activations = known_activations(
                self._engine.module, self._data, batch=plan.micro_batch_size
            )
        known = self._activations or Activations()
        emas: list[EMAPlace] = [
            "host" if shadow.device.type == "cpu" else "device" for shadow in shadows
        ]
        return expected_memory(
            plan,
            emas=emas,
            activations=known.facts,
            arithmetic=known.arithmetic,
            size=known.size,
            frames=known.frames,
            gradient_checkpointing=recomputes(self._engine.module),
        )

    def measured(self, shadows: Iterable[EMAShadow], *, thorough: bool) -> dict[str, Any]:
        """The fields of ``Report`` that are known here."""
        return {
            "estimate": self.estimate(shadows, measure=thorough),
            "copy_rate": copy_rate() if thorough else None,
            "operators": self.operators,
        }

    def situation(self, shadows: Iterable[EMAShadow]) -> Situation:
        """What the run is doing, for when memory runs out."""
        step = self._engine.state.global_step + 1
        phase = self.clock.current or "something between the phases"
        return Situation(
            plan=self._engine.plan,
            doing=f"{phase} of optimizer step {step}",
            estimate=self.estimate(shadows, measure=True),
        )


def _watchdog(wanted: Watchdog | bool) -> Watchdog | None:
    if isinstance(wanted, Watchdog):
        return wanted
    return Watchdog() if wanted else None


class _CompileCheck(Callback):
    """Looks once whether what was to be compiled has been."""

    def __init__(self) -> None:
        self._done = False

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Verify after the first step."""
        compiled = compiled_for(trainer.engine)
        if not self._done and compiled is not None:
            self._done = True
            trainer.decisions += (compiled.verify(),)
