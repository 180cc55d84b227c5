"""Trainer state in checkpoints, and callbacks that save checkpoints."""

from __future__ import annotations

import base64
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch

from zerotune._util.text import counted
from zerotune.backend.distributed import together
from zerotune.checkpoint import BackgroundSaver, RootHold, load_checkpoint
from zerotune.checkpoint.folders import find_checkpoint, prune, step_folder
from zerotune.checkpoint.leftovers import remove_leftovers
from zerotune.checkpoint.save import PendingCheckpoint
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.order import derive_seed
from zerotune.diffusion.data.streams import RepeatedBatches
from zerotune.errors import UNSET, CheckpointCorruptError, DataError, InvalidValueError
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.engine import Engine
    from zerotune.diffusion.data.streams import BatchStream
    from zerotune.ema import EMAShadow
    from zerotune.training.events import StepMetrics
    from zerotune.training.view import RunView

_TRAINER_ENTRY: Final = "trainer"


# -- When checkpoints are saved.


class SaveEvery(Callback):
    """Saves a checkpoint ``root/step-…`` every few steps or minutes, and at the end of every run.

    When ``fit`` starts, files left by interrupted saves are deleted from ``root``. While ``fit``
    runs, ``root`` is locked, so a second job that saves to it fails before its first step (see
    ``RootHold``). All but the newest ``keep`` checkpoints are deleted after each save and when
    ``fit`` ends.

    Args:
        steps: Optimizer steps between two checkpoints.
        minutes: Minutes between two checkpoints, measured on rank 0. If both ``steps`` and
            ``minutes`` are given, a checkpoint is saved when either interval has passed.
        root: Folder of the checkpoints.
        keep: Number of checkpoints to keep; ``None`` keeps all.

    Raises:
        InvalidValueError: Neither ``steps`` nor ``minutes`` is given, or one of them is not
            positive.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        root: str | os.PathLike[str],
        keep: int | None = None,
    ) -> None:
        if (steps is None and minutes is None) or any(
            n is not None and n <= 0 for n in (steps, minutes)
        ):
            raise InvalidValueError(
                "needs a number of steps or minutes above 0",
                "use SaveEvery(steps=500, root=...) or SaveEvery(minutes=30, root=...)",
                "SaveEvery",
                {"steps": steps, "minutes": minutes},
            )
        self._steps, self._minutes = steps, minutes
        self._root, self._keep = Path(root), keep
        self._since = time.monotonic()
        self._moved = False
        self._hold: RootHold | None = None

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Start the clock and lock the folder."""
        self._since = time.monotonic()
        self._moved = False

        def take() -> tuple[Decision, ...]:
            if trainer.is_main:
                self._hold = RootHold(self._root)
                remove_leftovers(self._root)
            return () if self._hold is None else self._hold.decisions

        decisions = together(trainer.engine.group, f"lock {self._root} for checkpoints", take)[0]
        announce(decisions, rank=trainer.engine.group.rank)
        trainer.decisions += decisions

    def on_fit_end(self, trainer: RunView) -> None:  # noqa: ARG002
        """Unlock the folder."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Save if a checkpoint is due."""
        self._moved = True
        if self._due(trainer, metrics.step):
            self._save(trainer)

    def on_stop(self, trainer: RunView, reason: str) -> None:  # noqa: ARG002
        """Save a checkpoint unless the current step is already saved."""
        if is_saved(trainer, self._root):
            self._prune(trainer)
        else:
            self._save(trainer)

    def on_finish(self, trainer: RunView) -> None:
        """Save a checkpoint unless the current step is already saved, and delete older ones."""
        if self._moved and not is_saved(trainer, self._root):
            self._save(trainer)
        else:
            self._prune(trainer)

    def _save(self, trainer: RunView) -> None:
        trainer.save(step_folder(self._root, trainer.step))
        self._prune(trainer)
        self._since = time.monotonic()

    def _prune(self, trainer: RunView) -> None:
        if (keep := self._keep) is not None:
            together(
                trainer.engine.group,
                f"delete older checkpoints in {self._root}",
                lambda: prune(self._root, keep=keep) if trainer.is_main else (),
            )

    def _due(self, trainer: RunView, step: int) -> bool:
        if self._steps is not None and step % self._steps == 0:
            return True
        if self._minutes is None:
            return False
        # Only the main rank's clock counts: clocks differ, and all ranks must save the same step.
        passed = time.monotonic() - self._since >= 60 * self._minutes
        return trainer.engine.group.any(passed and trainer.is_main)


