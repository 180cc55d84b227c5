"""NaN in the data, the loss, one gradient, a weight or a moment of one rank.

For every kind of engine, with and without clipping, and for every policy: no checkpoint with NaN is
published, a good checkpoint to resume from remains, skipped steps leave weights and states
unchanged, and error messages describe both correctly.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from stress.faults.campaign import Found
from stress.faults.workers import Team
from tests.checkpoint.runs import everything
from zerotune import DeepSpeedPlan, EMAShadow, ImageTensors, Trainer, decisions
from zerotune.checkpoint import latest_checkpoint
from zerotune.errors import CheckpointNotFiniteError, TrainingError, ZeroTuneError
from zerotune.training import RollBackNonFinite, SaveEvery, SaveEveryInBackground, SkipNonFinite
from zerotune.training.step import RaiseNonFinite

PLACES = ("data", "loss", "gradient", "weight", "moment")
POLICIES = ("raise", "skip", "roll back")
COUNTED = ("state", "lr", "random", "step ")
"""Entries of the state that a skipped step may change."""


@attrs.frozen(kw_only=True)
class Kind:
    """Configuration of an engine."""

    stage: int | None
    """``None``: the plain engine."""
    world_size: int = 1
    precision: str = "fp32"
    clipping: float = 0.0
    offload: str = "none"
    norm: bool = True
    background: bool = False


def kind_of(chance: random.Random) -> Kind:
    stage = chance.choice([None, 0, 1, 2, 3])
    offload = "cpu" if stage in (1, 2, 3) and chance.randrange(2) else "none"
    clipping = chance.choice([0.0, 1.0])
    return Kind(
        stage=stage,
        world_size=chance.choice([1, 2]),
        precision=chance.choice(["fp32", "bf16"]),
        clipping=clipping,
        offload=offload,
        norm=bool(clipping or offload == "cpu" or stage not in (1, 2) or chance.randrange(2)),
        background=bool(chance.randrange(2)),
    )


class Spoil(torch.autograd.Function):
    """The identity, whose gradient has NaN as its first element."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        spoiled = gradients[0].clone()
        spoiled.view(-1)[0] = math.nan
        return spoiled


class Net(torch.nn.Module):
    """A network in which one layer's gradient alone can be poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 3, 3, padding=1)
        self.second = torch.nn.Conv2d(3, 1, 3, padding=1)
        self.spoil = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.spoil:
            hidden = Spoil.apply(hidden)  # type: ignore[no-untyped-call]
        return self.second(torch.tanh(hidden))


class Skipped(logging.Handler):
    """Collects the steps logged as skipped, and the ranks with NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"not finite at step (\d+) on rank\(s\) ([\d, ]+);", record.getMessage())
        if found is not None:
            self.steps.append((int(found[1]), found[2]))

    def clear(self) -> None:
        # Messages are logged once per process; forget which were.
        decisions._announced.clear()
        self.steps.clear()


