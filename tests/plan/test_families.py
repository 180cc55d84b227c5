"""Model families known by their shapes."""

from __future__ import annotations

import json

import pytest

from zerotune.errors import InvalidValueError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import (
    as_facts,
    facts_from_json,
    facts_to_json,
    family,
    family_names,
    model_family,
)


def test_the_facts_of_sdxl_equal_the_published_ones():
    facts = family("sdxl")
    assert facts.numel == 2_567_463_684
    assert len(facts.parameters) == 1_680
    assert facts.largest == 29_491_200
    assert facts.trainable_numel == facts.numel


# Published sizes: Flux.1 12 billion, SD3 medium 2, SD3.5 large 8, SD 1.5 0.86,
# Qwen-Image 20, Z-Image 6, Chroma 8.9, Flux.2 dev 32, klein 4 and 9, Krea 2 12.8, Wan 1.3 (with its
# embeddings 1.4) and 14, LTX-Video 2, HunyuanVideo 13, AuraFlow 6.8, HiDream 17, Lumina 2 2.6,
# PixArt 0.6, Sana 1.6.
def test_model_sizes_equal_the_published_ones():
    for name, billions in [
        ("flux", 11.9),
        ("sd3-medium", 2.0),
        ("sd35-large", 8.1),
        ("sd35-medium", 2.2),
        ("sd15", 0.9),
        ("qwen-image", 20.4),
        ("z-image", 6.2),
        ("chroma", 8.9),
        ("flux2", 32.2),
        ("flux2-klein-4b", 3.9),
        ("flux2-klein-9b", 9.1),
        ("krea2", 12.8),
        ("wan-1.3b", 1.4),
        ("wan-14b", 14.3),
        ("ltx-video", 1.9),
        ("hunyuan-video", 12.8),
        ("aura-flow", 6.8),
        ("hidream", 17.1),
        ("lumina2", 2.6),
        ("pixart-sigma", 0.6),
        ("sana", 1.6),
    ]:
        assert round(family(name).numel / 1e9, 1) == billions


def test_the_activations_of_sdxl_agree_with_the_flop_counter():
    # 6.4 GiB at batch 1 and 1024 x 1024 with everything kept; 4.38 + 1.13 GiB at batch 8 with
    # checkpoints and the largest block.
    costs = family("sdxl").activations
    assert costs.full.nbytes(batch=1, pixels=1024**2) / 2**30 == pytest.approx(6.4, rel=0.02)
    assert costs.checkpointed.nbytes(batch=8, pixels=1024**2) / 2**30 == pytest.approx(
        5.51, rel=0.05
    )
    assert costs.full.nbytes(batch=1, pixels=1024**2, element_bytes=4) == pytest.approx(
        2 * costs.full.nbytes(batch=1, pixels=1024**2), abs=2
    )


def test_an_edit_doubles_the_tokens():
    for edited, alone in (("flux-kontext", "flux"), ("qwen-image-edit", "qwen-image")):
        costs = [family(name).activations.full.per_pixel for name in (edited, alone)]
        assert costs[0] == pytest.approx(2 * costs[1], rel=0.01)


def test_every_family_file_is_complete():
    for name in family_names():
        known = model_family(name)
        assert known.facts.name == name
        if known.frames is None:
            assert known.class_name.endswith(("UNet2DConditionModel", "Transformer2DModel"))
            assert known.resolution in (512, 768, 1024)
        else:
            assert known.class_name.endswith("Transformer3DModel")
            assert known.resolution in (608, 640, 960)
            assert (known.frames - 1) % known.facts.frames_per_latent == 0
        assert known.facts.activations.checkpointed is not None
        assert len({parameter.name for parameter in known.facts.parameters}) == len(
            known.facts.parameters
        )


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # Sines of the positions in fp32: side squared times width.
        ("sd3-medium", 4 * 192**2 * 1536), ("sd35-large", 4 * 192**2 * 2432),
        ("sd35-medium", 4 * 384**2 * 1536), ("pixart-sigma", 4 * 64**2 * 1152),
        ("sdxl", 0), ("flux", 0),
    ],
)  # fmt: skip
def test_buffers_are_tables_of_positions(name, nbytes):
    assert family(name).buffers == nbytes


def test_facts_survive_a_file_unchanged():
    facts = family("sd3-medium")
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts)))) == facts


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(InvalidValueError, match=r"family = 'sdxxl'.*did you mean 'sdxl'"):
        family("sdxxl")
    with pytest.raises(InvalidValueError, match="is not a known model family"):
        family("../families/sdxl")


def test_facts_are_accepted_as_an_object_or_by_family_name():
    facts = ModelFacts.from_shapes([("weight", (3, 4))])
    assert as_facts(facts) is facts
    assert as_facts("sdxl") is family("sdxl")
    with pytest.raises(InvalidValueError, match="neither a model nor model facts"):
        as_facts(12)
