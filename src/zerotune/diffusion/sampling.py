"""Sampling of images from a model, on one rank or distributed over all ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import torch

from zerotune._util.text import whole
from zerotune.diffusion.models.family import (
    Conditioning,
    Denoiser,
    Drawing,
    Family,
    LabelFamily,
    PromptFamily,
    Unconditional,
)
from zerotune.diffusion.noise_schedule import ResolutionShift
from zerotune.errors import CollectiveError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup

T = TypeVar("T")


def evaluating(model: Any) -> AbstractContextManager[None]:
    """Switch a model to evaluation mode and disable gradients inside a ``with`` block.

    Args:
        model: An ``Engine`` or a ``torch.nn.Module``.
    """
    if hasattr(model, "evaluating"):
        return cast("AbstractContextManager[None]", model.evaluating())
    return _module_evaluating(model)


@contextmanager
def _module_evaluating(module: torch.nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)


def shared(group: ProcessGroup | None, purpose: str, work: Callable[[], T]) -> list[T]:
    """Call ``work`` on every rank, and return the results of all ranks in rank order.

    If ``work`` fails on one rank, all ranks raise an error. If ``work`` fails within a collective,
    such as a forward pass at ZeRO stage 3, the other ranks wait until the group's timeout.

    Args:
        group: Processes that share the work; ``None`` for a single process.
        purpose: Description of the work, for the error message.
        work: Function that computes this rank's share of the results.
    """
    if group is None:
        return [work()]
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = group.gather((result, told))
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            raise CollectiveError(f"rank {rank} reports {why}", key=purpose)
    return [part for part, _ in outcomes]


def group_of(model: Any) -> ProcessGroup | None:
    """Return an engine's process group, or ``None`` for a model without an engine."""
    return cast("ProcessGroup | None", getattr(model, "group", None))


def equal_share(count: int, group: ProcessGroup | None) -> list[int]:
    """Return this rank's share of the indices below ``count``; all shares have equal length.

    Every rank needs the same number of forward passes, which are collectives at ZeRO stage 3. The
    last shares are padded by repeating the last index; callers drop the duplicates.
    """
    rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
    each = math.ceil(count / world_size)
    return [min(number, count - 1) for number in range(rank * each, (rank + 1) * each)]


_LARGEST_SEED = 2**63 - 1

_Draw = Callable[[list[int]], torch.Tensor]
"""Function from indices to images."""


