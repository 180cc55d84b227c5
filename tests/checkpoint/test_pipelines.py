"""A pipeline with the trained model in it, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.exporting import unet
from tests.checkpoint.refusals import told
from tests.support.ranks import run_ranks
from tests.support.runs import Case, start, unet_loss
from zerotune.checkpoint import export_pipeline


def exported(root: str) -> dict[str, Any]:
    from diffusers import DDPMPipeline, DDPMScheduler

    folder, base = Path(root), Path(root) / "base"
    engine = start(Case(stage=3), unet())
    if engine.group.is_main:
        DDPMPipeline(unet=unet(seed=1), scheduler=DDPMScheduler()).save_pretrained(base)
    engine.group.barrier("the base is there")
    target = folder / "exported"
    for step in range(2):  # The second takes the place of the first.
        engine.backward(unet_loss(engine, step))
        engine.step()
        export_pipeline(target, engine=engine, base=base)
    trained = dict(engine.master_weights.gather())
    errors = {
        "taken": told(lambda: export_pipeline(base, engine=engine, base=target)),
        "itself": told(lambda: export_pipeline(base, engine=engine, base=base)),
        "other": told(
            lambda: export_pipeline(folder / "x", engine=engine, base=base, component="vae")
        ),
        "none": told(lambda: export_pipeline(folder / "x", engine=engine, base=folder)),
    }
    engine.close()
    loaded = DDPMPipeline.from_pretrained(target)
    state = loaded.unet.state_dict()
    return {
        "same": all(torch.equal(state[name], tensor) for name, tensor in trained.items()),
        "parts": sorted(path.name for path in target.iterdir()),
        "left": sorted(path.name for path in folder.iterdir()),
        "index": json.loads((target / "model_index.json").read_text())["_class_name"],
        "scheduler": type(loaded.scheduler).__name__,
        "errors": errors,
    }


def test_a_pipeline_has_the_trained_model_and_the_rest_of_the_old(tmp_path):
    for found in run_ranks(exported, str(tmp_path), world_size=2):
        assert found["same"]
        assert found["parts"] == ["model_index.json", "scheduler", "unet"]
        assert found["left"] == ["base", "exported"]
        assert found["index"] == "DDPMPipeline"
        assert found["scheduler"] == "DDPMScheduler"
        assert "exists and is not replaced" in found["errors"]["taken"]
        assert "the export is made from it" in found["errors"]["itself"]
        assert found["errors"]["other"].startswith("CheckpointMismatchError: component = 'vae'")
        assert "not the folder of a diffusers pipeline" in found["errors"]["none"]