class SaveEveryInBackground(SaveEvery):
    """Variant of ``SaveEvery`` that writes checkpoints while training continues.

    Weights, optimizer states and EMAs are first copied into host memory (16 bytes per weight with
    Adam and an EMA, or 10 with 8-bit moments). When the next checkpoint is due or ``fit`` ends, the
    ranks confirm that the pending checkpoint is complete. Callbacks are notified and older
    checkpoints are deleted only after the new checkpoint is complete.
    """

    _saver: BackgroundSaver | None = None
    _pending: tuple[int, PendingCheckpoint] | None = None

    def on_stop(self, trainer: RunView, reason: str) -> None:
        """Save a checkpoint, and wait until it is complete."""
        self._settle(trainer)
        super().on_stop(trainer, reason)
        self._settle(trainer)

    def on_finish(self, trainer: RunView) -> None:
        """Save the last checkpoint, and wait until it is complete."""
        self._settle(trainer)
        super().on_finish(trainer)
        self._settle(trainer)

    def on_fit_end(self, trainer: RunView) -> None:
        """Wait until the pending checkpoint is complete."""
        with ExitStack() as ends:
            ends.callback(super().on_fit_end, trainer)
            saver, self._saver = self._saver, None
            if saver is not None:
                ends.callback(saver.close)
            self._settle(trainer)

    def _save(self, trainer: RunView) -> None:
        self._settle(trainer)
        if self._saver is None:
            self._saver = BackgroundSaver(engine=trainer.engine, timeout_s=trainer.timeout_s)
        pending = self._saver.save(
            step_folder(self._root, trainer.step),
            extra=trainer.extra_state(),
            shadows=trainer.emas.shadows,
        )
        self._pending = trainer.step, pending
        self._since = time.monotonic()

    def _settle(self, trainer: RunView) -> None:
        if self._pending is None:
            return
        step, checkpoint = self._pending
        try:
            path = checkpoint.wait()
        finally:
            # An interrupt ends the wait, but not the write.
            if checkpoint.done:
                self._pending = None
        trainer.note_saved(path, step=step)
        self._prune(trainer)


def is_saved(trainer: RunView, root: Path) -> bool:
    """Return whether the trainer's latest save wrote the current step to ``root``."""
    # Like the paths of written checkpoints; Path.absolute would keep "..".
    path = Path(os.path.abspath(step_folder(root, trainer.step)))  # noqa: PTH100
    return trainer.last_saved == (trainer.step, path)


# -- Random numbers: one seed fixes all of a run's, and a checkpoint stores their state.


def seed_everything(seed: int, *, rank: int) -> torch.Generator:
    """Seed Python, numpy and torch, and return this rank's generator for the objective.

    Each rank draws different random numbers, so noise and dropout differ between ranks.
    """
    random.seed(derive_seed(seed, "python", rank))
    np.random.seed(derive_seed(seed, "numpy", rank) % 2**32)
    torch.manual_seed(derive_seed(seed, "torch", rank))
    return torch.Generator().manual_seed(derive_seed(seed, "objective", rank))


def generator_to_text(generator: torch.Generator) -> str:
    """Encode a generator's state as text for JSON."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def generator_from_text(generator: torch.Generator, text: str) -> None:
    """Restore a generator's state from text written by ``generator_to_text``."""
    generator.set_state(torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8))


