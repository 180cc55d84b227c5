"""The ``Trainer`` class, which connects all parts of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from typing_extensions import Unpack, override

from zerotune._util.closing import Closing
from zerotune._util.table import Page, Readable
from zerotune.backend.compilation import Compilation, compiled_for
from zerotune.backend.cpu_threads import cpu_threads
from zerotune.checkpoint import (
    export_adapters,
    export_model,
    export_pipeline,
    load_checkpoint,
    save_checkpoint,
)
from zerotune.checkpoint.export.model import trains_adapters
from zerotune.decisions import Decision, announce
from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.objective import FlowMatchingObjective
from zerotune.diffusion.pretrained import Pretrained
from zerotune.ema import FileStore
from zerotune.errors import CheckpointNotFiniteError, DataError, TrainingError
from zerotune.plan.plan import Advice
from zerotune.plan.text.plan import describe, resolved_data, running_page
from zerotune.training.activations import (
    Activations,
    keep_activations,
    known_activations,
    recomputes,
    set_recomputing,
)
from zerotune.training.arguments import check_kind, check_objective, refuse_unknown
from zerotune.training.batches import as_stream
from zerotune.training.emas import EMA, TrainerEMAs, as_ema
from zerotune.training.events import Callback, as_callbacks
from zerotune.training.memory import (
    Situation,
    advising,
    device_peak,
    expected_memory,
    host_now,
    host_peak,
)
from zerotune.training.progress import ProgressBar
from zerotune.training.report import Record, Report
from zerotune.training.save import resumed, rolled_back, seed_everything, trainer_state
from zerotune.training.setup import PlanSource, prepare
from zerotune.training.step import NonFinite, NonFinitePolicy, RaiseNonFinite, StepClock, TrainStep
from zerotune.training.stop import Goal, Stopping, with_signals
from zerotune.training.validate import draw
from zerotune.training.view import RunView, SampleOptions
from zerotune.training.watchdog import Watchdog

if TYPE_CHECKING:
    from datetime import timedelta

    from zerotune.backend.engine import Engine
    from zerotune.diffusion.objective import Objective
    from zerotune.ema import EMAShadow
    from zerotune.offload import OffloadManager
    from zerotune.optim import OptimizerResolver
    from zerotune.plan.context import DeviceUpdate, RunFacts, Streaming, UpdateName
    from zerotune.plan.memory.items import EMAPlace
    from zerotune.plan.optimizer.choices import GroupChoice
    from zerotune.plan.plan import MemoryEstimate
    from zerotune.platform import Platform
    from zerotune.training.events import StepMetrics


class Trainer(Closing, Readable):
    """Trains a model: connects engine, objective, data, EMA, checkpoints and callbacks.

    Only the model and a plan are required::

        with Trainer(model=unet, plan=plan, data=dataset, ema=EMAShadow(decay=0.999)) as trainer:
            trainer.fit(steps=1000)
            trainer.save("checkpoints/step-1000")
            images = trainer.sample(count=16)

    Under a launcher every process creates a trainer and calls the same methods.

    Args:
        model: The model in fp32, or the object returned by ``load_pretrained``, which also provides
            a plan, an objective and a pipeline.
        plan: A plan, a configuration as a dict, or the path to a configuration file; sets ZeRO
            stage, offload, precision, batch and optimizer. An ``Advice`` also sets gradient
            checkpointing and activation offload.
        resolver: Resolves optimizer and schedule.
        offload: Creates the swap folders.
        ema: EMA of the weights: a decay, an ``EMAShadow`` or ``EMAShadows``. The trainer attaches,
            saves and resumes the EMA.
        data: A dataset with ``__len__`` and ``__getitem__``, an iterable of micro batches (a
            ``DataLoader``, a list), or a ``BatchStream``. Batches are dicts of tensors.
        objective: Computes the loss; by default flow matching on unconditional images.
        activations: Offloads the inputs of checkpointed blocks to host memory.
        callbacks: Callbacks of the run; by default a ``ProgressBar``. The trainer adds a
            ``StopOnSignals`` if the callbacks contain none.
        non_finite: Policy for a non-finite loss or gradient; default ``RaiseNonFinite()``.
        run: Values for the fields that are ``"auto"`` in the plan.
        platform: The machine to run on; detected by default.
        deepspeed: ``False`` trains without DeepSpeed, with a ``PlainEngine``.
        seed: Seed for data order, noise, time steps and the global generators.
        timeout_s: Timeout of collectives in seconds.
        options: ``compile``, ``gradient_checkpointing``, ``streamed``, ``update``, ``threads``,
            ``workers``, ``pin``, ``watchdog``; see ``RunOptions``.

    Raises:
        ZeroTuneError: The same errors as ``zerotune.prepare``.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | Pretrained,
        plan: PlanSource | None = None,
        resolver: OptimizerResolver | None = None,
        offload: OffloadManager | None = None,
        ema: EMA | float | None = None,
        data: Any = None,
        objective: Objective | None = None,
        activations: ActivationOffload | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        non_finite: NonFinitePolicy | None = None,
        run: RunFacts | None = None,
        platform: Platform | None = None,
        deepspeed: bool = True,
        seed: int = 0,
        timeout_s: float = 600.0,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__()
        self._host_before = host_now()
        known = RunOptions.__annotations__
        refuse_unknown({k: v for k, v in options.items() if k not in known}, "Trainer")
        ema = as_ema(ema)
        callbacks = (ProgressBar(),) if callbacks is None else as_callbacks(callbacks)
        check_kind(non_finite, NonFinitePolicy, key="non_finite", write="SkipNonFinite()")
        check_kind(activations, ActivationOffload, key="activations", write="ActivationOffload()")
        self._loaded = model if isinstance(model, Pretrained) else None
        """The result of ``load_pretrained``, if the model came from one."""
        if self._loaded is not None:
            plan = self._loaded.plan if plan is None else plan
            model = self._loaded.model
            objective = objective or self._loaded.objective()
        if data is not None and isinstance(model, torch.nn.Module):
            check_objective(objective, model)
        advice = plan if isinstance(plan, Advice) else None
        self.engine: Engine = prepare(
            model=model,
            plan=plan,
            resolver=resolver,
            offload=offload,
            run=run,
            platform=platform,
            deepspeed=deepspeed,
            compile=options.get("compile", False),
            streamed=options.get("streamed"),
            update=options.get("update"),
            timeout_s=timeout_s,
        )
        """Engine of the run."""
        self.resources.push(self.engine)
        with self._starting():
            self.stream = as_stream(data, engine=self.engine, seed=seed, **_loading(options))
            self.emas = TrainerEMAs(ema, engine=self.engine)
            """The shadows by name, whatever kind of EMA was given."""
            self.running = Running(
                self.engine,
                data=data,
                timeout_s=timeout_s,
                advice=advice,
                activations=activations,
                options=options,
            )
            """Watches and measures the run."""
        self.ema = ema
        self.objective: Objective = objective or FlowMatchingObjective()
        self.non_finite: NonFinitePolicy = non_finite or RaiseNonFinite()
        self._seed = seed
        self._generator = seed_everything(seed, rank=self.engine.group.rank)
        self._record = Record()
        self._stopping = Stopping(self.engine.group)
        around = (*self.running.callbacks, self._record)
        self.callbacks: tuple[Callback, ...] = with_signals((*around, *callbacks))
        for callback in self.callbacks:
            self.engine.resources.callback(callback.on_close, self)
        self.last_saved: tuple[int, Path] | None = None
        """Step and folder of the latest checkpoint that this trainer wrote."""
        self.decisions: tuple[Decision, ...] = self.running.decisions
        """Decisions made after the engine was built; ``engine.decisions`` holds earlier ones."""

    @property
    def step(self) -> int:
        """Number of optimizer steps taken, including steps before a resume."""
        return self.engine.state.global_step

    @property
    def phase(self) -> str | None:
        """Phase of the step, such as ``"data"`` or ``"forward"``; ``None`` outside a step."""
        return self.running.clock.current

    @property
    def timeout_s(self) -> float:
        """Timeout of collectives in seconds."""
        return self.running.timeout_s

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.engine.group.is_main

    def fit(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        time_limit: float | timedelta | None = None,
    ) -> Report:
        """Train until the first of the given limits is reached. Collective.

        Steps and epochs count from step 0 of the run, so after ``resume`` the same call finishes
        an interrupted run. If the limit is already reached, ``fit`` takes no step. SIGINT, SIGTERM
        (see ``StopOnSignals``) and ``request_stop`` end training after the current step;
        ``report.stopped`` then holds the reason.

        Args:
            steps: Optimizer step at which training ends.
            epochs: Number of passes over the data; the data must have a length.
            time_limit: Time limit from now, in seconds or as a ``timedelta``; the first rank to
                reach it stops all ranks. Leave a margin: the run may exceed the limit by the time
                of one step and one checkpoint.

        Returns:
            Times, memory and losses of the run.

        Raises:
            InvalidValueError: No limit is given, or a number is out of range.
            DataError: No data are given, a batch has the wrong size, or epochs cannot be counted.
            TrainingError: The loss or the gradient is not finite, and ``non_finite`` raises.
            OutOfMemoryError: Memory ran out; the message names a plan that fits.
            CollectiveError: The ranks have different data, or a rank failed; the message names the
                rank.
        """
        self._check_open("train")
        train_step = self._train_step()
        if self.stream is not None:
            fix = "give every rank the same data and seed; the stream assigns each rank its share"
            self.engine.group.agree(self.stream.state_dict(), "data", fix=fix)
        goal = Goal.of(self.engine, self.stream, steps=steps, epochs=epochs, time_limit=time_limit)
        self.engine.module.train()
        self._stopping.begin(goal)
        with ExitStack() as ends:
            # Calls every callback, even if another one fails.
            for callback in reversed(self.callbacks):
                ends.callback(callback.on_fit_end, self)
            shadows = self.emas.shadows.values()
            ends.enter_context(advising(lambda: self.running.situation(shadows)))
            with self.engine.group.naming("training"):
                self._tell("on_fit_start", steps=goal.last_step)
                while not self._stopping.agreed() and not goal.reached(self.step):
                    self._take(train_step)
                self._end(goal)
        # Measurements that take a second are not worth it after a few steps.
        return self._report(thorough=self._record.totals["seconds"] > 30)

    def request_stop(self, reason: str) -> None:
        """Stop ``fit`` on all ranks before the next step. Not collective.

        Args:
            reason: Value of ``report.stopped``.
        """
        self._stopping.request(reason)

    def save(self, path: str | os.PathLike[str], *, allow_not_finite: bool = False) -> Path:
        """Write a checkpoint: engine, EMA, data position and random state. Collective.

        Args:
            path: Folder of the checkpoint.
            allow_not_finite: Allow NaN and infinity in the checkpoint, for debugging.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            CheckpointNotFiniteError: The checkpoint would contain NaN or infinity.
            CollectiveError: A rank did not call ``save``, for example because of ``if
                trainer.is_main: trainer.save(...)``.
        """
        self._check_open("save")
        # Before any other collective, so that the error for a missing rank names the folder.
        self.engine.group.barrier(f"saving checkpoint {os.fspath(path)}")
        written = save_checkpoint(
            path,
            engine=self.engine,
            extra=self.extra_state(),
            shadows=self.emas.shadows,
            allow_not_finite=allow_not_finite,
        )
        self.note_saved(written, step=self.step)
        return written

    def extra_state(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint, for custom checkpoints. Collective."""
        return trainer_state(
            stream=self.stream,
            generator=self._generator,
            seed=self._seed,
            group=self.engine.group,
        )

    def note_saved(self, path: Path, *, step: int) -> None:
        """Notify callbacks that a custom checkpoint with ``extra_state`` was saved.

        Call on every rank.

        Args:
            path: Folder of the checkpoint.
            step: Optimizer step of the checkpoint.
        """
        self.last_saved = step, path
        self._tell("on_save", path)

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint as if there had been no interruption. Collective.

        With the same plan the continued run is bitwise equal to an uninterrupted run. With a
        different plan, ``decisions`` lists the differences. Rank 0 logs the step, epoch and data
        position as a decision. A checkpoint without trainer state, such as a converted checkpoint,
        restores weights, optimizer, schedule and step. The data then start from the beginning.
        Mismatches raise an error before weights, data or random state change.

        Args:
            path: A checkpoint written by ``save`` or ``save_checkpoint``, or converted by a recipe.

        Raises:
            CheckpointError: No checkpoint is found at ``path``, or the checkpoint belongs to
                another model.
            DataError: The data differ from the saved run's data.
        """
        self._check_open("resume")
        self.decisions += resumed(
            path,
            engine=self.engine,
            shadows=self.emas.shadows,
            stream=self.stream,
            generator=self._generator,
            seed=self._seed,
        )
        self._tell("on_resume", Path(path))

    def roll_back(self, path: str | os.PathLike[str], *, reason: str) -> None:
        """Load weights, optimizer, schedule, step and EMA of a checkpoint, and continue from there.

        Unlike ``resume``, ``roll_back`` leaves data position and random state unchanged.
        Collective.

        Args:
            path: A checkpoint of this model.
            reason: Reason for the rollback; recorded in ``decisions``.

        Raises:
            CheckpointError: No checkpoint is found at ``path``, or the checkpoint belongs to
                another model.
        """
        before, shadows = self.step, self.emas.shadows
        contents = load_checkpoint(path, engine=self.engine, shadows=shadows, rng=False)
        back = rolled_back(before, self.step, reason, rank=self.engine.group.rank)
        self.decisions += contents.decisions + back
        self._tell("on_resume", Path(path))

    def log(self, values: Mapping[str, float]) -> None:
        """Pass values of the current step, such as a validation loss, to the callbacks.

        Args:
            values: Values by name.
        """
        self._tell("on_values", values)

    def show(self, name: str, images: torch.Tensor) -> None:
        """Pass images that were sampled at the current step to the callbacks.

        Args:
            name: Name under which the images are logged.
            images: Images (n, c, h, w), or clips (n, c, frames, h, w), in [-1, 1].
        """
        self._tell("on_images", name, images)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        weights: str | EMAShadow | None = None,
        dtype: str | torch.dtype = "fp32",
    ) -> Path:
        """Export the trained model in the format from which it was loaded. Collective.

        If the model has adapters, ``export`` writes the adapters (``export_adapters``). If
        ``model=`` was returned by ``load_pretrained``, ``export`` writes the whole pipeline
        (``export_pipeline``); otherwise it writes the model (``export_model``).

        Args:
            path: Folder to export to.
            weights: ``"trained"``, the name of an EMA such as ``"ema"``, or the EMA itself.
                Default: the first EMA, or the trained weights if there is no EMA.
            dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype.

        Returns:
            The absolute path.

        Raises:
            InvalidValueError: The trainer has no such EMA, or ``dtype`` is unknown.
            CheckpointError: The export cannot be written.
        """
        self._check_open("export")
        what: dict[str, Any] = {"weights": self.emas.named(weights), "dtype": dtype}
        if trains_adapters(self.engine):
            return Path(export_adapters(path, engine=self.engine, **what))
        if self._loaded is not None and self._loaded.component is not None:
            base, config = self._loaded.base, self._loaded.folder
            return export_pipeline(path, engine=self.engine, base=base, config=config, **what)
        return export_model(path, engine=self.engine, **what)

    def sample(self, **wanted: Unpack[SampleOptions]) -> torch.Tensor:
        """Sample images, by default with EMA weights if the trainer has an EMA. Collective.

        Args:
            wanted: ``prompts``, ``labels`` or ``count``, and the other options of
                ``SampleOptions``.

        Returns:
            fp32 images on the CPU, (n, c, h, w), nominally in [-1, 1], on every rank.

        Raises:
            InvalidValueError: An argument is missing or invalid.
        """
        self._check_open("sample")
        self.engine.group.barrier("drawing images")
        return draw(self.engine, objective=self.objective, emas=self.emas, wanted=wanted)

    def report(self) -> Report:
        """Return this rank's report of the steps that this trainer took. Not collective."""
        return self._report(thorough=True)

    def _report(self, *, thorough: bool) -> Report:
        plan = self.engine.plan
        return Report(
            world_size=self.engine.group.world_size,
            samples_per_step=plan.train_batch_size,
            host_before=self._host_before,
            host_peak=host_peak(),
            device_peak=device_peak(self.engine.device),
            stopped=self._stopping.reason,
            estimate=self.running.estimate(self.emas.shadows.values(), measure=thorough),
            **self._record.totals,
        )

    @override
    def brief(self) -> str:
        """Summarise engine and progress in one line."""
        return f"{describe(self.engine.plan)}, step {self.step}"

    @override
    def page(self) -> Page:
        """Return a summary of the run that fits on a screen; ``explain`` returns every detail."""
        decisions = [*self.engine.decisions, *self.decisions]
        return running_page(resolved_data(self.engine.plan, decisions))

    def explain(self) -> str:
        """Describe the verified engine, every decision and the EMAs."""
        parts = [self.engine.explain(*self.decisions)]
        if self.emas.shadows:
            parts.append(self.emas.explain())
        return "\n".join(parts)

    @override
    def _release(self) -> None:
        """Free nothing: the engine is one of the resources."""

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TrainingError(
                f"the trainer is closed and can no longer {what}",
                "call the method inside the with block, before close(); or create a new "
                "Trainer and call trainer.resume(CHECKPOINT)",
                "trainer",
                f"closed after step {self.step}",
            )

    def _train_step(self) -> TrainStep:
        if self.stream is None:
            raise DataError(
                "the trainer has no data",
                "pass a dataset or an iterable of batches: Trainer(data=...)",
                "data",
                None,
            )
        return TrainStep(
            engine=self.engine,
            objective=self.objective,
            stream=self.stream,
            generator=self._generator,
            ema=self.emas,
            non_finite=self.non_finite,
            clock=self.running.clock,
        )

    def _take(self, train_step: TrainStep) -> None:
        metrics = train_step.run()
        self.non_finite.settle(self, metrics)
        if self.step != metrics.step:  # A rollback removed this step.
            return
        try:
            self._tell("on_step_end", metrics)
        except CheckpointNotFiniteError as error:
            self._judge_weights(metrics, error)

    def _judge_weights(self, metrics: StepMetrics, error: CheckpointNotFiniteError) -> None:
        """Apply the non-finite policy on all ranks after a save found NaN in the weights."""
        spoiled = NonFinite(
            step=metrics.step,
            what="weights",
            value=math.nan,
            ranks=tuple(range(self.engine.group.world_size)),
            lr=self.engine.lr,
            weights_changed=True,
        )
        try:
            self.non_finite.judge(spoiled)
        except TrainingError as refusal:
            raise refusal from error
        self.non_finite.settle(self, metrics)

    def _end(self, goal: Goal) -> None:
        if self._stopping.reason is None:
            self._tell("on_finish")
            return
        self._tell("on_stop", self._stopping.reason)
        self.decisions += self._stopping.decisions(self.step, self.last_saved, goal)

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args, **kwargs)


