"""Blocks of a model, and stage 3's settings for them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.support.needs import needs
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.facts import BlockFacts
from zerotune.plan.families import family
from zerotune.plan.resolve.sizes import leaf_blocks, max_live, prefetch_bucket
from zerotune.platform import Platform

CUDA = Platform.synthetic("cuda")
UNET = attrs.evolve(
    ModelFacts.from_shapes([(f"w{i}", (1000, 1000)) for i in range(100)]),
    blocks=(
        BlockFacts(class_name="BasicTransformerBlock", count=10, numel=4_000_000),
        BlockFacts(class_name="FluxTransformerBlock", count=10, numel=5_000_000),
        BlockFacts(class_name="ResnetBlock2D", count=20, numel=2_000_000),
    ),
)


def zero(model: ModelFacts | None = UNET, **plan: Any) -> Any:
    built = DeepSpeedPlan.build(**{"stage": 3, "precision": "bf16", **plan})
    return built.resolve(platform=CUDA, model=model)


def test_stage_3_fetches_known_blocks_as_a_whole() -> None:
    resolved = zero()
    section = resolved.to_deepspeed()["zero_optimization"]
    assert section["leaf_module"] == {"classes": ["BasicTransformerBlock", "ResnetBlock2D"]}
    assert section["stage3_prefetch_bucket_size"] == 4_000_000
    assert section["stage3_max_live_parameters"] == 8_000_000
    (decision,) = [d for d in resolved.decisions if d.key == "zero_optimization.leaf_module"]
    assert "30 blocks" in decision.reason


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (None, {}),
        (attrs.evolve(UNET, blocks=()), {}),
        (UNET, {"stage": 2}),
        (UNET, {"offload": "nvme", "offload_param": "nvme", "nvme_path": "/swap"}),
        (
            attrs.evolve(
                UNET,
                parameters=[
                    attrs.evolve(UNET.parameters[0], trainable=False),
                    *UNET.parameters[1:],
                ],
            ),
            {},
        ),
    ],
    ids=["no model", "no blocks", "stage 2", "parameters on NVMe", "frozen parameters"],
)
def test_other_plans_set_no_leaf_modules(model: Any, plan: dict[str, Any]) -> None:
    assert "leaf_module" not in zero(model, **plan).to_deepspeed()["zero_optimization"]


@pytest.mark.parametrize("classes", [[], ["Linear"]])
def test_explicit_leaf_modules_are_kept(classes: list[str]) -> None:
    resolved = zero(leaf_module={"classes": classes})
    assert resolved.to_deepspeed()["zero_optimization"]["leaf_module"] == {"classes": classes}
    assert not [d for d in resolved.decisions if d.key == "zero_optimization.leaf_module"]


def test_blocks_too_large_to_prefetch_are_not_leaf_modules() -> None:
    large = attrs.evolve(
        UNET, blocks=(BlockFacts(class_name="ResnetBlock2D", count=1, numel=60_000_001),)
    )
    assert leaf_blocks(large) == ()
    assert prefetch_bucket(large) == 60_000_000
    assert max_live(large) == 100_000_000


def test_sdxl_has_70_transformer_and_17_resnet_blocks_all_leaves() -> None:
    blocks = {block.class_name: block for block in family("sdxl").blocks}
    assert blocks["BasicTransformerBlock"].count == 70
    assert blocks["ResnetBlock2D"].count == 17
    assert leaf_blocks(family("sdxl")) == tuple(family("sdxl").blocks)


def test_the_innermost_blocks_are_found_in_a_module() -> None:
    torch = needs("torch", may_lack="blocks of modules are asked of modules")
    diffusers = needs("diffusers", may_lack="blocks of modules are asked of modules")

    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
            cross_attention_dim=12,
        )
    blocks = {block.class_name: block for block in ModelFacts.from_module(model).blocks}
    assert set(blocks) == {"BasicTransformerBlock", "ResnetBlock2D"}
    assert blocks["ResnetBlock2D"].count == 8
    resnets = [m for m in model.modules() if type(m).__name__ == "ResnetBlock2D"]
    largest = max(sum(p.numel() for p in m.parameters()) for m in resnets)
    assert blocks["ResnetBlock2D"].numel == largest
