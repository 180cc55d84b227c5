"""Streamed weights train every family's tiny model to the same bits as ZeRO-2 with CPU offload.

``tests/backend/host/test_parity`` has a sample for the default suite, and all combinations.
"""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import contents, delays, differences
from tests.diffusion.families.training import EXPERTS, LR, MICRO, Variant, example
from tests.support import declared_pipelines, pipelines
from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.diffusion import load_pretrained
from zerotune.diffusion.lora import LoRA, add_lora
from zerotune.ema import EMAShadow
from zerotune.plan.context import Streaming

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly, ranks(1, timeout_s=900)]

NAMES = [*pipelines.MAKERS, *declared_pipelines.MAKERS, *declared_pipelines.EXPERTS]
RUNS = [
    (Variant(), 0.5, 1),
    (Variant(checkpointing=True), 0.0, 1),
    (Variant(checkpointing=True), 0.0, 2),
    (Variant(lora=True), 0.0, 1),
    (Variant(lora=True, checkpointing=True), 0.5, 2),
]
"""Variant, gradient clipping, accumulation steps."""
STEPS = 20
UNITS = {"aura-flow": ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")}
"""Block classes of families for which diffusers lists none, in tiny models with one block of
each."""


def train(loaded: Any, variant: Variant, case: Case) -> dict[str, Any]:
    model, family = copy.deepcopy(loaded.model), loaded.family
    if variant.lora:
        torch.manual_seed(5)
        add_lora(model, LoRA(rank=4, targets=family.lora_targets))
    if variant.checkpointing:
        model.enable_gradient_checkpointing()
    objective, losses, norms = loaded.objective(), [], []
    engine = start(case, model)
    ema = EMAShadow(decay=0.9).attach(engine)
    for step in range(STEPS):
        for share in range(case.accumulation):
            data = example(family, model, step, share)
            loss = objective(engine, data, torch.Generator().manual_seed(7 * step + share))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            outcome = engine.step()
        norms.append(outcome.grad_norm)
        ema.step()
    kept = {"losses": losses, "norms": norms, "contents": contents(engine, ema)}
    kept["engine"] = type(engine).__name__
    engine.close()
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_streamed_training_equals_zero_2_bit_for_bit_for_every_family(folders, name):
    loaded = load_pretrained(str(folders[name]), parts=False, family=EXPERTS.get(name))
    streamed = Streaming(window=2, gradient_buffers=1, units=UNITS.get(name, ()))
    for variant, clipping, accumulation in RUNS:
        if variant.lora and name.startswith("pixart"):
            # diffusers cannot load adapters into PixArt's transformer.
            continue
        case = Case(
            stage=2, offload="cpu", precision="bf16", clipping=clipping, lr=LR, micro_batch=MICRO,
            accumulation=accumulation,
        )  # fmt: skip
        theirs = train(loaded, variant, case)
        with delays(len(name)):
            mine = train(loaded, variant, attrs.evolve(case, streamed=streamed))
        assert (theirs["engine"], mine["engine"]) == ("DeepSpeedEngine", "HostEngine")
        assert not differences(theirs, mine), str(variant)
