"""Blocks that stage 3 fetches as a whole, on the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diffusion.test_activations import inputs, text_unet
from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.backend.deepspeed.leaf_modules import LEAF_KEY as KEY
from zerotune.backend.deepspeed.leaf_modules import leaf_modules
from zerotune.errors import EngineError

OFF = ("leaf_module", {"classes": []})
PARTITIONED = ("stage3_param_persistence_threshold", 0)


def twice(*overrides: tuple[str, Any]) -> tuple[list[float], int, list[str]]:
    """Train on two calls per step, in which recomputation runs the hooks once more."""
    model = text_unet()
    model.enable_gradient_checkpointing()
    engine = start(Case(stage=3, overrides=(PARTITIONED, *overrides), lr=1e-2), model)
    assert all(p.numel() == 0 for p in model.parameters())
    losses, said = [], [d.severity for d in engine.decisions if d.key == KEY]
    for _ in range(3):
        called = inputs(model)
        first = engine(**called, return_dict=False)[0].float()
        called["timestep"] = called["timestep"] + 1
        second = engine(**called, return_dict=False)[0].float()
        loss = (first + 2 * second).pow(2).mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    leaves = len(leaf_modules(model))
    engine.close()
    return losses, leaves, said


@pytest.mark.deepspeed
@ranks(1)
def test_leaf_modules_may_be_called_twice_before_one_backward_pass() -> None:
    (ours, leaves, said), (layerwise, none, _) = twice(), twice(OFF)
    assert (leaves, none, said) == (18, 0, ["note"])
    assert ours == layerwise
    assert ours[-1] < ours[0]


@pytest.mark.deepspeed
@ranks(1)
def test_an_error_names_the_leaf_modules_that_the_plan_requests() -> None:
    with pytest.raises(
        EngineError, match=r"(?s)leaf_module\.classes = \['Transformer2DModel'\].*an empty list"
    ):
        twice(("leaf_module", {"classes": ["Transformer2DModel"]}))
