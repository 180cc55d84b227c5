from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotune.backend.step.awaited import hold, release


class _Step:
    def wait_for(self, tensor: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            release(tensor)


def _again(change: Any) -> tuple[torch.nn.Parameter, bool]:
    """Hold a parameter twice, with a change in between; also return whether it was known."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    before = hold(weight, name="weight", step=_Step())
    before.step.wait_for(weight)
    change(weight)
    return weight, hold(weight, name="weight", step=_Step(), before=before) is before


def test_an_unchanged_weight_is_held_by_what_was_recorded():
    weight, is_known = _again(lambda weight: weight.data.fill_(3.0))
    assert is_known
    assert weight.tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize(
    "data", [torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3).double()], ids=str
)
def test_replaced_memory_is_not_undone_when_a_weight_is_held_again(data):
    weight, is_known = _again(lambda weight: setattr(weight, "data", data))
    assert not is_known
    assert torch.equal(weight.data, data)


def test_a_weight_that_was_frozen_meanwhile_is_recorded_anew():
    weight, is_known = _again(lambda weight: weight.requires_grad_(False))
    assert not is_known
    assert not weight.requires_grad
