"""Checkpoints of a trainer: what it adds to the engine's own, and when they are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotune.checkpoint import prune, step_folder
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data import derive_seed
from zerotune.errors import CheckpointMismatchError
from zerotune.training.callbacks import Callback
from zerotune.training.seeding import generator_from_text, generator_to_text

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.diffusion.data import BatchStream
    from zerotune.training.metrics import StepMetrics
    from zerotune.training.trainer import Trainer

_KEY = "trainer"


class SaveEvery(Callback):
    """Saves ``root/step-…`` every few steps and keeps the newest.

    Args:
        steps: Optimizer steps between two checkpoints.
        root: Folder of the checkpoints.
        keep: How many stay; ``None`` keeps all.
    """

    def __init__(
        self, *, steps: int, root: str | os.PathLike[str], keep: int | None = None
    ) -> None:
        self._steps, self._root, self._keep = steps, Path(root), keep

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Save when it is time."""
        if metrics.step % self._steps:
            return
        trainer.save(step_folder(self._root, metrics.step))
        if self._keep is not None and trainer.is_main:
            prune(self._root, keep=self._keep)


def trainer_state(
    *, stream: BatchStream | None, generator: torch.Generator, seed: int, group: ProcessGroup
) -> dict[str, Any]:
    """What a trainer adds to a checkpoint: JSON types, the same on every rank. Collective."""
    return {
        _KEY: {
            "seed": seed,
            "data": None if stream is None else stream.state_dict(),
            "generators": group.gather(generator_to_text(generator)),
        }
    }


def restore_trainer_state(
    extra: Mapping[str, Any],
    *,
    stream: BatchStream | None,
    generator: torch.Generator,
    step: int,
    group: ProcessGroup,
) -> tuple[Decision, ...]:
    """Restore what ``trainer_state`` gave.

    Raises:
        CheckpointMismatchError: The checkpoint was not written by a trainer.
        DataError: The data are not those of the checkpoint.
    """
    if _KEY not in extra:
        raise CheckpointMismatchError(
            "has no trainer's state: it was written by save_checkpoint itself",
            key=f"extra.{_KEY}",
            fix="load it with load_checkpoint into trainer.engine",
        )
    state = extra[_KEY]
    if stream is not None and state["data"] is not None:
        stream.load_state_dict(state["data"])
    texts = state["generators"]
    if len(texts) == group.world_size:
        generator_from_text(generator, texts[group.rank])
        return ()
    # Noise of other ranks cannot be handed out again; the order of the data goes on exactly.
    generator.manual_seed(derive_seed(state["seed"], "objective", group.rank, "from", step))
    decision = Decision(
        key="generators",
        before=len(texts),
        after=group.world_size,
        reason="the number of processes changed, so noise and time steps are drawn anew from "
        "the seed and the step",
        severity="warning",
    )
    announce((decision,), rank=group.rank)
    return (decision,)
