"""A text's embedding does not depend on the other texts in its batch."""

from __future__ import annotations

import pytest
import torch
from diffusers import CogView4Pipeline
from PIL import Image

from tests.support import declared_pipelines
from tests.support.sampling import sampled
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, BucketStream, ImageFolder, PreparedImages
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.probe import probe_texts
from zerotune.errors import DataError

SHORT, LONG = "a cat", "a cat on the wall of a large house in the sun"


class CogView4(PipelineFamily):
    """CogView4, declared as a user would."""

    pipeline = "CogView4Pipeline"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return declared_pipelines.cogview4(tmp_path_factory.mktemp("cogview4"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_pretrained(folder, family=CogView4, frozen_dtype="fp32")


@pytest.mark.parametrize("name", sampled(declared_pipelines.MAKERS, ("qwen-image", "hidream")))
def test_declared_families_encode_texts_in_a_batch_as_one_by_one(name, folders):
    family = load_pretrained(folders[name], frozen_dtype="fp32").family
    assert probe_texts(family) == (family, ())


def test_a_pipeline_that_pads_to_the_longest_text_encodes_texts_one_by_one(folder, loaded):
    alone, warning = loaded.decisions
    assert (alone.key, alone.after) == ("family.texts_alone", True)
    assert warning.severity == "warning"
    assert (
        "without a mask (prompt_embeds); train with train_micro_batch_size_per_gpu=1"
        in warning.reason
    )
    pipe = CogView4Pipeline.from_pretrained(folder)
    with torch.no_grad():
        expected, _ = pipe.encode_prompt(["a dog"], do_classifier_free_guidance=False)
        with_others = loaded.family.encode_texts(["a dog", "a cat"])["prompt_embeds"]
    assert torch.equal(with_others[:1], expected)
    assert loaded.family.text_settings().settings["texts_alone"] is True
    without = load_pretrained(folder, family=CogView4, parts=False)
    assert without.decisions == ()


def test_a_cached_embedding_equals_that_of_the_text_alone(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "sizes"))
    root = tmp_path / "images"
    root.mkdir()
    for number, text in enumerate([SHORT, LONG, SHORT]):
        Image.new("RGB", (64, 64), (80 * number, 0, 0)).save(root / f"{number}.png")
        (root / f"{number}.txt").write_text(text)
    images = PreparedImages(ImageFolder(root), buckets=AspectBuckets(area=64 * 64, step=64))
    cached = encode_dataset(images, family=loaded.family, folder=tmp_path / "cache", progress=False)
    for index, text in enumerate([SHORT, LONG, SHORT]):
        expected = loaded.family.encode_texts([text])["prompt_embeds"][0]
        assert torch.equal(cached[index]["prompt_embeds"], expected)
    stream = BucketStream(cached, micro_batch_size=3)
    with pytest.raises(DataError, match=r"prompt_embeds.*train_micro_batch_size_per_gpu to 1"):
        next(stream)
    single = BucketStream(cached, micro_batch_size=1)
    loss = loaded.objective()(loaded.model, next(single), torch.Generator().manual_seed(0))
    assert torch.isfinite(loss)
