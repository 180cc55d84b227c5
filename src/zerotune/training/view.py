"""What callbacks see of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from typing_extensions import Unpack

    from zerotune.backend.engine import Engine
    from zerotune.decisions import Decision
    from zerotune.diffusion.objective import Objective
    from zerotune.training.emas import TrainerEMAs


class SampleOptions(TypedDict, total=False):
    """Options of ``zerotune.diffusion.sample``, plus ``seed`` and ``ema``."""

    prompts: Sequence[str]
    negative_prompt: str
    labels: torch.Tensor
    count: int
    scheduler: Any
    """Scheduler; the default is the pipeline's if ``prompts`` are given, else the objective's."""
    steps: int
    guidance_scale: float
    seed: int
    """Seed of the images; default 0."""
    ema: bool | str
    """Weights to use: ``True`` (default) for the first EMA, or the trained weights if there is no
    EMA; the name of an EMA; or ``False`` for the trained weights."""
    shape: tuple[int, int, int]
    size: tuple[int, int]
    frames: int
    references: torch.Tensor
    batch_size: int


class RunView(Protocol):
    """Protocol of the ``trainer`` argument of callbacks; ``Trainer`` describes the members.

    At run time, the argument may be any object with the members that the callback uses.
    """

    decisions: tuple[Decision, ...]
    engine: Engine
    emas: TrainerEMAs
    objective: Objective
    last_saved: tuple[int, Path] | None

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        ...

    @property
    def phase(self) -> str | None:
        """Phase of the step; ``None`` outside a step."""
        ...

    @property
    def timeout_s(self) -> float:
        """Timeout of collectives in seconds."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        ...

    def explain(self) -> str:
        """Return how the run is set up, and why."""
        ...

    def request_stop(self, reason: str) -> None:
        """Stop before the next step."""
        ...

    def save(self, path: str | os.PathLike[str], *, allow_not_finite: bool = False) -> Path:
        """Write a checkpoint. Collective."""
        ...

    def extra_state(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint. Collective."""
        ...

    def note_saved(self, path: Path, *, step: int) -> None:
        """Notify callbacks that a custom checkpoint was saved."""
        ...

    def roll_back(self, path: str | os.PathLike[str], *, reason: str) -> None:
        """Load a checkpoint, and continue from there. Collective."""
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Pass values of the current step to the callbacks."""
        ...

    def show(self, name: str, images: torch.Tensor) -> None:
        """Pass images that were sampled at the current step to the callbacks."""
        ...

    def sample(self, **wanted: Unpack[SampleOptions]) -> torch.Tensor:
        """Sample images. Collective."""
        ...