# -- Run options: everything a trainer does besides training.


class RunOptions(TypedDict, total=False):
    """Options of ``Trainer`` that set how a run executes, not what it trains."""

    compile: bool | Mapping[str, Any] | Compilation
    """Whether to compile the forward pass, or ``Compilation`` options for it; off by default."""
    gradient_checkpointing: bool | Literal["auto"]
    """Whether blocks are recomputed in the backward pass; ``"auto"``, the default, recomputes if
    memory requires it."""
    streamed: bool | Streaming | None
    """Whether to stream weights, as in ``DeepSpeedPlan.resolve``; as advised by default."""
    update: UpdateName | DeviceUpdate | None
    """Where the host engine updates weights, as in ``DeepSpeedPlan.resolve``; as advised by
    default, or else in host memory."""
    threads: int | None
    """Number of OpenMP threads of this rank. ``None``, the default, keeps a number set by
    ``OMP_NUM_THREADS`` or ``torch.set_num_threads``. If no number is set and the model or the
    optimizer is on the CPU, the rank uses its share of the cores."""
    workers: int
    """Number of worker processes that prefetch a dataset; 0, the default, loads in this process."""
    pin: bool
    """Whether to page-lock batches of a dataset, for faster copies to a GPU."""
    watchdog: Watchdog | bool
    """Ends a run whose ranks deadlock; on by default with several ranks."""


