"""Facts of quantized weights: their original shape, and their stored bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.needs import needs
from zerotune.plan import ModelFacts
from zerotune.plan.facts import ParameterFacts, inner_tensors

torch = needs("torch", may_lack="what a plan knows of a model is asked of modules here")


def looking_like(kind, module, values, **told):
    """Return a parameter that looks like a package's; tests with the package use real ones."""
    parameter = torch.nn.Parameter(values, requires_grad=False)
    parameter.__class__ = type(kind, (torch.nn.Parameter,), {"__module__": module, **told})
    return parameter


def facts_of(parameter):
    layer = torch.nn.Module()
    layer.weight = parameter
    (found,) = ModelFacts.from_module(layer).parameters
    return found


def test_bitsandbytes_four_bit_tensors_count_as_full_shaped_weights():
    state = SimpleNamespace(
        quant_type="nf4", shape=torch.Size([64, 32]), absmax=torch.zeros(32), nested=False
    )
    packed = torch.zeros(1024, 1, dtype=torch.uint8)
    facts = facts_of(looking_like("Params4bit", "bitsandbytes.nn", packed, quant_state=state))
    assert (facts.shape, facts.numel, facts.storage) == ((64, 32), 2048, "nf4")
    assert facts.stored_bytes == 1024 + 4 * 32
    assert not facts.trainable
    assert facts.nbytes(2) == facts.nbytes(4) == 1152
    state.nested, state.state2 = True, SimpleNamespace(absmax=torch.zeros(2))
    state.absmax = torch.zeros(32, dtype=torch.uint8)
    facts = facts_of(looking_like("Params4bit", "bitsandbytes.nn", packed, quant_state=state))
    assert facts.stored_bytes == 1024 + 32 + 8
    unpacked = torch.zeros(64, 32)
    raw = looking_like("Params4bit", "bitsandbytes.nn", unpacked, quant_state=None)
    assert facts_of(raw).storage is None


def test_eight_bit_and_gguf_tensors_keep_their_shape_and_count_stored_bytes():
    data = torch.zeros(8, 4, dtype=torch.int8)
    facts = facts_of(looking_like("Int8Params", "bitsandbytes.nn", data, SCB=torch.zeros(8)))
    assert (facts.shape, facts.storage, facts.stored_bytes) == ((8, 4), "int8", 32 + 32)
    data = torch.zeros(8, 34, dtype=torch.uint8)
    told = {"quant_type": SimpleNamespace(name="Q8_0"), "quant_shape": (8, 32)}
    facts = facts_of(looking_like("GGUFParameter", "diffusers.quantizers.gguf", data, **told))
    assert (facts.shape, facts.storage, facts.stored_bytes) == ((8, 32), "gguf-q8_0", 272)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.int8, "int8"), (torch.float8_e4m3fn, "fp8"), (torch.uint8, "int4")],
)
def test_torchao_tensors_keep_shape_and_count_stored_bytes(dtype, storage):
    told = {
        "__tensor_flatten__": lambda _: (["qdata", "scale"], {"block": (1, 4)}),
        "qdata": torch.zeros(8, 4, dtype=dtype),
        "scale": torch.zeros(8, 1, dtype=torch.bfloat16),
    }
    facts = facts_of(looking_like("Int8Tensor", "torchao.quantization", torch.zeros(8, 4), **told))
    assert (facts.shape, facts.storage, facts.stored_bytes) == ((8, 4), storage, 32 + 16)


def test_weights_inside_wrapped_weights_are_counted_and_named():
    told = {"__tensor_flatten__": lambda _: (["qdata", "scale"], {})}
    inner = {"qdata": torch.zeros(8, 4, dtype=torch.int8), "scale": torch.zeros(8, 1)}
    outer = {"qdata": looking_like("Packed", "torchao.dtypes", torch.zeros(8, 4), **told, **inner)}
    weight = looking_like("Outer", "optimum.quanto", torch.zeros(8, 4), **told, **inner | outer)
    names = [name for name, _ in inner_tensors(weight, "to_q.weight")]
    assert names == [f"to_q.weight.{end}" for end in ("qdata.qdata", "qdata.scale", "scale")]
    assert (facts_of(weight).storage, facts_of(weight).stored_bytes) == ("int8", 32 + 32 + 32)


def test_weights_that_are_cast_for_a_layers_forward_pass_count_one_byte_each():
    weight = torch.zeros(8, 4, dtype=torch.float8_e4m3fn)
    facts = facts_of(torch.nn.Parameter(weight, requires_grad=False))
    assert (facts.shape, facts.storage, facts.stored_bytes) == ((8, 4), "fp8", 32)


def test_streamed_units_of_quantized_weights_count_stored_bytes():
    plain = ModelFacts.from_shapes([(f"blocks.{n}.weight", (64, 64)) for n in range(3)])
    for storage, nbytes in (("nf4", 2048 + 256), ("fp8", 4096 + 4 * 64)):
        frozen = [each.quantized(storage) for each in plain.parameters]
        model = ModelFacts(parameters=frozen, units=("blocks.0", "blocks.1"))
        for element in (2, 4):
            found = model.streamed_by(element_bytes=element)
            aligned = -(-nbytes // (256 * element)) * 256
            assert found.frozen == (aligned, aligned)
            assert found.resident_frozen == nbytes // element


def test_weight_bytes_follow_the_storage_of_each_parameter():
    plain = ParameterFacts(name="a.weight", shape=(64, 64))
    model = ModelFacts(
        parameters=[plain, ParameterFacts(name="b.weight", shape=(64, 64)).quantized("nf4")]
    )
    assert model.weight_bytes(2) == 2 * 4096 + 2048 + 256
    assert model.weight_bytes(2, ranks=3) == -(-8192 // 3) + 768
    assert (model.numel, model.quantized_numel, model.largest_quantized) == (8192, 4096, 4096)
    assert model.trainable == (plain,)
    whole = ModelFacts(parameters=[plain])
    assert whole.weight_bytes(4) == 4 * 4096
    assert whole.weight_bytes(4, ranks=3) == 4 * 1366
