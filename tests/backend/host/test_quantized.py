"""Adapters on a streamed quantized base train as on one that stays on the device."""

from __future__ import annotations

import copy
import os
import time
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
    weights_of,
)
from tests.support.needs import needs
from tests.support.ranks import ranks
from zerotune.backend.host.obstacles import why_not_hosted
from zerotune.ema import EMAShadow
from zerotune.plan.context import Streaming
from zerotune.plan.facts import inner_tensors
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

WHY = "it is an extra"
RUN = Run(family="flux", lora=True, steps=4)


def quantized(run: Run, kind: str) -> Any:
    """Build a tiny Flux whose blocks are quantized, with adapters."""
    torch.manual_seed(0)
    model = FAMILIES[run.family][0]()
    blocks = (*model.transformer_blocks, *model.single_transformer_blocks)
    package, _, storage = kind.rpartition(" ")
    if package:
        needs(package, may_lack=WHY)
        model.bfloat16()
    if kind == "cast":
        model.bfloat16().enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    elif package == "torchao":
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        wanted = {"fp8": Float8WeightOnlyConfig, "int8": Int8WeightOnlyConfig}[storage]
        for block in blocks:
            quantize_(block, wanted())
    elif package == "optimum.quanto":
        from optimum import quanto

        for block in blocks:
            quanto.quantize(block, weights={"fp8": quanto.qfloat8, "int8": quanto.qint8}[storage])
            quanto.freeze(block)
    else:
        needs("bitsandbytes", may_lack=WHY)
        _quantize(blocks, kind)
    add_adapters(run, model)
    model.train()
    if run.checkpointing == "on":
        model.enable_gradient_checkpointing()
    return model


def _quantize(blocks: Any, kind: str) -> None:
    import bitsandbytes as bnb

    for block in blocks:
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


UNCLIPPED = attrs.evolve(RUN, clipping=0.0, checkpointing="on")


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (UNCLIPPED, "nf4"),
        (RUN, "fp4"),
        (UNCLIPPED, "int8"),
        (RUN, "int8"),
        (UNCLIPPED, "cast"),
        (RUN, "cast"),
        (UNCLIPPED, "torchao fp8"),
        (RUN, "torchao fp8"),
        (RUN, "torchao int8"),
        (UNCLIPPED, "optimum.quanto fp8"),
        (RUN, "optimum.quanto fp8"),
        (RUN, "optimum.quanto int8"),
    ],
    ids=str,
)
def test_streaming_a_quantized_base_equals_a_resident_one_bit_for_bit(run, kind):
    kept = []
    # DeepSpeed accepts no tensors that wrap others.
    engine = "host" if " " in kind else "deepspeed"
    for streamed in (None, Streaming(window=2)):
        told = {"streamed": streamed, "engine": None if streamed else engine}
        with start(run, quantized(run, kind), **told) as started:
            ema = EMAShadow(decay=0.9).attach(started)
            kept.append(advance(run, started, range(run.steps), ema))
            kept[-1]["contents"] = contents(started, ema)
            if streamed:
                assert started.counts.evicted
                units = [unit for unit in started._units if not unit.resident]
                assert {unit.host.dtype for unit in units} == {torch.uint8}
                streams = {name.rpartition(".")[2] for unit in units for name in names_in(unit)}
                assert SCALES.get(kind.rpartition(" ")[0] or kind, set()) <= streams
    assert not differences(*kept)


def names_in(unit: Any) -> list[str]:
    return [member.name for member in unit.members]


SCALES = {
    "nf4": {"absmax"},
    "fp4": {"absmax"},
    "torchao": {"qdata", "scale"},
    "optimum.quanto": {"_data", "_scale"},
}
"""Names of the tensors that move with the codes of quantized weights."""


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


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao fp8"])
def test_a_deep_copy_of_the_model_can_read_its_streamed_weights(kind):
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


@pytest.mark.parametrize("kind", ["cast", "nf4", "torchao fp8"])
def test_torch_saves_the_weights_of_a_closed_engine(kind, tmp_path):
    model = quantized(RUN, kind)
    with start(RUN, model, streamed=Streaming(window=2)) as engine:
        advance(RUN, engine, range(1))
    stored = weights_of(model)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    # torch knows torchao's classes only by pickle.
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    read = {name: [t for _, t in inner_tensors(saved[name])] for name in stored}
    for name, tensors in stored.items():
        # The state of bitsandbytes' weights contains the codes alone; scales are keys of their own.
        assert all(map(torch.equal, tensors, read[name])), name
        assert read[name], name


@pytest.mark.parametrize("kind", ["cast", "int8", "torchao fp8", "optimum.quanto int8"])
@ranks(2)
def test_weights_of_a_closed_engine_are_private_to_each_rank(kind):
    model, rank = quantized(RUN, kind), int(os.environ["RANK"])
    with start(RUN, model, streamed=Streaming(window=2)) as engine:
        advance(RUN, engine, range(1))
    stored = [tensor for each in model.parameters() for _, tensor in inner_tensors(each)]
    for tensor in stored:
        tensor.data.fill_(rank)
    time.sleep(0.2)
    assert all(bool((tensor.float() == rank).all()) for tensor in stored)


class Hidden(torch.nn.Parameter):
    """A weight whose values only its own operators can read, as diffusers' GGUF weights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_that_hide_their_values_are_refused_with_a_reason():
    model = make_model(RUN)
    layer = model.transformer_blocks[0].attn.to_q.base_layer
    layer.weight = Hidden(layer.weight.data, requires_grad=False)
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    resolved = OptimizerResolver().resolve(plan.resolve(streamed=True, world_size=1))
    name = "transformer_blocks.0.attn.to_q.base_layer.weight"
    assert why_not_hosted(resolved, model).startswith(
        f"the values of {name} are hidden in a Hidden"
    )
