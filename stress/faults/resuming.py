"""Trainers that resume from checkpoints with a crafted ``extra.trainer``."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.crafted import mutate, sign
from tests.checkpoint.runs import everything
from zerotune import DeepSpeedPlan, EMAShadow, ImageTensors, Trainer
from zerotune.checkpoint import manifest as manifests
from zerotune.errors import ZeroTuneError


def batches() -> list[dict[str, torch.Tensor]]:
    images = torch.arange(12 * 16, dtype=torch.float32).view(12, 1, 4, 4) / 100
    return [{"images": part} for part in images.split(4)]


def loss(engine: Any, batch: Any, generator: torch.Generator) -> torch.Tensor:
    noise = torch.rand(batch["images"].shape, generator=generator)
    return (engine(batch["images"] + noise) - 1).pow(2).mean()


def trainer(data: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model=torch.nn.Conv2d(1, 1, 3, padding=1),
        plan=DeepSpeedPlan.build(
            stage=0, micro_batch_size=4, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}
        ),
        data=data,
        objective=loss,
        ema=EMAShadow(decay=0.9),
        callbacks=[],
        deepspeed=False,
    )


class Resumed:
    """Two trainers, on a dataset and on the user's own batches, and a checkpoint of each."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        data = {
            "dataset": ImageTensors(images=torch.cat([b["images"] for b in batches()])),
            "batches": batches(),
        }
        self.trainers = {name: trainer(given) for name, given in data.items()}
        self._states = {}
        for name, each in self.trainers.items():
            each.fit(steps=2)
            each.save(self.root / name)
            each.fit(steps=3)
            self._states[name] = self._now(each)

    def attack(self, way: str, seed: Any) -> tuple[str, str]:
        """Implement ``tests.checkpoint.crafted.Attacked.attack``."""
        assert way == "trainer"
        chance = random.Random(seed)
        name = chance.choice(sorted(self.trainers))
        each, folder = self.trainers[name], self.root / "crafted"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / name, folder)
        content = json.loads((folder / manifests.MANIFEST).read_text())
        mutate(
            content["extra"] if chance.randrange(8) == 0 else content["extra"]["trainer"], chance
        )
        sign(folder, content)
        try:
            each.resume(folder)
        except ZeroTuneError as error:
            outcome, said = "refused", f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - what the campaign looks for
            outcome, said = "foreign", f"{type(error).__name__}: {error}"
        else:
            return self._went_on(each, name)
        if not self.unchanged(name):
            each.resume(self.root / name)
            each.fit(steps=3)
            if outcome == "refused":
                outcome = "changed"
        return outcome, f"{said} ({json.dumps(content['extra'])[:300]})"

    def unchanged(self, name: str) -> bool:
        """Return whether a trainer is unchanged since its third step."""
        return self._now(self.trainers[name]) == self._states[name]

    def _went_on(self, each: Trainer, name: str) -> tuple[str, str]:
        """Check that training continues from an accepted checkpoint."""
        try:
            each.fit(steps=3)
        except Exception as error:  # noqa: BLE001 - it was not refused, so it must work
            outcome = "foreign", f"resumed, and then {type(error).__name__}: {error}"
        else:
            outcome = "loaded", ""
        each.resume(self.root / name)
        each.fit(steps=3)
        self._states[name] = self._now(each)
        return outcome

    @staticmethod
    def _now(each: Trainer) -> dict[str, Any]:
        found = everything(each.engine, each.emas.shadows["ema"])
        found["random"] = each._generator.get_state().tolist()
        found["data"] = None if each.stream is None else each.stream.state_dict()
        return found
