"""Training on edits with several references: cached, sharded, validated, stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

from tests.diffusion.families.test_references import AREA, folder_of_edits
from tests.support.declared_pipelines import without_videos
from tests.support.ranks import run_ranks
from zerotune import DeepSpeedPlan, Trainer, latest_checkpoint
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, ImageFolder, PreparedImages
from zerotune.training import SaveEvery, ValidationImages

COUNTS = (1, 2, 2, 1, 2)


def train(base, edits, stage, starts):
    """Return the losses of each start; a start in a used folder resumes there."""
    torch.set_num_threads(1)
    without_videos()
    small = {"reference_area": AREA} if "qwen" in base else {}
    plan = DeepSpeedPlan.build(
        stage=stage, offload="cpu", precision="fp32", micro_batch_size=2, lr=1e-3
    )
    images = PreparedImages(ImageFolder(edits), buckets=AspectBuckets(area=256, step=16))
    losses = []
    for output, steps in starts:
        folder = Path(output)
        loaded = load_pretrained(base, plan=plan, frozen_dtype="fp32", **small)
        data = encode_dataset(
            images, family=loaded.family, folder=folder.parent / "cache", progress=False
        )
        drawing = ValidationImages(
            every=3, prompts=["put it there"], references=images[1]["reference_images"][None],
            size=(16, 16), steps=1, folder=folder / "validation",
        )  # fmt: skip
        saving = SaveEvery(steps=2, root=folder / "checkpoints")
        with Trainer(model=loaded, data=data, callbacks=[saving, drawing]) as trainer:
            if checkpoint := latest_checkpoint(folder / "checkpoints"):
                trainer.resume(checkpoint)
            losses.append(list(trainer.fit(steps=steps).losses))
            trainer.export(folder / "pipeline")
    return losses


SAMPLE = ("qwen-image-edit-plus", 3, 2)
# Each pair of a family, a stage and a number of processes.
RUNS = [("qwen-image-edit-plus", 2, 1), ("flux2", 3, 1), ("flux2", 2, 2)]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("name", "stage", "world_size"),
    [SAMPLE, *(pytest.param(*run, marks=pytest.mark.nightly) for run in RUNS)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(folders, tmp_path, name, stage, world_size):
    edits = str(folder_of_edits(tmp_path / "edits", COUNTS))
    base, stopped, whole = str(folders[name]), str(tmp_path / "stopped"), str(tmp_path / "whole")
    starts = [(whole, 3), (stopped, 2), (stopped, 3)]
    for losses in run_ranks(train, base, edits, stage, starts, world_size=world_size):
        at_once, before, after = losses
        assert before + after == at_once
        assert len(set(at_once)) == 3
    assert len(list((tmp_path / "whole" / "validation").glob("*.png"))) == 2
    trained, again, old = (
        diffusers.DiffusionPipeline.from_pretrained(folder).transformer.state_dict()
        for folder in (f"{whole}/pipeline", f"{stopped}/pipeline", base)
    )
    assert all(torch.equal(value, again[key]) for key, value in trained.items())
    assert any(not torch.equal(value, old[key]) for key, value in trained.items())