def _loading(options: RunOptions) -> dict[str, Any]:
    """Return the requested data-loading options, without those that are unset."""
    asked = {"num_workers": options.get("workers"), "pin_memory": options.get("pin")}
    return {name: value for name, value in asked.items() if value is not None}


class Running:
    """Setup of a run: threads, gradient checkpointing and watchdog. Collective."""

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
        self._engine, self._data = engine, data
        self.timeout_s = timeout_s
        self.clock = StepClock(engine.device)
        """Clock that knows the current phase."""
        self._activations: Activations | None = None
        workers = int(options.get("workers") or getattr(data, "num_workers", 0) or 0)
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
        """Decisions of the setup."""
        watchdog = options.get("watchdog", True)
        around = (
            Watchdog() if watchdog is True else watchdog or None,
            None if compiled is None else _CompileCheck(),
            _GroupStops() if any(group.until for group in _groups_of(engine)) else None,
        )
        self.callbacks: tuple[Callback, ...] = tuple(one for one in around if one is not None)
        """Callbacks that belong to the setup."""

    def estimate(
        self, shadows: Iterable[EMAShadow], *, measure: bool = False
    ) -> MemoryEstimate | None:
        """Estimate this run's memory; ``None`` if the plan was resolved without a model.

        Args:
            shadows: EMAs of the run.
            measure: Also measure the activations of a batch, which takes about a second; later
                calls reuse the measurement.
        """
        plan = self._engine.plan
        if plan.model is None:
            return None
        if measure and self._activations is None:
            self._activations = known_activations(
                self._engine.module, self._data, batch=plan.micro_batch_size
            )
        activations = self._activations or Activations()
        emas: list[EMAPlace] = [
            "device" if shadow.device.type != "cpu"
            else "nvme" if isinstance(shadow.store, FileStore)
            else "host"
            for shadow in shadows
        ]  # fmt: skip
        return expected_memory(
            plan,
            emas=emas,
            activations=activations.facts,
            arithmetic=activations.arithmetic,
            size=activations.size,
            frames=activations.frames,
            gradient_checkpointing=recomputes(self._engine.module),
        )

    def situation(self, shadows: Iterable[EMAShadow]) -> Situation:
        """Describe the run's current phase and step, for an out-of-memory error."""
        step = self._engine.state.global_step + 1
        phase = self.clock.current or "work between the phases"
        return Situation(
            plan=self._engine.plan,
            doing=f"{phase} of optimizer step {step}",
            estimate=self.estimate(shadows, measure=True),
        )


