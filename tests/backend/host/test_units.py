"""Units: the modules that move to the device as a whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.backend.host.streaming import Run, Web, flux, make_model, qwen, start, unet
from tests.support.ranks import ranks
from zerotune.backend.host.units import FlatOrder, HostMemory, find_units, make_units
from zerotune.errors import EngineError, InvalidValueError
from zerotune.plan.context import Streaming
from zerotune.plan.facts import UNIT_ALIGNED
from zerotune.plan.families import family


def names(model: torch.nn.Module, named: tuple[str, ...] = ()) -> list[str]:
    return [name for name, _ in find_units(model, named)]


def test_units_of_flux_are_the_blocks_of_both_stacks():
    found = names(flux())
    assert found == [
        *(f"transformer_blocks.{i}" for i in range(2)),
        *(f"single_transformer_blocks.{i}" for i in range(3)),
    ]


def test_units_of_qwen_image_are_its_blocks():
    assert names(qwen()) == [f"transformer_blocks.{i}" for i in range(4)]


def test_units_of_a_unet_are_its_transformer_and_residual_blocks():
    model = unet()
    found = find_units(model)
    assert {type(module).__name__ for _, module in found} == {
        "BasicTransformerBlock", "ResnetBlock2D",
    }  # fmt: skip
    parts = [id(part) for _, module in found for part in module.modules()]
    assert len(parts) == len(set(parts))


def test_the_units_of_sdxl_hold_98_percent_of_its_parameters():
    with torch.device("meta"):
        from diffusers import UNet2DConditionModel

        model = UNet2DConditionModel.from_config(dict(SDXL))
    found = find_units(model)
    units = sum(p.numel() for _, module in found for p in module.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert total == family("sdxl").numel
    assert tuple(name for name, _ in found) == family("sdxl").units
    assert len(found) == 87
    assert 1 - units / total < 0.022


SDXL = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip


def test_units_of_other_models_are_consecutive_modules_of_one_class():
    assert names(Web()) == [f"blocks.{i}" for i in range(6)]


def test_torchs_own_layers_are_not_units():
    assert names(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []


def test_units_may_be_named_by_class_or_name_and_the_outermost_wins():
    model = unet()
    assert names(model, ("CrossAttnDownBlock2D", "mid_block")) == ["down_blocks.1", "mid_block"]
    inner = names(model, ("mid_block", "BasicTransformerBlock"))
    assert not any(name.startswith("mid_block.") for name in inner)


def test_a_unit_name_that_matches_nothing_is_refused():
    with pytest.raises(EngineError, match=r"streamed\.units.*Blok"):
        find_units(flux(), ("Blok",))


@pytest.mark.parametrize("window", [1, 0, "3"])
def test_a_window_below_two_is_refused(window):
    with pytest.raises(InvalidValueError, match=r"streamed\.window"):
        Streaming(window=window)


def made(model: torch.nn.Module, trained: bool = True) -> tuple[list, dict]:
    model.to(torch.bfloat16)
    wanted = [n for n, p in model.named_parameters() if p.requires_grad] if trained else []
    return make_units(
        model,
        find_units(model),
        order=FlatOrder([wanted], sizes={n: p.numel() for n, p in model.named_parameters()}),
        device=torch.device("cpu"),
        memory=HostMemory(pin=False),
    )


def test_the_state_of_every_quantized_weight_is_moved_to_the_device():
    model, moved = Web().requires_grad_(False), []
    for name, parameter in model.named_parameters():
        parameter.quant_state = SimpleNamespace(
            absmax=torch.zeros(1),
            nested=False,
            to=lambda _device, name=name: moved.append(name),
        )
    made(model)
    assert moved == [name for name, _ in model.named_parameters()]


def test_every_parameter_has_exactly_one_place_with_its_values():
    model = Web()
    weights = {n: p.detach().bfloat16().clone() for n, p in model.named_parameters()}
    units, _ = made(model)
    members = [(unit, member) for unit in units for member in unit.members]
    assert sorted(member.name for _, member in members) == sorted(weights)
    for unit, member in members:
        assert torch.equal(member.within(unit.host), weights[member.name])
        assert member.span.start % UNIT_ALIGNED == 0


def test_a_tied_weight_belongs_to_one_unit_and_both_modules_need_it():
    model = Web()
    units, needs = made(model)
    first = next(unit for unit in units if unit.name == "blocks.1")
    assert first in needs[model.blocks[4]]
    assert len(needs[model.blocks[4]]) == 2


def test_a_weight_shared_with_a_module_outside_the_units_stays_on_the_device():
    model = Web()
    model.extra = torch.nn.Linear(30, 60)
    model.extra.weight = model.blocks[2].a.weight
    units, needs = made(model)
    (rest,) = (unit for unit in units if unit.resident)
    assert "blocks.2.a.weight" in {member.name for member in rest.members}
    assert rest not in needs[model.blocks[2]]


@pytest.mark.deepspeed
@ranks(1)
def test_adapters_stay_on_the_device_and_the_base_is_streamed():
    run = Run(family="web", lora=True)
    with start(run, make_model(run), streamed=True) as engine:
        streamed = [unit for unit in engine._units if not unit.resident]
        assert len(streamed) == 6
        assert not any(unit.slabs for unit in streamed)
        (adapters,) = (unit for unit in engine._units if unit.resident)
        assert all("lora_" in member.name for member in adapters.members)


def test_adapters_are_one_unit_and_large_models_32():
    from zerotune.plan import facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "SMALLEST_UNIT", 2**20)
        found = [facts.resident_units(size) for size in (1, 577_536, 2**21, 10**10)]
    assert found == [1, 1, 2, 32]
