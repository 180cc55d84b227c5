"""Exported pipelines contain the trained model, complete or not at all."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.checkpoint.exporting import unet
from tests.checkpoint.refusals import told
from tests.support.ranks import ranks
from tests.support.runs import Case, start, unet_loss
from zerotune.checkpoint import export_pipeline
from zerotune.ema import EMAShadow, EMAShadows


@ranks(2)
def test_an_export_accepts_the_names_of_emas(tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler

    folder, base = tmp_path, tmp_path / "base"
    engine = start(Case(stage=2), unet())
    if engine.group.is_main:
        DDPMPipeline(unet=unet(seed=1), scheduler=DDPMScheduler()).save_pretrained(base)
    engine.group.barrier("the base is there")
    single = EMAShadow(decay=0.5).attach(engine)
    several = EMAShadows(shadows={"slow": EMAShadow(decay=0.9)}).attach(engine)
    for step in range(3):
        engine.backward(unet_loss(engine, step))
        engine.step()
        single.step()
        several.step()
    expected = {"trained": engine.master_weights, "ema": single, "slow": several["slow"]}
    same = {}
    for name, weights in expected.items():
        target = folder / f"exported-{name}"
        export_pipeline(target, engine=engine, base=base, weights=name)
        state = DDPMPipeline.from_pretrained(target).unet.state_dict()
        same[name] = all(torch.equal(state[key], full) for key, full in weights.gather())

    def refusal(weights: Any) -> str:
        return told(
            lambda: export_pipeline(folder / "x", engine=engine, base=base, weights=weights)
        )

    errors = {"unknown": refusal("fast"), "several": refusal(several)}
    another = EMAShadow(decay=0.7).attach(engine)
    errors["twice"] = refusal(another.name)
    del another, single, weights, expected
    errors["gone"] = refusal("ema")
    engine.close()
    assert same == {"trained": True, "ema": True, "slow": True}
    assert errors["unknown"] == (
        "InvalidValueError: weights = 'fast': no EMA with this name is attached to the engine. "
        "Fix: use one of 'trained', 'ema', 'slow', or pass an attached EMAShadow."
    )
    assert "weights = 'EMAShadows': no EMA with this name" in errors["several"]
    assert "weights = 'ema': 2 EMAs with this name" in errors["twice"]
    assert "one of 'trained', 'slow'" in errors["gone"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "base",
        "exported-ema",
        "exported-slow",
        "exported-trained",
    ]


@ranks(2)
def test_an_exported_pipeline_has_the_trained_model_and_the_other_parts_of_its_base(tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler

    folder, base = tmp_path, tmp_path / "base"
    engine = start(Case(stage=3), unet())
    if engine.group.is_main:
        DDPMPipeline(unet=unet(seed=1), scheduler=DDPMScheduler()).save_pretrained(base)
    engine.group.barrier("the base is there")
    target = folder / "exported"
    for step in range(2):  # The second export replaces the first.
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
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
    assert sorted(path.name for path in target.iterdir()) == [
        "model_index.json",
        "scheduler",
        "unet",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["base", "exported"]
    assert json.loads((target / "model_index.json").read_text())["_class_name"] == "DDPMPipeline"
    assert type(loaded.scheduler).__name__ == "DDPMScheduler"
    assert "exists and is not replaced" in errors["taken"]
    assert "the export is made from it" in errors["itself"]
    assert errors["other"].startswith("CheckpointMismatchError: component = 'vae'")
    assert "not the folder of a diffusers pipeline" in errors["none"]