class _CompileCheck(Callback):
    """Verifies once that the model was compiled."""

    def __init__(self) -> None:
        self._done = False

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """After the first step, verify that the model was compiled."""
        compiled = compiled_for(trainer.engine)
        if not self._done and compiled is not None:
            self._done = True
            trainer.decisions += (compiled.verify(),)


def _groups_of(engine: Engine) -> Sequence[GroupChoice]:
    return engine.plan.optimizer.groups


class _GroupStops(Callback):
    """Freezes parameter groups after their last step, so that no gradients are computed."""

    def __init__(self) -> None:
        self._frozen: set[str] = set()

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Freeze the parameter groups that were already frozen before a resume."""
        self._settle(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Freeze the parameter groups that have taken their last step."""
        self._settle(trainer)

    def _settle(self, trainer: RunView) -> None:
        state = trainer.engine.state
        taken = state.global_step - state.skipped_steps
        for group in _groups_of(trainer.engine):
            due = group.until is not None and taken >= group.until
            if due == (group.name in self._frozen):
                continue
            for name in group.parameters:
                trainer.engine.module.get_parameter(name).requires_grad_(not due)
            self._frozen ^= {group.name}
            decision = Decision(
                f"optimizer.groups.{group.name}",
                "frozen" if not due else "trained",
                "trained" if not due else "frozen",
                f"the group trains until step {group.until}, and {taken} steps have been taken",
            )
            trainer.decisions += (decision,)
            announce((decision,), rank=trainer.engine.group.rank)