def trainer_state(
    *, stream: BatchStream | None, generator: torch.Generator, seed: int, group: ProcessGroup
) -> dict[str, Any]:
    """Return the trainer's part of a checkpoint: a JSON-serialisable dict. Collective."""
    return {
        _TRAINER_ENTRY: {
            "seed": seed,
            "data": None if stream is None else stream.state_dict(),
            "generators": group.gather(generator_to_text(generator), purpose="save random numbers"),
            "first_batches": group.gather(getattr(stream, "first", None), purpose="save the order"),
        }
    }


def resumed(
    path: str | os.PathLike[str],
    *,
    engine: Engine,
    shadows: Mapping[str, EMAShadow],
    stream: BatchStream | None,
    generator: torch.Generator,
    seed: int,
) -> tuple[Decision, ...]:
    """Load a checkpoint into engine, EMAs, stream and generator; return the decisions. Collective.

    A checkpoint without trainer state, such as a converted checkpoint, has no data position and may
    lack EMAs. State that is missing from the checkpoint is initialised, and a decision records
    this.
    """
    group = engine.group
    group.barrier(f"resuming from {os.fspath(path)}")

    def outline() -> tuple[TrainerState | None, tuple[str, ...]]:
        """Return the checkpoint's trainer state, if any, and the names of its shadows."""
        _, manifest = find_checkpoint(path)
        entry = manifest.extra.get(_TRAINER_ENTRY, UNSET)
        return None if entry is UNSET else TrainerState.of(entry), manifest.shadows

    before = engine.state.global_step
    ours, there = together(group, "find the checkpoint", outline)[group.rank]
    saved = {name: each for name, each in shadows.items() if ours or name in there}
    with moved(stream, ours and ours.data, group=group):
        if ours and before == 0:
            together(group, "compare the data", lambda: ours.check_order(stream, group))
        contents = load_checkpoint(path, engine=engine, shadows=saved)
    at = stream if ours and ours.data is not None else None
    decisions = contents.decisions + gone_on(before, engine, path, stream=at)
    if ours:
        step = engine.state.global_step
        return decisions + ours.restore(generator, step=step, group=group)
    for name, shadow in shadows.items():
        if name not in saved:
            shadow.begin_anew()
    generator.manual_seed(_seed_from(seed, engine.state.global_step, group))
    begun = _begin_decisions(stream is not None, [name for name in shadows if name not in saved])
    announce(begun, rank=group.rank)
    return decisions + begun


def gone_on(
    before: int,
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    stream: BatchStream | None = None,
) -> tuple[Decision, ...]:
    """Return a decision that names the step from which a run continues; rank 0 logs it.

    Args:
        before: Optimizer steps taken before the checkpoint was loaded.
        engine: Engine that loaded the checkpoint.
        path: The checkpoint.
        stream: The data stream, already at its restored position.
    """
    step = engine.state.global_step
    decision = Decision("step", before, step, f"{_place(stream)}continues from {path}")
    announce((decision,), rank=engine.group.rank)
    return (decision,)


def _place(stream: BatchStream | None) -> str:
    """Return ``"after 2.40 epochs; "``, or as much as is known."""
    epoch = getattr(stream, "epoch", None)
    if epoch is not None:
        return f"after {epoch:.2f} epochs; "
    if isinstance(stream, RepeatedBatches):
        return f"after {counted(stream.count, 'batch', 'batches')}; "
    return ""


def _begin_decisions(data: bool, shadows: list[str]) -> tuple[Decision, ...]:
    """Return decisions about state missing from a checkpoint that no trainer wrote."""
    reasons = {f"shadows.{name}": SHADOW_BEGINS for name in shadows}
    reasons["generators"] = (
        "the checkpoint has no trainer state, so the noise generator is reseeded from seed and step"
    )
    if data:
        reasons["data"] = "the checkpoint has no trainer state, so the data start at the beginning"
    return tuple(begun_anew(key, reason) for key, reason in reasons.items())


SHADOW_BEGINS: Final = "the checkpoint lacks this EMA, so it starts from the loaded weights"


def begun_anew(key: str, reason: str) -> Decision:
    """Return a decision about state that is initialised because the checkpoint lacks it."""
    return Decision(key, None, "anew", reason, "warning")


