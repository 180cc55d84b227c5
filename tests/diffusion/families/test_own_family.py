"""The family of docs/families.md trains, samples and exports exactly as printed there."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, OvisImagePipeline

from tests.diffusion.families.own_family import (
    PROMPTS,
    family_of_the_page,
    train_and_draw,
)
from tests.support import own_pipeline
from tests.support.declared_pipelines import ovis_image
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, start
from zerotune.checkpoint import export_pipeline
from zerotune.diffusion import load_pretrained, sample
from zerotune.diffusion.known_families import FAMILIES
from zerotune.errors import InvalidValueError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ovis_image(tmp_path_factory.mktemp("ovis"))


def test_texts_and_scheduler_equal_those_of_the_pipeline(folder):
    with pytest.raises(InvalidValueError, match="no known family"):
        load_pretrained(folder)
    loaded = load_pretrained(
        folder, family=family_of_the_page(), frozen_dtype="fp32", max_sequence_length=12
    )
    assert loaded.family.pipeline not in FAMILIES
    assert isinstance(loaded.scheduler, FlowMatchEulerDiscreteScheduler)
    given = loaded.family.encode_texts(PROMPTS)
    pipe = OvisImagePipeline.from_pretrained(folder)
    with torch.no_grad():
        embeds, negative, _, _ = pipe.encode_prompt(
            PROMPTS, negative_prompt=["ugly"] * 2, max_sequence_length=12
        )
    assert torch.equal(given["prompt_embeds"], embeds)
    ours = loaded.family.remembered_negative(["ugly"] * 2, device=torch.device("cpu"))
    torch.testing.assert_close(ours["prompt_embeds"], negative)
    assert loaded.family.text_settings().settings["max_sequence_length"] == 12


@pytest.mark.deepspeed
def test_an_own_family_trains_at_stage_3_and_samples_like_plain_diffusers(folder, tmp_path):
    first, second = run_ranks(train_and_draw, str(folder), str(tmp_path / "out"), world_size=2)
    assert first["held"] == 0, "nothing was partitioned"
    assert first["losses"] != second["losses"]
    drawn_there = torch.from_numpy(first["images"])
    assert torch.equal(drawn_there, torch.from_numpy(second["images"]))
    assert first["moved"] == first["of"]
    pipe = OvisImagePipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    drawn = torch.Generator().manual_seed(1)
    seeds = torch.randint(2**63 - 1, (2,), generator=drawn).tolist()
    images = pipe(
        PROMPTS, num_inference_steps=3, guidance_scale=2.0, height=16, width=16,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        max_sequence_length=12, negative_prompt=[""] * 2, output_type="pt",
    ).images  # fmt: skip
    ours = (drawn_there / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(ours, images, rtol=0, atol=3e-6)
    assert images.std() > 0.01


@ranks(1)
def test_a_users_own_pipeline_trains_samples_and_exports(tmp_path):
    folder = own_pipeline.written(tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "BackwardsPipeline"
    with pytest.raises(InvalidValueError, match="declare a family for this pipeline"):
        load_pretrained(folder)
    loaded = load_pretrained(
        folder, family=own_pipeline.Backwards, frozen_dtype="fp32", max_sequence_length=12
    )
    assert type(loaded.model) is own_pipeline.ReversedTransformer
    engine = start(PLAIN, loaded.model)
    images = sample(
        engine, family=loaded.family, prompts=PROMPTS, steps=2, guidance_scale=2.0, size=(16, 16),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    out = export_pipeline(tmp_path / "out", engine=engine, base=loaded.folder)
    engine.close()
    model = own_pipeline.ReversedTransformer.from_pretrained(out, subfolder="transformer")
    parts = loaded.family.parts.pipeline.components
    pipe = own_pipeline.BackwardsPipeline(**{**parts, "transformer": model.eval()})
    pipe.set_progress_bar_config(disable=True)
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(1)).tolist()
    drawn = pipe(
        PROMPTS, num_inference_steps=2, guidance_scale=2.0, height=16, width=16,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        max_sequence_length=12, negative_prompt=[""] * 2, output_type="pt",
    ).images  # fmt: skip
    ours = (images / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(ours, drawn, rtol=0, atol=3e-6)
    texts = loaded.family.encode_texts(["tac a", "a cat"])["prompt_embeds"]
    plain = OvisImagePipeline.encode_prompt(pipe, ["a cat", "tac a"], max_sequence_length=12)[0]
    assert torch.equal(texts, plain)
