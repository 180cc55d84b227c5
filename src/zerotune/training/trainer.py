"""``Trainer``: the wiring of all parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from zerotune.checkpoint import export_model, load_checkpoint, save_checkpoint
from zerotune.decisions import Decision
from zerotune.diffusion.objective import FlowMatchingObjective
from zerotune.diffusion.sampling import sample
from zerotune.errors import DataError, InvalidValueError
from zerotune.training.memory import device_peak, expected_memory, host_now, host_peak
from zerotune.training.progress import ProgressBar
from zerotune.training.report import Record, Report
from zerotune.training.saving import restore_trainer_state, trainer_state
from zerotune.training.seeding import seed_everything
from zerotune.training.setup import prepare
from zerotune.training.step import TrainStep
from zerotune.training.streams import as_stream

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from zerotune.backend.engine import Engine
    from zerotune.diffusion.objective import Objective
    from zerotune.ema import EMAShadow
    from zerotune.offload import OffloadManager
    from zerotune.optim import OptimizerResolver
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.facts import RunFacts
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.platform import Platform
    from zerotune.training.callbacks import Callback


class Trainer:
    """Wires engine, objective, data, EMA, checkpoints and callbacks together.

    Everything but the model and the plan is optional, and every part works alone as well::

        with Trainer(model=unet, plan=plan, data=dataset, ema=EMAShadow(decay=0.999)) as trainer:
            trainer.fit(steps=1000)
            trainer.save("checkpoints/step-1000")
            images = trainer.sample(count=16)

    Under a launcher every process makes a trainer and calls the same methods.

    Args:
        model: The model, in fp32.
        plan: What is wanted of ZeRO, offload, precision, batch and optimizer.
        optimizer: Settles optimizer and schedule.
        offload: Leases swap folders.
        ema: Follows the weights; attached here.
        data: A dataset with ``__len__`` and ``__getitem__``, an iterable of micro batches (a
            ``DataLoader``, a list), or a ``BatchStream``. Batches are dicts of tensors.
        objective: Gives the loss; flow matching of images without conditioning by default.
        callbacks: What is told of each step; a ``ProgressBar`` when not given.
        run: What the script knows and the plan may leave ``"auto"``.
        platform: The machine; detected when not given.
        deepspeed: ``False`` asks for the plain engine.
        seed: Fixes data order, noise, time steps and the global generators.
        timeout_s: Seconds after which a collective gives up.

    Raises:
        ZeroTuneError: As ``zerotune.prepare``.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        plan: DeepSpeedPlan | ResolvedPlan,
        optimizer: OptimizerResolver | None = None,
        offload: OffloadManager | None = None,
        ema: EMAShadow | None = None,
        data: Any = None,
        objective: Objective | None = None,
        callbacks: Sequence[Callback] | None = None,
        run: RunFacts | None = None,
        platform: Platform | None = None,
        deepspeed: bool = True,
        seed: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._host_before = host_now()
        self.engine: Engine = prepare(
            model=model,
            plan=plan,
            optimizer=optimizer,
            offload=offload,
            run=run,
            platform=platform,
            deepspeed=deepspeed,
            timeout_s=timeout_s,
        )
        """What trains."""
        with ExitStack() as undo:
            undo.callback(self.engine.close)
            self.stream = as_stream(data, engine=self.engine, seed=seed)
            if ema is not None and not ema.attached:
                ema.attach(self.engine)
            undo.pop_all()
        self.ema = ema
        self.objective: Objective = objective or FlowMatchingObjective()
        self._seed = seed
        self._generator = seed_everything(seed, rank=self.engine.group.rank)
        self._record = Record()
        chosen = (ProgressBar(),) if callbacks is None else callbacks
        self.callbacks: tuple[Callback, ...] = (self._record, *chosen)
        self.decisions: tuple[Decision, ...] = ()
        """Automatic choices since the engine was built; the engine holds its own."""

    @property
    def step(self) -> int:
        """Optimizer steps taken, those before a resume included."""
        return self.engine.state.global_step

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.engine.group.is_main

    def fit(self, *, steps: int) -> Report:
        """Train until ``steps`` optimizer steps have been taken in total.

        Collective. After ``resume`` it goes on from there, so the same call finishes a run that
        was interrupted.

        Args:
            steps: The number of the last step.

        Returns:
            The report.

        Raises:
            DataError: There are no data, or a batch does not fit.
            TrainingError: The loss is not finite.
        """
        if self.stream is None:
            raise DataError(
                "there is nothing to train on",
                key="data",
                value=None,
                fix="Trainer(data=...): a dataset or an iterable of batches",
            )
        train_step = TrainStep(
            engine=self.engine,
            objective=self.objective,
            stream=self.stream,
            generator=self._generator,
            ema=self.ema,
        )
        self.engine.module.train()
        try:
            self._tell("on_fit_start", steps=steps)
            while self.step < steps:
                self._tell("on_step_end", train_step.run())
        finally:
            self._tell("on_fit_end")
        return self.report()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint: engine, EMA, data position and random numbers. Collective.

        Raises:
            CheckpointError: It cannot be written.
        """
        group = self.engine.group
        extra = trainer_state(
            stream=self.stream, generator=self._generator, seed=self._seed, group=group
        )
        written = save_checkpoint(path, engine=self.engine, extra=extra, shadows=self._shadows())
        self._tell("on_save", written)
        return written

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint as if there had been no interruption. Collective.

        Under the plan it was saved under, bit for bit; under any other, what that changes is in
        ``decisions``.

        Args:
            path: A checkpoint, as ``save`` wrote it.

        Raises:
            CheckpointError: There is none, or it belongs to another model.
            DataError: The data are not those of the checkpoint.
        """
        contents = load_checkpoint(path, engine=self.engine, shadows=self._shadows())
        self.decisions += contents.decisions + restore_trainer_state(
            contents.extra,
            stream=self.stream,
            generator=self._generator,
            step=self.step,
            group=self.engine.group,
        )
        self._tell("on_resume", Path(path))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        weights: Literal["ema", "trained"] | None = None,
        dtype: str | torch.dtype = "fp32",
    ) -> Path:
        """Write the model as a diffusers model folder, one parameter at a time. Collective.

        Args:
            path: The folder; a name that ends with ``.safetensors`` becomes a single file.
            weights: ``"ema"`` or ``"trained"``; the EMA where there is one when not given.
            dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype.

        Returns:
            The absolute path.

        Raises:
            InvalidValueError: There is no EMA, or it is none of these.
            CheckpointError: It cannot be written.
        """
        if weights not in (None, "ema", "trained") or (weights == "ema" and self.ema is None):
            raise InvalidValueError(
                "there are no such weights",
                key="weights",
                value=weights,
                fix='weights="trained", or Trainer(ema=EMAShadow(...))',
            )
        shadow = None if weights == "trained" else self.ema
        return export_model(path, engine=self.engine, weights=shadow, dtype=dtype)

    def sample(
        self,
        *,
        labels: torch.Tensor | None = None,
        count: int | None = None,
        scheduler: Any = None,
        steps: int = 50,
        guidance_scale: float = 1.0,
        seed: int = 0,
        ema: bool = True,
        shape: tuple[int, int, int] | None = None,
        batch_size: int | None = None,
    ) -> torch.Tensor:
        """Draw images, with the EMA weights where there are any. Collective.

        Args:
            labels: What to draw, (n,).
            count: How many to draw, without labels.
            scheduler: A diffusers scheduler; the objective's when not given.
            steps: Denoising steps.
            guidance_scale: Classifier-free guidance; 1 is none.
            seed: Fixes the images.
            ema: ``False`` uses the trained weights.
            shape: (c, h, w); read from the model's configuration when not given.
            batch_size: Images per forward pass and rank.

        Returns:
            fp32 images on the CPU, (n, c, h, w), on every rank.

        Raises:
            InvalidValueError: An argument is missing or does not fit.
        """
        chosen = scheduler or getattr(self.objective, "scheduler", None)
        if chosen is None:
            raise InvalidValueError(
                f"{type(self.objective).__name__} has no scheduler to sample with",
                key="scheduler",
                value=None,
                fix="pass a diffusers scheduler",
            )
        averaged = self.ema.swapped_in() if ema and self.ema is not None else nullcontext()
        with averaged:
            return sample(
                self.engine,
                scheduler=chosen,
                family=getattr(self.objective, "family", None),
                labels=labels,
                count=count,
                shape=shape,
                steps=steps,
                guidance_scale=guidance_scale,
                generator=torch.Generator().manual_seed(seed),
                batch_size=batch_size,
            )

    def report(self) -> Report:
        """What the steps of this trainer cost, on this rank. Not collective."""
        plan = self.engine.plan
        return Report(
            world_size=self.engine.group.world_size,
            samples_per_step=plan.train_batch_size,
            host_before=self._host_before,
            host_peak=host_peak(),
            device_peak=device_peak(self.engine.device),
            memory=expected_memory(plan, ema=self.ema is not None) if plan.model else (),
            **self._record.totals,
        )

    def explain(self) -> str:
        """What runs, verified, with every automatic choice."""
        parts = [self.engine.explain()]
        if self.ema is not None:
            parts.append(self.ema.explain())
        return "\n".join(parts)

    def close(self) -> None:
        """End the engine and give its swap folder back. May be repeated."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.__exit__(kind, error, traceback)

    def _shadows(self) -> dict[str, EMAShadow]:
        return {} if self.ema is None else {"ema": self.ema}

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args, **kwargs)