@attrs.frozen(kw_only=True)
class TrainerState:
    """Parsed value of ``trainer_state`` in a checkpoint."""

    seed: int
    data: Any
    """Data position, validated by the stream on restore; ``None`` if the saved run had no data
    stream."""
    generators: tuple[str, ...]
    """State of the objective's random number generator on each rank."""
    first_batches: tuple[Any, ...] = ()
    """Digest of each rank's first batch; ``None`` if the stream knows its order."""

    @classmethod
    def of(cls, state: Any) -> TrainerState:
        """Parse a trainer state; raise an error if any part of it is invalid."""
        _check_entry("", state, dict)
        for name, kind in {"seed": int, "generators": list}.items():
            _check_entry(f".{name}", state.get(name, UNSET), kind)
        first = state.get("first_batches", [])
        _check_entry(".first_batches", first, list)
        for text in state["generators"]:
            try:
                generator_from_text(torch.Generator(), text)
            except (ValueError, TypeError, RuntimeError):
                raise _bad_state(".generators", text) from None
        if not state["generators"] or "data" not in state:
            raise _bad_state(".data" if state["generators"] else ".generators", UNSET)
        return cls(
            seed=state["seed"],
            data=state["data"],
            generators=tuple(state["generators"]),
            first_batches=tuple(first),
        )

    def check_order(self, stream: BatchStream | None, group: ProcessGroup) -> None:
        """Check that a stream read again began with this rank's first batch of the saved run."""
        found = getattr(stream, "first", None)
        if found is None or len(self.first_batches) != group.world_size:
            return
        if self.first_batches[group.rank] != found:
            raise DataError(
                "the first batch differs from that of the saved run, so a resumed run would repeat "
                "some samples and leave out others",
                "give the loader's sampler and samples the same seed in every run "
                "(DataLoader(generator=torch.Generator().manual_seed(0))), pass the dataset itself "
                "as data, or start a new run from the weights (load_checkpoint)",
                "data",
                type(stream).__name__,
            )

    def restore(
        self, generator: torch.Generator, *, step: int, group: ProcessGroup
    ) -> tuple[Decision, ...]:
        """Restore this rank's generator, or reseed it if the world size changed."""
        if len(self.generators) == group.world_size:
            generator_from_text(generator, self.generators[group.rank])
            return ()
        # Saved generators do not fit a different number of ranks; the data continue exactly.
        generator.manual_seed(_seed_from(self.seed, step, group))
        decision = Decision(
            "generators",
            len(self.generators),
            group.world_size,
            "the number of processes changed, so the random generators for noise and "
            "time steps are reseeded from the seed and the step",
            "warning",
        )
        announce((decision,), rank=group.rank)
        return (decision,)


@contextmanager
def moved(stream: BatchStream | None, place: Any, *, group: ProcessGroup) -> Iterator[None]:
    """Move a stream to a saved position; if the block fails, move it back.

    Collective: every rank must enter the block.
    """
    if stream is None or place is None:
        yield
        return
    before = stream.state_dict()
    try:
        together(group, "find the data position", lambda: stream.load_state_dict(place))
        yield
    except BaseException:
        stream.load_state_dict(before)
        raise


def _check_entry(name: str, value: Any, kind: type[Any]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _bad_state(name, value)


def _bad_state(name: str, value: Any) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        "is missing" if value is UNSET else "is not valid trainer state",
        "resume from a different checkpoint",
        f"extra.{_TRAINER_ENTRY}{name}",
        value,
    )


def _seed_from(seed: int, step: int, group: ProcessGroup) -> int:
    return derive_seed(seed, "objective", group.rank, "from", step)


def rolled_back(before: int, after: int, reason: str, *, rank: int) -> tuple[Decision, ...]:
    """Return a decision that records the rollback to an earlier step; rank 0 logs it."""
    decision = Decision("step", before, after, reason, "warning")
    announce((decision,), rank=rank)
    return (decision,)