def sample(
    model: Denoiser,
    *,
    scheduler: Any = None,
    family: Family | None = None,
    prompts: Sequence[str] | None = None,
    negative_prompt: str = "",
    labels: torch.Tensor | None = None,
    count: int | None = None,
    shape: tuple[int, int, int] | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    references: torch.Tensor | None = None,
    steps: int = 50,
    guidance_scale: float = 1.0,
    trained_with: Any = None,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Sample images with a diffusers scheduler, at any ZeRO stage.

    Collective under an ``Engine`` with several ranks: every rank must pass the same arguments. Each
    rank samples a share of the images, and every rank returns all images. The noise of an image
    does not depend on the number of ranks or the batch size. To sample with EMA weights::

        with ema.swapped_in():
            images = sample(engine, scheduler=DDIMScheduler(), labels=labels)

    Args:
        model: An ``Engine`` or a diffusers model, in evaluation mode during the call.
        scheduler: Diffusers scheduler, such as ``DDIMScheduler``; sampling uses a copy. For a
            text-to-image family, the default is the pipeline's scheduler.
        family: Family that calls the model; by default ``Unconditional()``.
        prompts: Prompts for a text-to-image family; see ``PipelineFamily.draw``.
        negative_prompt: Negative prompt for guidance; only with prompts.
        labels: Labels (n,) for a class-conditional family.
        count: Number of images; required without labels and prompts.
        shape: Shape (c, h, w) of a sample, only without prompts; by default taken from the model's
            configuration.
        size: Height and width in pixels, only with prompts; by default the model's native size.
        frames: Number of frames per clip, only with a video family; by default the pipeline's
            default.
        references: Images (n, 3, height, width) in [-1, 1] to edit, only with an editing family.
            Families with several references per image also accept (n, r, 3, height, width).
        steps: Number of denoising steps.
        guidance_scale: Classifier-free guidance scale; 1 disables guidance.
        trained_with: Scheduler of the training objective, only with prompts; the pipeline's
            scheduler then adopts the prediction type of ``trained_with``.
        generator: CPU generator in the same state on every rank; by default a generator with seed
            0.
        batch_size: Number of images per forward pass and rank; by default all images of the rank.

    Returns:
        fp32 images (n, c, h, w) or clips (n, c, frames, h, w) on the CPU. Values are nominally in
        [-1, 1], but not clamped.

    Raises:
        InvalidValueError: An argument is missing or does not apply to the family.
        CollectiveError: The ranks passed generators in different states.
    """
    family = Unconditional() if family is None else family
    if prompts is None:
        _unfitting(
            "prompts",
            size=size,
            frames=frames,
            references=references,
            negative_prompt=negative_prompt or None,
            trained_with=trained_with,
        )
    else:
        _unfitting("labels or count", labels=labels, shape=shape)
    wanted = _count_images(labels, prompts, count)
    whole(steps, key="steps", fix="write 1")
    if batch_size is not None:
        whole(batch_size, key="batch_size", fix="write 1")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    seeds: list[int] = torch.randint(_LARGEST_SEED, (wanted,), generator=generator).tolist()
    group = group_of(model)
    mine = equal_share(wanted, group)
    chunk = batch_size or len(mine)
    if group is not None:
        group.agree(hash(tuple(seeds)), "sampling generator")
    if prompts is not None:
        request = Drawing(
            prompts=tuple(prompts),
            seeds=tuple(seeds),
            negative_prompt=negative_prompt,
            steps=steps,
            guidance_scale=guidance_scale,
            size=size,
            frames=frames,
            references=references,
            scheduler=scheduler,
            trained_with=trained_with,
        )
        draw = _from_prompts(model, family, request)
    else:
        loop = _new_loop(
            model, family, scheduler, shape, steps=steps, guidance_scale=guidance_scale
        )
        draw = loop.from_labels(labels, seeds)

    def work() -> torch.Tensor:
        with evaluating(model):
            starts = range(0, len(mine), chunk)
            return torch.cat([draw(mine[start : start + chunk]) for start in starts])

    return torch.cat(shared(group, "drawing images", work))[:wanted]


@attrs.frozen(kw_only=True)
class _Loop:
    """Sampling loop of one rank."""

    model: Denoiser
    scheduler: Any
    family: LabelFamily
    shape: tuple[int, ...]
    steps: int
    guidance_scale: float

    def from_labels(self, labels: torch.Tensor | None, seeds: list[int]) -> _Draw:
        def draw(picked: list[int]) -> torch.Tensor:
            chosen = None if labels is None else labels.cpu()[picked]
            return self._draw(chosen, [seeds[index] for index in picked])

        return draw

    def _draw(self, labels: torch.Tensor | None, seeds: list[int]) -> torch.Tensor:
        model, family = self.model, self.family
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        shift = {}
        if scheduler.config.get("use_dynamic_shifting", False):
            shift["mu"] = ResolutionShift().mu((1, *self.shape), scheduler.config)
        scheduler.set_timesteps(self.steps, device=model.device, **shift)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        images = torch.stack([torch.randn(self.shape, generator=g) for g in generators])
        images = images.to(model.device) * float(getattr(scheduler, "init_noise_sigma", 1.0))
        conditioning = family.condition_on(labels)
        unknown = self._unconditional(conditioning)
        # Stochastic schedulers add noise at each step; it must come from the same seeds.
        noise = (
            {"generator": generators}
            if "generator" in inspect.signature(scheduler.step).parameters
            else {}
        )
        for timestep in scheduler.timesteps:
            scaled = images
            if hasattr(scheduler, "scale_model_input"):
                scaled = scheduler.scale_model_input(images, timestep)
            prediction = self._predict(scaled, timestep, conditioning, unknown)
            images = scheduler.step(prediction, timestep, images, **noise).prev_sample
        return images.float().cpu()

    def _unconditional(self, conditioning: Conditioning) -> Conditioning | None:
        if self.guidance_scale == 1.0:
            return None
        unknown = self.family.without_condition(conditioning)
        if unknown is None:
            raise InvalidValueError(
                "requires a model that was trained both with and without labels",
                "train with ClassConditional(null_label=..., dropout=0.1), or pass 1.0",
                "guidance_scale",
                self.guidance_scale,
            )
        return unknown

    def _predict(
        self,
        images: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        unknown: Conditioning | None,
    ) -> torch.Tensor:
        family, model = self.family, self.model
        if unknown is None:
            times = timestep.expand(len(images))
            return family.predict(model, images, times, conditioning).float()
        both = {name: torch.cat([value, unknown[name]]) for name, value in conditioning.items()}
        doubled = torch.cat([images, images])
        output = family.predict(model, doubled, timestep.expand(len(doubled)), both).float()
        known, without = output.chunk(2)
        return without + self.guidance_scale * (known - without)


def _from_prompts(model: Denoiser, family: Family, request: Drawing) -> _Draw:
    if not isinstance(family, PromptFamily):
        raise InvalidValueError(
            f"{type(family).__name__} does not accept prompts",
            "pass labels= or count= instead, or pass a text-to-image family",
            "prompts",
            request.prompts[0],
        )

    def draw(picked: list[int]) -> torch.Tensor:
        mine = attrs.evolve(
            request,
            prompts=tuple(request.prompts[index] for index in picked),
            seeds=tuple(request.seeds[index] for index in picked),
            references=None if request.references is None else request.references[picked],
        )
        return family.draw(model, mine)

    return draw


def _new_loop(
    model: Denoiser, family: Family, scheduler: Any, shape: tuple[int, ...] | None, **settings: Any
) -> _Loop:
    if not isinstance(family, LabelFamily):
        raise InvalidValueError(
            f"{type(family).__name__} requires prompts", 'pass prompts=["…"]', "prompts", None
        )
    if scheduler is None:
        raise InvalidValueError(
            "no scheduler is given",
            "pass a diffusers scheduler, such as the objective's",
            "scheduler",
            None,
        )
    return _Loop(
        model=model, family=family, scheduler=scheduler, shape=shape or shape_of(model), **settings
    )


def shape_of(model: Any) -> tuple[int, int, int]:
    """Return the sample shape (c, h, w) that a diffusers model's configuration defines."""
    module = getattr(model, "module", model)
    config = getattr(module, "config", {})
    size, channels = config.get("sample_size"), config.get("in_channels")
    if size is None or channels is None:
        raise InvalidValueError(
            f"the configuration of {type(module).__name__} does not define the sample shape",
            "pass shape=(channels, height, width)",
            "shape",
            None,
        )
    height, width = (size, size) if isinstance(size, int) else size
    return int(channels), int(height), int(width)


def _count_images(
    labels: torch.Tensor | None, prompts: Sequence[str] | None, count: int | None
) -> int:
    listed = labels if prompts is None else prompts
    if listed is not None and count not in (None, len(listed)):
        raise InvalidValueError(
            f"{len(listed)} {'labels' if prompts is None else 'prompts'} already "
            "determine the number of images",
            "omit count",
            "count",
            count,
        )
    wanted = count if listed is None else len(listed)
    if wanted is None or wanted < 1:
        raise InvalidValueError(
            "no images are requested",
            "pass at least one prompt or label, or set count to 1 or more",
            "count",
            wanted,
        )
    return wanted


def _unfitting(belongs_to: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidValueError(f"is only valid with {belongs_to}", "omit it", name, value)
