"""Swap buffers suffice for every family's real shapes, whatever the passes recompute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.backend.deepspeed.gathering import Found, gathered_at_once
from tests.support.needs import needs
from tests.support.ranks import run_ranks
from tools.families import CONFIGURATIONS, EDITING
from zerotune.diffusion.facts import _captured_inputs, example_inputs
from zerotune.diffusion.models import declared

needs("peft")

SIDE = 256
SAMPLE = {("sd15", "adapters")}
"""Adapters in recomputed blocks: the rest is nightly."""
PASSES = ("recomputed", "kept", "reentrant", "adapters")


def recompute(module: Any, *args: Any) -> Any:
    return checkpoint(module, *args, use_reentrant=True)


def count(name: str, passes: str, *, mended: bool = True) -> Found:
    """Build a published model without data, and count what its passes gather."""
    import diffusers
    from peft import LoraConfig, inject_adapter_in_model

    config, _ = CONFIGURATIONS[name]
    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    make = example_inputs(model)
    if name in EDITING:
        make = _captured_inputs(getattr(declared, EDITING[name]), model)
    if passes == "adapters":
        model.requires_grad_(False)
        lora = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
        inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    if passes in ("recomputed", "adapters"):
        model.enable_gradient_checkpointing()
    elif passes == "reentrant":
        model.enable_gradient_checkpointing(recompute)
    model.to(torch.bfloat16).train()
    return gathered_at_once(model, partial(make, 1, SIDE, SIDE), mended=mended)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        pytest.param(name, passes, marks=() if (name, passes) in SAMPLE else pytest.mark.nightly)
        for name in CONFIGURATIONS
        for passes in PASSES
    ],
)
def test_a_family_gathers_no_more_weights_at_once_than_its_plan_has_buffers(name, passes):
    (found,) = run_ranks(count, name, passes, timeout_s=1200)
    assert found.most <= found.expected
    assert found.elements <= found.expected_elements
    # For each pass once; frozen weights that no gradient flows through, for the forward pass only.
    assert found.gathers <= 2
    assert found.left == 0


@pytest.mark.nightly
@pytest.mark.deepspeed
def test_deepspeed_alone_keeps_every_text_projection_gathered():
    (found,) = run_ranks(partial(count, "sd15", "kept", mended=False))
    # Six of the 16 blocks have text projections of at least 1 MiB.
    assert found.left == 2 * 6
    assert found.most > found.expected
