"""Base shapes for diffusers models: widths, readouts, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.needs import needs
from zerotune.errors import EngineError

needs("mup")
from examples.recipes.base_shapes import set_base_shapes  # noqa: E402 - which needs mup

BASE = {"block_out_channels": (8, 16)}
DELTA = {"block_out_channels": (16, 32)}


def unet(width: int) -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )


def test_widths_and_the_readout_of_a_unet_are_found() -> None:
    shapes = set_base_shapes(unet(32), base=BASE, delta=DELTA)
    assert shapes.readouts == ("conv_out",)
    assert shapes.width_multipliers["conv_in.weight"] == 4
    assert shapes.width_multipliers["down_blocks.0.resnets.0.conv1.weight"] == 4
    assert shapes.width_multipliers["conv_out.bias"] == 1


def test_a_model_of_the_base_width_is_unchanged() -> None:
    model, plain = unet(8), unet(8)
    set_base_shapes(model, base=BASE, delta=DELTA)
    x = torch.ones(1, 1, 8, 8)
    torch.testing.assert_close(model(x, 3).sample, plain(x, 3).sample)


def test_the_readouts_input_is_divided_by_the_width() -> None:
    model = unet(32)
    set_base_shapes(model, base=BASE, delta=DELTA, rescale=False)
    features = torch.randn(1, 32, 8, 8)
    expected = torch.nn.functional.conv2d(
        features / 4, model.conv_out.weight, model.conv_out.bias, padding=1
    )
    torch.testing.assert_close(model.conv_out(features), expected)


def test_a_base_of_another_depth_is_refused() -> None:
    with pytest.raises(EngineError, match="must have the same parameters"):
        set_base_shapes(unet(16), base={**BASE, "layers_per_block": 2}, delta=DELTA)
