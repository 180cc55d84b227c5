"""Adapters on a streamed quantized base train as on one that stays on the device."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import (
    FAMILIES,
    Run,
    add_adapters,
    advance,
    contents,
    differences,
    loss_of,
    make_model,
    start,
)
from tests.support.needs import needs
from tests.support.ranks import ranks
from zerotune.backend.host import obstacles
from zerotune.backend.host.obstacles import why_not_hosted
from zerotune.ema import EMAShadow
from zerotune.plan.context import Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

WHY = "it is an extra"
RUN = Run(family="flux", lora=True, steps=4)


def quantized(run: Run, kind: str) -> Any:
    """Build a tiny Flux whose blocks are 4-bit, with adapters."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = FAMILIES[run.family][0]()
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        for part in list(block.modules()):
            for name, child in list(part.named_children()):
                if type(child) is torch.nn.Linear:
                    shape = child.in_features, child.out_features, child.bias is not None
                    if kind == "int8":
                        made = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False)
                    else:
                        made = bnb.nn.Linear4bit(
                            *shape, quant_type=kind, compute_dtype=torch.bfloat16
                        )
                    made.load_state_dict(child.state_dict())
                    setattr(part, name, made.to("cpu"))
    add_adapters(run, model)
    model.train()
    if run.checkpointing == "on":
        model.enable_gradient_checkpointing()
    return model


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (attrs.evolve(RUN, clipping=0.0, checkpointing="on"), "nf4"),
        (RUN, "fp4"),
        (attrs.evolve(RUN, clipping=0.0, checkpointing="on"), "int8"),
        (RUN, "int8"),
    ],
    ids=str,
)
def test_streaming_a_quantized_base_equals_zero_2_bit_for_bit(run, kind):
    needs("bitsandbytes", may_lack=WHY)
    kept = []
    for streamed in (None, Streaming(window=2)):
        with start(run, quantized(run, kind), streamed=streamed) as engine:
            ema = EMAShadow(decay=0.9).attach(engine)
            kept.append(advance(run, engine, range(run.steps), ema))
            kept[-1]["contents"] = contents(engine, ema)
            if streamed:
                assert engine.counts.evicted
                assert {str(unit.host.dtype) for unit in engine._units if not unit.resident} == {
                    "torch.int8" if kind == "int8" else "torch.uint8"
                }
    assert not differences(*kept)


@pytest.mark.parametrize("streamed", [None, Streaming(window=2)], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_validation_between_steps_does_not_change_them(kind, streamed):
    needs("bitsandbytes", may_lack=WHY)
    kept = []
    for validates in (False, True):
        model = quantized(RUN, kind)
        run = attrs.evolve(RUN, evaluate=validates)
        if validates:  # As a preview of the untrained model does.
            with torch.no_grad():
                model(**FAMILIES[RUN.family][1](torch.Generator().manual_seed(1), torch.float32))
        with start(run, model, streamed=streamed) as engine:
            advance(run, engine, range(run.steps))
            kept.append({"contents": contents(engine)})
    assert not differences(*kept)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_deep_copy_of_the_model_can_read_its_streamed_weights(kind):
    needs("bitsandbytes", may_lack=WHY)
    with start(RUN, quantized(RUN, kind), streamed=Streaming(window=2)) as engine:
        advance(RUN, engine, range(1))
        copied = copy.deepcopy(engine.module)

        class Plain:
            dtype = engine.dtype

            def __call__(self, **inputs: Any) -> Any:
                return copied(**inputs)

        # On a CPU bitsandbytes repacks the weights of models that do not train.
        with torch.no_grad():
            assert float(loss_of(RUN, Plain(), 5)) == float(loss_of(RUN, engine, 5))


def test_other_quantized_bases_stay_on_the_device_with_a_reason(monkeypatch):
    facts = ModelFacts.from_module(make_model(RUN))
    frozen = next(each for each in facts.parameters if not each.trainable)
    facts = attrs.evolve(facts, parameters=(frozen.quantized("fp8"), *facts.parameters[1:]))
    monkeypatch.setattr(obstacles.ModelFacts, "from_module", lambda _: facts)
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    resolved = OptimizerResolver().resolve(plan.resolve(streamed=True, world_size=1))
    assert why_not_hosted(resolved, make_model(RUN)) == (
        "a base model in fp8 stays on the device; bitsandbytes' weights "
        "(nf4, fp4, int8) are streamed"
    )
