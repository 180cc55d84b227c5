"""A trainer follows the advice on activations."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from diffusers import UNet2DModel

from tests.support.models import tiny_unet
from tests.support.ranks import ranks
from zerotune.diffusion import ActivationOffload, ClassConditional, FlowMatchingObjective
from zerotune.diffusion.data import ImageTensors
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.work import ActivationCost, ActivationFacts
from zerotune.platform import Platform
from zerotune.platform.facts import GIB
from zerotune.training import Trainer
from zerotune.training.activations import input_positions, input_size


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "images": torch.randn(2, 1, 8, 8, generator=generator),
            "labels": torch.randint(0, 10, (2,), generator=generator),
        }
        for _ in range(2)
    ]


def advice(model: torch.nn.Module, *, offloaded: bool) -> Any:
    cost = {name: ActivationCost(base=size, per_sample=0.0, per_pixel=0.0)
            for name, size in (("full", 90 * GIB), ("checkpointed", 60 * GIB if offloaded else GIB),
                               ("offloaded", GIB), ("offloaded_host", GIB))}  # fmt: skip
    facts = attrs.evolve(ModelFacts.from_module(model), activations=ActivationFacts(**cost))
    return DeepSpeedPlan.advise(
        facts, resolution=8, batch=2, precision="fp32",
        platform=Platform.synthetic("cuda", vram=24 * GIB, ram=64 * GIB),
    )  # fmt: skip


def train(how: str) -> dict[str, Any]:
    model = tiny_unet()
    offload = ActivationOffload(smallest=0)
    plan: Any = DeepSpeedPlan.build(stage=0, precision="fp32", micro_batch_size=2)
    if how in ("advised offload", "advised checkpointing"):
        plan = advice(model, offloaded=how == "advised offload")
    with Trainer(
        model=model,
        plan=plan,
        data=batches(),
        objective=FlowMatchingObjective(family=ClassConditional()),
        activations=offload if how == "offload" else None,
        callbacks=(),
        deepspeed=False,
        seed=3,
    ) as trainer:
        trainer.fit(steps=2)
        on = model.is_gradient_checkpointing
        keys = {d.key: d.after for d in trainer.decisions}
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    return {
        "weights": weights, "on": on, "after": model.is_gradient_checkpointing,
        "keys": keys, "moved": offload.counts.fetched_ahead,
    }  # fmt: skip


@ranks(1)
def test_following_the_advice_changes_no_result() -> None:
    found = {
        how: train(how) for how in ("plain", "offload", "advised offload", "advised checkpointing")
    }
    assert not found["plain"]["on"]
    for how in ("offload", "advised offload", "advised checkpointing"):
        assert found[how]["on"], how
        assert found[how]["weights"] == found["plain"]["weights"], how
    assert found["offload"]["moved"] > 0
    assert not found["offload"]["after"], "detached with the engine"
    advised = found["advised offload"]["keys"]
    assert advised["gradient checkpointing"] is True
    assert advised["activation offload"] is True
    assert found["advised checkpointing"]["keys"]["activation offload"] is False


@pytest.mark.parametrize(("offloaded", "title"), [(True, "no partitioning"), (False, "no part")])
def test_activations_are_offloaded_before_the_optimizer(offloaded: bool, title: str) -> None:
    found = advice(tiny_unet(), offloaded=offloaded)
    assert found.gradient_checkpointing
    assert found.activation_offload is offloaded
    assert found.chosen.title.startswith(title)
    assert ("activation offload" in found.explain()) is True


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 8), (4, 64)])
def test_images_in_grey_are_pixels_as_coloured_ones_are(channels: int, side: int) -> None:
    config = {**tiny_unet().config, "in_channels": channels, "out_channels": channels}
    model = UNet2DModel.from_config(config)
    images = ImageTensors(images=torch.zeros(4, channels, 8, 8))
    assert input_size(model, images)[0] == (side, side)
    assert input_positions(model, (side, side)) == 64