class Poisoned:
    """A trainer of one kind that is poisoned repeatedly."""

    def __init__(self, folder: str, kind: Kind) -> None:
        torch.manual_seed(0)
        self._root = Path(folder)
        self._place, self._where, self._culprit, self._armed = "", 0, 0, False
        self._rank = int(os.environ.get("RANK", "0"))
        images = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        self._images = ImageTensors(images=images)
        settings: dict[str, Any] = {} if kind.norm else {"compute_grad_norm": False}
        self._trainer = Trainer(
            model=Net(),
            plan=DeepSpeedPlan.build(
                stage=kind.stage or 0,
                offload=kind.offload,
                precision=kind.precision,
                micro_batch_size=4,
                gradient_clipping=kind.clipping,
                optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
                **settings,
            ),
            data=self._images,
            objective=self._loss,
            ema=EMAShadow(decay=0.9),
            callbacks=[],
            deepspeed=kind.stage is not None,
            timeout_s=180,
        )
        self._kind, self._around = kind, self._trainer.callbacks
        self._told = Skipped()
        logging.getLogger("zerotune").addHandler(self._told)
        self._trainer.fit(steps=2)
        self._trainer.save(self._root / "start")

    def attack(self, place: str, policy: str, seed: float) -> str:
        """Poison the fourth step, check everything afterwards, and return the run's messages."""
        chance, trainer, root = random.Random(seed), self._trainer, self._root / str(seed)
        trainer.resume(self._root / "start")
        self._where = chance.randrange(10**6)
        self._culprit = chance.randrange(self._kind.world_size)
        saver = SaveEveryInBackground if self._kind.background else SaveEvery
        trainer.callbacks = (*self._around, saver(steps=1, root=root, keep=2))
        trainer.non_finite = {
            "raise": RaiseNonFinite,
            "skip": lambda: SkipNonFinite(most_in_a_row=2),
            "roll back": lambda: RollBackNonFinite(root=root, after=1, most=2),
        }[policy]()  # type: ignore[operator]
        trainer.fit(steps=3)
        before = everything(trainer.engine, trainer.emas.shadows["ema"])
        self._place, self._armed, error = place, place not in ("weight", "moment"), None
        if place in ("weight", "moment"):
            self._poke(place)
        self._told.clear()
        try:
            trainer.fit(steps=6)
        except ZeroTuneError as caught:
            error = caught
        finally:
            self._armed = trainer.engine.module.spoil = False
        self._look(place, policy, before, error, root)
        return str(error or "")

    def _look(
        self, place: str, policy: str, before: dict[str, Any], error: Any, root: Path
    ) -> None:
        said = f"{place}, {policy}: {error}"
        after = everything(self._trainer.engine, self._trainer.emas.shadows["ema"])
        # Collectives first: a failed check on one rank must not leave the others waiting.
        finite = self._trainer.engine.group.gather(self._weights_are_finite())
        skipped = self._trainer.engine.group.broadcast(self._told.steps)
        newest, stuck = self._go_on(root)
        if newest is None or stuck:
            raise Found("lost", f"does not go on from {newest}: {stuck}; {said}")
        # This also removes older checkpoints.
        if self._rank == 0:
            self._all_finite(root, said)
        if error is not None and not isinstance(error, TrainingError | CheckpointNotFiniteError):
            raise Found("foreign", f"{type(error).__name__}: {said}")
        if error is not None and place in ("data", "loss"):
            self._check_rank(error, said)
        if place in ("weight", "moment"):
            in_vain = policy == "skip" and self._is_one_replica(finite, skipped)
            if error is None and not all(finite) and not in_vain:
                raise Found("lost", f"went on with NaN on {finite}, {skipped}; {said}")
            return
        if not all(finite):
            raise Found("lost", f"the weights hold NaN; {said}")
        if policy != "raise" and error is not None:
            raise Found("lost", f"gave up: {said}")
        changed = [k for k, v in before.items() if after[k] != v and not k.startswith(COUNTED)]
        if policy == "raise" and (error is None or changed):
            raise Found("lost", f"no word of it, or a change of {changed[:3]}; {said}")

    def _is_one_replica(self, finite: list[bool], skipped: list[tuple[int, str]]) -> bool:
        """Return whether NaN is only in a replica that is never saved, and its rank was named.

        A poisoned moment corrupts the weights in step 4, whose loss was finite. Both later steps
        are skipped, and the run ends before a third skipped step in a row would be an error.
        """
        alone = [rank == self._culprit for rank in range(self._kind.world_size)]
        replicated = self._kind.stage in (None, 0) and self._culprit != 0
        named = [(5, str(self._culprit)), (6, str(self._culprit))]
        return replicated and finite == [not mine for mine in alone] and skipped == named

    def _go_on(self, root: Path) -> tuple[Path | None, str]:
        """Train on from the newest checkpoint; return its path and any error. Collective."""
        trainer, group = self._trainer, self._trainer.engine.group
        newest = group.broadcast(latest_checkpoint(root) if group.is_main else None)
        if newest is None:
            return None, ""
        trainer.callbacks, trainer.non_finite = self._around, RaiseNonFinite()
        try:
            trainer.resume(newest)
            trainer.fit(steps=trainer.step + 2)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing goes on
            return newest, f"{type(error).__name__}: {error}"
        fine = group.gather(self._weights_are_finite())
        return newest, "" if all(fine) else f"NaN on {fine}"

    def _check_rank(self, error: ZeroTuneError, said: str) -> None:
        named = re.search(r"rank\(s\) ([\d, ]+)", str(error))
        if named is None or named[1] != str(self._culprit):
            raise Found("misnamed", f"rank {self._culprit} it was; {said}")

    def _all_finite(self, root: Path, said: str) -> None:
        for path in root.glob("step-*/*.safetensors"):
            if path.name.startswith("rank"):
                continue
            for name, tensor in load_file(path).items():
                if not bool(tensor.isfinite().all()):
                    raise Found("lost", f"{path.parent.name}/{path.name}: {name} holds NaN; {said}")
        if latest_checkpoint(root) is None:
            raise Found("lost", f"no checkpoint is left; {said}")

    def _weights_are_finite(self) -> bool:
        fine = True
        for fragment in self._trainer.engine.master_weights.read():
            values = (fragment.value, *fragment.states.values())
            fine = fine and all(bool(value.isfinite().all()) for value in values)
        return fine

    def _poke(self, place: str) -> None:
        with self._trainer.engine.master_weights.editing() as fragments:
            for fragment in fragments:
                if fragment.address.numel and self._rank == self._culprit:
                    into = fragment.value
                    if place == "moment":
                        into = fragment.states["exp_avg"]
                    into.view(-1)[self._where % fragment.address.numel] = math.nan

    def _loss(self, engine: Any, batch: Any, _: torch.Generator) -> torch.Tensor:
        images = batch["images"]
        # Only once: after a rollback, the same step must succeed.
        mine = self._armed and self._rank == self._culprit
        self._armed = False
        if mine and self._place == "data":
            images = images.clone()
            images.view(-1)[self._where % images.numel()] = math.nan
        engine.module.spoil = mine and self._place == "gradient"
        loss: torch.Tensor = (engine(images.to(engine.dtype)).float() - 1).pow(2).mean()
        return loss * math.nan if mine and self._place == "loss" else loss


class NaNs:
    """NaN in engines of every kind; each team serves several injections."""

    def __init__(self) -> None:
        self._team: Team | None = None
        self._left = 0
        self._kind = Kind(stage=None)

    def inject(self, work: Path, chance: random.Random) -> None:
        if self._left == 0 or self._team is None or not self._team.alive:
            self.close()
            self._kind, self._left = kind_of(chance), 8
            self._folder = work.with_name(f"{work.name}-engine")
            self._folder.mkdir()
            self._team = Team(
                Poisoned, str(self._folder), self._kind, world_size=self._kind.world_size
            )
        self._left -= 1
        place, policy = chance.choice(PLACES), chance.choice(POLICIES)
        try:
            self._team.ask("attack", place, policy, chance.random(), seconds=240)
        except Found as found:
            self.close()
            raise Found(found.kind, f"{self._kind}: {place}, {policy}: {found}") from found

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._team = None
