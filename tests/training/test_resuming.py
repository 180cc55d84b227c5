"""Any bad trainer state in a checkpoint raises our error before anything changes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from stress.faults.resuming import Resumed
from tests.checkpoint.crafted import sign
from tests.support.errors import error_of
from tests.support.ranks import ranks, run_ranks
from zerotune import DeepSpeedPlan, Trainer
from zerotune.checkpoint.manifest import MANIFEST
from zerotune.errors import DataError

STRANGE = {
    "no seed": ("dataset", lambda part: part.pop("seed")),
    "no data": ("dataset", lambda part: part.pop("data")),
    "a list": ("dataset", lambda part: part.update(data=[1])),
    "a place without a seed": ("dataset", lambda part: part["data"].pop("seed")),
    "a place before the first": ("dataset", lambda part: part["data"].update(position=-1)),
    "a length that is text": ("dataset", lambda part: part["data"].update(length="\ud800")),
    "other data": ("dataset", lambda part: part["data"].update(length=13)),
    "too many batches": ("batches", lambda part: part["data"].update(batches=10**400)),
    "no batches": ("batches", lambda part: part["data"].update(batches=[[]])),
    "a generator of a few bytes": ("batches", lambda part: part.update(generators=["oHyR"])),
    "a digest that is a number": ("batches", lambda part: part.update(first_batches=3)),
    "no generator": ("batches", lambda part: part.update(generators=[])),
    "a generator that is a number": ("batches", lambda part: part.update(generators=[-1])),
}


def strange(root):
    """Return the error for each state, and whether the trainer is unchanged."""
    resumed, found = Resumed(root), {}
    for name, (kind, change) in STRANGE.items():
        trainer, folder = resumed.trainers[kind], resumed.root / kind
        content = json.loads((folder / MANIFEST).read_text())
        good = json.dumps(content)
        change(content["extra"]["trainer"])
        sign(folder, content)
        found[name] = error_of(lambda t=trainer, f=folder: t.resume(f)), resumed.unchanged(kind)
        sign(folder, json.loads(good))
        trainer.resume(folder)
        trainer.fit(steps=3)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(strange, str(tmp_path_factory.mktemp("strange")))[0]


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_malformed_state_is_refused_and_changes_nothing(found, name):
    said, unchanged = found[name]
    assert said.startswith(("CheckpointCorruptError: extra.trainer", "DataError: ")), said
    assert said.isascii() or "…" in said
    assert unchanged


@pytest.mark.parametrize("seeds", [(None, None), (1, 2)])
@ranks(1)
def test_a_loader_that_draws_another_order_is_refused_on_resume(seeds, tmp_path) -> None:
    plan = DeepSpeedPlan.build(precision="fp32", micro_batch_size=2, optimizer="AdamW", lr=1e-3)
    seen: list[int] = []

    def loss_of(model, batch, generator):
        seen.extend(batch["x"].flatten().int().tolist())
        return model(batch["x"]).sum()

    def trainer(seed: int | None) -> Trainer:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        samples = [{"x": torch.tensor([float(index)])} for index in range(12)]
        return Trainer(
            model=torch.nn.Linear(1, 1),
            plan=plan,
            data=DataLoader(samples, 2, shuffle=True, generator=generator),  # type: ignore[arg-type]
            objective=loss_of,
            deepspeed=False,
        )

    with trainer(seeds[0]) as first:
        first.fit(steps=3)
        first.save(tmp_path / "c")
    with trainer(seeds[1]) as second:
        if seeds[0] != seeds[1]:
            with pytest.raises(DataError, match=r"first batch differs.*manual_seed"):
                second.resume(tmp_path / "c")
            assert second.step == 0
            return
        second.resume(tmp_path / "c")
        second.fit(steps=6)
    assert sorted(seen) == list(range(12))
