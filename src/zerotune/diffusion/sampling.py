"""Drawing images from a model, on one rank or shared over all of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import attrs
import torch

from zerotune.diffusion.families.base import Conditioning, Denoiser, Family
from zerotune.diffusion.families.unconditional import Unconditional
from zerotune.errors import InvalidValueError

_LARGEST_SEED = 2**63 - 1


class _Group(Protocol):
    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...

    def agree(self, value: Any, what: str) -> None: ...


@attrs.frozen(kw_only=True)
class _Drawing:
    """What one rank draws, and how."""

    model: Denoiser
    scheduler: Any
    family: Family
    shape: tuple[int, ...]
    steps: int
    guidance_scale: float


def sample(
    model: Denoiser,
    *,
    scheduler: Any,
    family: Family | None = None,
    labels: torch.Tensor | None = None,
    count: int | None = None,
    shape: tuple[int, int, int] | None = None,
    steps: int = 50,
    guidance_scale: float = 1.0,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Draw images through a diffusers scheduler, at every ZeRO stage.

    Collective under an ``Engine`` with several ranks: every rank calls it with the same
    arguments; each draws its share in the same number of forward passes, and all receive all
    images. Image ``i`` depends on the generator and ``i`` only, not on the number of ranks or
    the batch size. For EMA weights::

        with ema.swapped_in():
            images = sample(engine, scheduler=DDIMScheduler(), labels=labels)

    Args:
        model: An ``Engine`` or a diffusers model; put in evaluation mode meanwhile.
        scheduler: ``FlowMatchEulerDiscreteScheduler``, ``DDPMScheduler``, ``DDIMScheduler`` …;
            copied, not changed.
        family: How the model is called; ``Unconditional()`` when not given.
        labels: What to draw, (n,).
        count: How many to draw, without labels.
        shape: (c, h, w) of a sample; read from the model's configuration when not given.
        steps: Denoising steps.
        guidance_scale: Classifier-free guidance; 1 is none.
        generator: A CPU generator in the same state on every rank; seed 0 when not given.
        batch_size: Images per forward pass and rank; all at once when not given.

    Returns:
        fp32 images on the CPU, (n, c, h, w), nominally in [-1, 1], not clamped.

    Raises:
        InvalidValueError: An argument is missing or does not fit the family.
        CollectiveError: The ranks passed generators in different states.
    """
    family = Unconditional() if family is None else family
    wanted = _count(labels, count)
    _check(steps=steps, batch_size=batch_size)
    seeds = _seeds(generator, wanted)
    group = cast("_Group | None", getattr(model, "group", None))
    mine, chunk = _share(wanted, group, batch_size)
    if group is not None:
        group.agree(hash(tuple(seeds)), "sampling generator")
    drawing = _Drawing(
        model=model,
        scheduler=scheduler,
        family=family,
        shape=shape or shape_of(model),
        steps=steps,
        guidance_scale=guidance_scale,
    )
    parts = []
    with _evaluating(model):
        for start in range(0, len(mine), chunk):
            picked = mine[start : start + chunk]
            chosen = None if labels is None else labels.cpu()[picked]
            parts.append(_draw(drawing, chosen, [seeds[i] for i in picked]))
    images = torch.cat(parts)
    return images if group is None else torch.cat(group.gather(images))[:wanted]


def shape_of(model: Any) -> tuple[int, int, int]:
    """(c, h, w) of a sample, from a diffusers model's configuration.

    Raises:
        InvalidValueError: The model has no such configuration.
    """
    module = getattr(model, "module", model)
    config = getattr(module, "config", {})
    size, channels = config.get("sample_size"), config.get("in_channels")
    if size is None or channels is None:
        raise InvalidValueError(
            f"{type(module).__name__} does not tell the shape of its samples",
            key="shape",
            value=None,
            fix="pass shape=(channels, height, width)",
        )
    height, width = (size, size) if isinstance(size, int) else size
    return int(channels), int(height), int(width)


def _count(labels: torch.Tensor | None, count: int | None) -> int:
    if labels is not None and count not in (None, len(labels)):
        raise InvalidValueError(
            f"{len(labels)} labels ask for as many images",
            key="count",
            value=count,
            fix="leave count out",
        )
    wanted = count if labels is None else len(labels)
    if wanted is None or wanted < 1:
        raise InvalidValueError(
            "nothing to draw", key="count", value=wanted, fix="pass labels= or count="
        )
    return wanted


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidValueError("must be at least 1", key=name, value=value, fix="write 1")


def _seeds(generator: torch.Generator | None, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    drawn: list[int] = torch.randint(_LARGEST_SEED, (count,), generator=generator).tolist()
    return drawn


def _share(wanted: int, group: _Group | None, batch_size: int | None) -> tuple[list[int], int]:
    """Indices this rank draws, and how many at a time: equal counts on every rank.

    At stage 3 each forward pass is a collective, so a rank without work of its own repeats the
    last image.
    """
    rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
    each = math.ceil(wanted / world_size)
    mine = [min(index, wanted - 1) for index in range(rank * each, (rank + 1) * each)]
    return mine, min(batch_size or each, each)


def _draw(drawing: _Drawing, labels: torch.Tensor | None, seeds: list[int]) -> torch.Tensor:
    model, family = drawing.model, drawing.family
    scheduler = type(drawing.scheduler).from_config(drawing.scheduler.config)
    scheduler.set_timesteps(drawing.steps, device=model.device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    images = torch.stack([torch.randn(drawing.shape, generator=g) for g in generators])
    images = images.to(model.device) * float(getattr(scheduler, "init_noise_sigma", 1.0))
    conditioning = family.condition_on(labels)
    unknown = _unknown(drawing, conditioning)
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
        prediction = _predict(drawing, scaled, timestep, conditioning, unknown)
        images = scheduler.step(prediction, timestep, images, **noise).prev_sample
    return images.float().cpu()


def _unknown(drawing: _Drawing, conditioning: Conditioning) -> Conditioning | None:
    if drawing.guidance_scale == 1.0:
        return None
    unknown = drawing.family.without_condition(conditioning)
    if unknown is None:
        raise InvalidValueError(
            "guidance needs a model that also knows the unconditional case",
            key="guidance_scale",
            value=drawing.guidance_scale,
            fix="train with ClassConditional(null_label=..., dropout=0.1), or use 1.0",
        )
    return unknown


def _predict(
    drawing: _Drawing,
    images: torch.Tensor,
    timestep: torch.Tensor,
    conditioning: Conditioning,
    unknown: Conditioning | None,
) -> torch.Tensor:
    family, model = drawing.family, drawing.model
    if unknown is None:
        times = timestep.expand(len(images))
        return family.predict(model, images, times, conditioning).float()
    both = {name: torch.cat([value, unknown[name]]) for name, value in conditioning.items()}
    doubled = torch.cat([images, images])
    output = family.predict(model, doubled, timestep.expand(len(doubled)), both).float()
    known, without = output.chunk(2)
    return without + drawing.guidance_scale * (known - without)


def _evaluating(model: Any) -> AbstractContextManager[None]:
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
