"""Models without weights, and weights in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.memory import Peak, needs_mallinfo
from zerotune.backend import stored
from zerotune.errors import EngineError


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.second = torch.nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        own = torch.nn.Parameter(torch.ones(2))
        self.one, self.other = own, own
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("computed", torch.arange(4.0), persistent=False)


@pytest.fixture
def waiting(tmp_path):
    """Return a tied model whose weights are still in a file, and their values."""
    values = {name: torch.randn_like(parameter) for name, parameter in Tied().named_parameters()}
    save_file(values, tmp_path / "x.safetensors")
    with stored.without_weights():
        model = Tied()
    tensors, _ = stored.read_header(tmp_path / "x.safetensors")
    stamp = stored.stamp_of((tmp_path / "x.safetensors").stat())
    for name, parameter in model.named_parameters():
        stored.leave_in_file(
            parameter,
            stored.StoredWeight(file=tmp_path / "x.safetensors", tensor=tensors[name], stamp=stamp),
        )
    return model, values


def test_reading_weights_keeps_tied_parameters_and_buffer_values(waiting):
    model, values = waiting
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.first.weight is model.second.weight
    assert model.one is model.other
    assert not model.frozen.requires_grad
    assert torch.equal(model.computed, torch.arange(4.0))
    before = [id(parameter) for parameter in model.parameters()]
    assert stored.bring_weights(model) == len(values) == 4
    assert [id(parameter) for parameter in model.parameters()] == before
    assert model.first.weight is model.second.weight
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert model.first.weight.requires_grad
    assert not model.frozen.requires_grad
    assert stored.bring_weights(model) == 0
    assert torch.nn.Module.register_parameter.__name__ == "register_parameter"


def test_a_part_of_a_stored_weight_is_read_and_cast(waiting):
    model, values = waiting
    weight = stored.stored_weight(model.first.weight)
    part = torch.zeros(6, dtype=torch.bfloat16)
    weight.read_into(part, start=7)
    assert torch.equal(part, values["first.weight"].view(-1)[7:13].bfloat16())
    weight.read_into(torch.empty(0), start=15)


@needs_mallinfo
def test_placeholder_weights_take_no_memory():
    with stored.without_weights():
        model = torch.nn.Linear(4096, 4096)
    place = stored.StoredTensor(dtype=torch.float32, shape=(4096, 4096), offset=0)
    for parameter in model.parameters():
        nowhere = stored.StoredWeight(file=Path("x"), tensor=place, stamp=(0, 0))
        stored.leave_in_file(parameter, nowhere)
    with Peak() as peak, stored.standing_in(model):
        assert model.weight.device.type == "cpu"
        assert model.weight.shape == (4096, 4096)
    assert peak.growth < 16
    assert model.weight.is_meta
    assert len(stored.waiting(model)) == 2


def test_a_model_without_weights_or_a_file_is_refused():
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(EngineError, match=r"model\.weight = 'meta': the parameter has neither"):
        stored.check_has_weights(model)
    stored.check_has_weights(torch.nn.Linear(2, 2))


def test_unread_weights_raise_an_error_that_says_how_to_read_them(waiting):
    with pytest.raises(EngineError, match=r"4 of the model's weights.*run\.shard"):
        stored.require_read(waiting[0])
