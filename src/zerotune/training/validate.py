"""Looking at a run while it trains: images, and the loss on held-out data."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from typing_extensions import TypedDict, Unpack

from zerotune._util.files import write_atomically
from zerotune._util.text import whole
from zerotune.backend.distributed import together
from zerotune.checkpoint.contents import capture_generators, restore_generators
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.streams import BucketedDataset, stack_samples
from zerotune.diffusion.grid import ClipFormat, clip_format, clips_to_grid, images_to_grid
from zerotune.diffusion.held_out import validation_loss
from zerotune.diffusion.sampling import sample
from zerotune.errors import InvalidValueError
from zerotune.training.events import Callback
from zerotune.training.setup import samples_by_name

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.data.streams import Batch
    from zerotune.training.averages import Averages
    from zerotune.training.events import RunView, StepMetrics


_PREVIEW_FPS: Final = 16.0


class Validation(Callback):
    """Does something before the first step, every few steps, and after the last.

    Training goes on as if it had not: the random numbers are what they were. Override
    ``measure``, which every rank calls.

    Args:
        every: Optimizer steps between two times.

    Raises:
        InvalidValueError: ``every`` is below 1.
    """

    def __init__(self, *, every: int) -> None:
        self._every = whole(every, key="every")
        self._latest: int | None = None

    def measure(self, trainer: RunView) -> None:
        """What to do; collective work is safe."""
        raise NotImplementedError

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """The first time."""
        self._latest = None
        self._once(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """When it is time."""
        if metrics.step % self._every == 0:
            self._once(trainer)

    def on_finish(self, trainer: RunView) -> None:
        """The last time; not after an early stop, where there may be no time for it."""
        self._once(trainer)

    def _once(self, trainer: RunView) -> None:
        if self._latest != trainer.step:
            self._latest = trainer.step
            with untouched_randomness():
                self.measure(trainer)


class ValidationImages(Validation):
    """Draws the same images every few steps, at every ZeRO stage, with EMA or trained weights.

    Each time a grid is written to ``folder/step-….png`` and the images go to the trackers; of a
    family of clips the grid moves (``clips=``), and trackers get the middle frames::

        ValidationImages(every=500, prompts=["a red cube"], steps=30, folder="samples")

    Args:
        every: Optimizer steps between two grids.
        folder: Where the grids go.
        columns: Images per row; about a square when not given.
        name: What trackers call the images.
        clips: What clips are written as: ``MP4(fps=24)`` or ``AnimatedPNG(fps=24)``. When not
            given, MP4 at 16 frames a second where PyAV is installed, else an animated PNG.
        wanted: What to draw and how, as ``trainer.sample`` takes it: ``prompts``, ``labels`` or
            ``count``, ``seed``, ``steps``, ``guidance_scale``, ``ema``, …

    Attributes:
        decisions: What clips are written as, where that was chosen.
    """

    decisions: tuple[Decision, ...] = ()

    def __init__(
        self,
        *,
        every: int,
        folder: str | os.PathLike[str],
        columns: int | None = None,
        name: str = "validation/images",
        clips: ClipFormat | None = None,
        **wanted: Unpack[SampleOptions],
    ) -> None:
        super().__init__(every=every)
        self._folder, self._columns, self._name = Path(folder), columns, name
        self._wanted, self._clips = wanted, clips

    def measure(self, trainer: RunView) -> None:
        """Draw, write and show. Collective."""
        images = trainer.sample(**self._wanted)
        suffix = self._clip_format().suffix if images.ndim == 5 else ".png"
        path = self._folder / f"step-{trainer.step:08d}{suffix}"
        together(
            trainer.engine.group,
            f"writing {path}",
            lambda: self._write(path, images) if trainer.is_main else None,
        )
        trainer.show(self._name, images)

    def _clip_format(self) -> ClipFormat:
        if self._clips is None:
            self._clips, decision = clip_format(_PREVIEW_FPS)
            self.decisions = (decision,)
            announce(self.decisions)
        return self._clips

    def _write(self, path: Path, images: torch.Tensor) -> None:
        columns = self._columns or math.ceil(math.sqrt(len(images)))
        if images.ndim == 5:
            content = self._clip_format().encode(clips_to_grid(images, columns=columns))
        else:
            buffer = io.BytesIO()
            images_to_grid(images, columns=columns).save(buffer, format="PNG")
            content = buffer.getvalue()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


class ValidationLoss(Validation):
    """Measures the loss on held-out data with noise that never changes, so that figures compare.

    Logged as ``validation/loss``, and by noise level as ``validation/loss/0.1`` and so on.

    Args:
        every: Optimizer steps between two times.
        data: Held-out data, the same on every rank: a list of batches, or a dataset as
            ``Trainer(data=...)`` takes it, whose first samples are used in order. One in buckets,
            such as ``PreparedImages``, gives batches of one bucket each.
        batches: How many batches; of a list all when not given, else 8.
        batch_size: Samples per batch of a dataset; the plan's micro batch when not given.
        seed: Fixes the noise.
        ema: ``True`` measures the EMA weights, a name one of several.

    Attributes:
        history: Step and mean loss of each time.
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
        """Measure and log. Collective."""
        size = self._batch_size or trainer.engine.plan.micro_batch_size
        with trainer.averages.swapped_in(self._ema):
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
    """The first batches of a dataset, each of one bucket, read when they are asked for."""

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
    """Put the global generators of Python, numpy and torch back after the block."""
    tensors, text = capture_generators()
    try:
        yield
    finally:
        restore_generators(tensors, text)


# -- Drawing images from a trainer: what may be asked for, and doing it.


class SampleOptions(TypedDict, total=False):
    """What to draw, and how: options of ``zerotune.diffusion.sample``, and two more."""

    prompts: Sequence[str]
    negative_prompt: str
    labels: torch.Tensor
    count: int
    scheduler: Any
    """The objective's, or with prompts the pipeline's, when not given."""
    steps: int
    guidance_scale: float
    seed: int
    """Fixes the images; 0 when not given."""
    ema: bool | str
    """``False`` draws with the trained weights, a name with one of several EMAs, ``True`` (when
    not given) with the first there is."""
    shape: tuple[int, int, int]
    size: tuple[int, int]
    frames: int
    references: torch.Tensor
    batch_size: int


def draw(
    engine: Engine, *, objective: Any, averages: Averages, wanted: SampleOptions
) -> torch.Tensor:
    """What ``trainer.sample`` does."""
    options: dict[str, Any] = dict(wanted)
    seed, ema = options.pop("seed", 0), options.pop("ema", True)
    if options.get("prompts") is not None:
        options["trained_with"] = getattr(objective, "scheduler", None)
    elif options.get("scheduler") is None:
        options["scheduler"] = getattr(objective, "scheduler", None)
        if options["scheduler"] is None:
            raise InvalidValueError(
                f"{type(objective).__name__} has no scheduler to sample with",
                key="scheduler",
                value=None,
                fix="pass a diffusers scheduler",
            )
    with averages.swapped_in(ema):
        return sample(
            engine,
            family=getattr(objective, "family", None),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
