"""Validation during training: sampled images, and the loss on held-out data."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from typing_extensions import Unpack

from zerotune._util.files import write_atomically
from zerotune._util.text import whole
from zerotune.backend.distributed import together
from zerotune.checkpoint.generators import capture_generators, restore_generators
from zerotune.diffusion.data.batches import stack_samples
from zerotune.diffusion.data.streams import BucketedDataset
from zerotune.diffusion.grid import animated_png, clips_to_grid, images_to_grid
from zerotune.diffusion.held_out import validation_loss
from zerotune.diffusion.sampling import sample
from zerotune.errors import InvalidValueError
from zerotune.training.batches import samples_by_name
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.data.batches import Batch
    from zerotune.training.emas import TrainerEMAs
    from zerotune.training.events import StepMetrics
    from zerotune.training.view import RunView, SampleOptions


_PREVIEW_FPS: Final = 16.0


class Validation(Callback):
    """Base class of callbacks that validate before the first step, every few steps and at the end.

    Subclasses override ``measure``, which runs on every rank. Validation does not change the random
    state of training.

    Args:
        every: Optimizer steps between two validations.

    Raises:
        InvalidValueError: ``every`` is below 1.
    """

    def __init__(self, *, every: int) -> None:
        self._every = whole(every, key="every")
        self._latest: int | None = None

    def measure(self, trainer: RunView) -> None:
        """Run the validation; subclasses override this method, which may be collective."""
        raise NotImplementedError

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Validate before the first step."""
        self._latest = None
        self._once(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Validate if a validation is due."""
        if metrics.step % self._every == 0:
            self._once(trainer)

    def on_finish(self, trainer: RunView) -> None:
        """Validate after the last step; after an early stop, validation is skipped to save time."""
        self._once(trainer)

    def _once(self, trainer: RunView) -> None:
        if self._latest != trainer.step:
            self._latest = trainer.step
            with untouched_randomness():
                self.measure(trainer)


class ValidationImages(Validation):
    """Samples images with the same inputs and seed every few steps, from EMA or trained weights.

    Each validation writes a grid of images to ``folder/step-….png`` and sends the images to the
    trackers. For video models the grid is an animation, and trackers receive the middle frames::

        ValidationImages(every=500, prompts=["a red cube"], steps=30, folder="samples")

    Args:
        every: Optimizer steps between two validations.
        folder: Folder for the image grids.
        columns: Images per row; by default the grid is nearly square.
        name: Name of the images in trackers.
        wanted: Arguments of ``trainer.sample``: ``prompts``, ``labels`` or ``count``, ``seed``,
            ``steps``, ``guidance_scale``, ``ema``, …
    """

    def __init__(
        self,
        *,
        every: int,
        folder: str | os.PathLike[str],
        columns: int | None = None,
        name: str = "validation/images",
        **wanted: Unpack[SampleOptions],
    ) -> None:
        super().__init__(every=every)
        self._folder, self._columns, self._name = Path(folder), columns, name
        self._wanted = wanted

    def measure(self, trainer: RunView) -> None:
        """Sample, write and log the images. Collective.

        Args:
            trainer: The trainer that runs ``fit``.
        """
        images = trainer.sample(**self._wanted)
        path = self._folder / f"step-{trainer.step:08d}.png"
        together(
            trainer.engine.group,
            f"writing {path}",
            lambda: self._write(path, images) if trainer.is_main else None,
        )
        trainer.show(self._name, images)

    def _write(self, path: Path, images: torch.Tensor) -> None:
        columns = self._columns or math.ceil(math.sqrt(len(images)))
        if images.ndim == 5:
            content = animated_png(clips_to_grid(images, columns=columns), fps=_PREVIEW_FPS)
        else:
            buffer = io.BytesIO()
            images_to_grid(images, columns=columns).save(buffer, format="PNG")
            content = buffer.getvalue()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


class ValidationLoss(Validation):
    """Measures the loss on held-out data with fixed noise, so values are comparable across steps.

    Trackers receive the loss as ``validation/loss``, and the loss per noise level as
    ``validation/loss/0.1``, ….

    Args:
        every: Optimizer steps between two validations.
        data: Held-out data, the same on every rank: a list of batches, or a dataset accepted by
            ``Trainer(data=...)``. The first samples of a dataset are used, in order; each batch of
            a bucketed dataset such as ``PreparedImages`` comes from one bucket.
        batches: Number of batches; by default all batches of a list, or 8 batches of a dataset.
        batch_size: Samples per batch of a dataset; by default the plan's micro batch size.
        seed: Seed of the noise.
        ema: Weights to use: ``True`` for the first EMA, the name of an EMA, or ``False`` for the
            trained weights.

    Attributes:
        history: Step and mean loss of each validation.
    """

    def __init__(
        self,
        *,
        every: int,
        data: Any,
        batches: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        ema: bool | str = False,
    ) -> None:
        super().__init__(every=every)
        self._data, self._count, self._batch_size = data, batches, batch_size
        self._seed, self._ema = seed, ema
        self.history: list[tuple[int, float]] = []

    def measure(self, trainer: RunView) -> None:
        """Measure and log the loss. Collective."""
        size = self._batch_size or trainer.engine.plan.micro_batch_size
        with trainer.emas.swapped_in(self._ema):
            loss = validation_loss(
                trainer.objective,
                trainer.engine,
                self._batches(size),
                seed=self._seed,
            )
        self.history.append((trainer.step, loss.mean))
        levels = {f"validation/loss/{level:g}": mean for level, mean in loss.by_quantile.items()}
        trainer.log({"validation/loss": loss.mean, **levels})

    def _batches(self, size: int) -> Sequence[Batch]:
        if isinstance(self._data, list | tuple):
            return cast("Sequence[Batch]", self._data[: self._count])
        count = 8 if self._count is None else self._count
        return _DatasetBatches(self._data, count=count, size=size)


class _DatasetBatches(Sequence["Batch"]):
    """The first batches of a dataset, each from one bucket; read on access."""

    def __init__(self, dataset: Any, *, count: int, size: int) -> None:
        if not isinstance(dataset, BucketedDataset):
            dataset = samples_by_name(dataset)
            buckets: Iterable[Sequence[int]] = (range(len(dataset)),)
        else:
            buckets = dataset.assignment.members.values()
        self._dataset = dataset
        batches = [of[at : at + size] for of in buckets for at in range(0, len(of), size)]
        self._batches = sorted(batches, key=lambda batch: batch[0])[:count]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return stack_samples([self._dataset[place] for place in self._batches[index]])


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch after the block."""
    tensors, text = capture_generators()
    try:
        yield
    finally:
        restore_generators(tensors, text)


# -- Sampling images from a trainer.


def draw(
    engine: Engine, *, objective: Any, emas: TrainerEMAs, wanted: SampleOptions
) -> torch.Tensor:
    """Implementation of ``trainer.sample``."""
    options: dict[str, Any] = dict(wanted)
    seed, ema = options.pop("seed", 0), options.pop("ema", True)
    if options.get("prompts") is not None:
        options["trained_with"] = getattr(objective, "scheduler", None)
    elif options.get("scheduler") is None:
        options["scheduler"] = getattr(objective, "scheduler", None)
        if options["scheduler"] is None:
            raise InvalidValueError(
                f"{type(objective).__name__} has no scheduler to sample with",
                "pass a diffusers scheduler: sample(scheduler=...)",
                "scheduler",
                None,
            )
    with emas.swapped_in(ema):
        return sample(
            engine,
            family=getattr(objective, "family", None),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
