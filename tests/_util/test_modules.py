from __future__ import annotations

import torch

from zerotune._util.modules import ModelParts


def test_parts_of_an_unchanged_model_are_not_listed_again():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    parts = ModelParts(model)
    parts.refresh()
    modules, parameters = parts.modules, parts.parameters
    parts.refresh()
    assert parts.modules is modules
    assert parts.parameters is parameters
    assert modules == [model, *model]
    assert [*map(id, parameters)] == [*map(id, model.parameters())]


def test_replaced_parts_are_found_at_any_depth():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    parts = ModelParts(model)
    parts.refresh()
    model[0][0].bias = torch.nn.Parameter(torch.zeros(2))
    parts.refresh()
    assert any(each is model[0][0].bias for each in parts.parameters)
    model[0][0] = torch.nn.Linear(2, 2)
    parts.refresh()
    assert model[0][0] in parts.modules
    model[0][0].register_parameter("further", torch.nn.Parameter(torch.zeros(1)))
    parts.refresh()
    assert any(each is model[0][0].further for each in parts.parameters)


def test_a_module_that_several_share_is_listed_once():
    shared = torch.nn.Linear(2, 2)
    parts = ModelParts(torch.nn.ModuleList([shared, shared]))
    parts.refresh()
    assert len(parts.modules) == 2
