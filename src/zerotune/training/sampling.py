"""Drawing images from a trainer: what may be asked for, and doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypedDict

from zerotune.diffusion.sampling import sample
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.training.averages import Averages


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
        options["scheduler"] = _scheduler_of(objective)
    with averages.swapped_in(ema):
        return sample(
            engine,
            family=getattr(objective, "family", None),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )


def _scheduler_of(objective: Any) -> Any:
    scheduler = getattr(objective, "scheduler", None)
    if scheduler is None:
        raise InvalidValueError(
            f"{type(objective).__name__} has no scheduler to sample with",
            key="scheduler",
            value=None,
            fix="pass a diffusers scheduler",
        )
    return scheduler
