"""Blocks that stage 3 fetches as a whole, on the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diffusion.test_activations import flux, inputs, text_unet
from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.backend.deepspeed.leaf_modules import LEAF_KEY as KEY
from zerotune.backend.deepspeed.leaf_modules import leaf_modules
from zerotune.errors import EngineError

OFF = ("leaf_module", {"classes": []})
PARTITIONED = ("stage3_param_persistence_threshold", 0)


def train(make: Any, checkpointed: bool, *overrides: tuple[str, Any]) -> dict[str, Any]:
    model = make()
    if checkpointed:
        model.enable_gradient_checkpointing()
    engine = start(Case(stage=3, overrides=(PARTITIONED, *overrides), lr=1e-2), model)
    empty = all(p.numel() == 0 for p in model.parameters())
    losses = []
    for _ in range(4):
        loss = engine(**inputs(model), return_dict=False)[0].float().pow(2).mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    found = {
        "losses": losses,
        "leaves": len(leaf_modules(model)),
        "empty": empty,
        "warned": [d.severity for d in engine.decisions if d.key == KEY],
    }
    engine.close()
    return found


@pytest.mark.deepspeed
@ranks(1)
def test_a_unet_trains_the_same_with_leaf_modules() -> None:
    # Use gradient checkpointing, which most users enable and which runs hooks twice.
    ours = train(text_unet, True)
    layerwise = train(text_unet, True, OFF)
    assert ours["empty"]
    assert (ours["leaves"], layerwise["leaves"]) == (18, 0)
    assert ours["losses"] == layerwise["losses"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["warned"] == ["note"]


@pytest.mark.nightly
@pytest.mark.deepspeed
@ranks(1)
def test_leaf_modules_called_with_keyword_arguments_fail() -> None:
    # Because of this error these blocks are not leaf modules by default; once the test fails, they
    # can be.
    model, override = flux(), ("leaf_module", {"classes": ["FluxTransformerBlock"]})
    engine = start(Case(stage=3, overrides=(PARTITIONED, override)), model)
    assert [d.severity for d in engine.decisions if d.key == KEY] == ["warning"]
    loss = engine(**inputs(model), return_dict=False)[0].float().pow(2).mean()
    with pytest.raises(RuntimeError, match="must match"):
        engine.backward(loss)


def twice(make: Any, *overrides: tuple[str, Any]) -> tuple[list[float], int]:
    model = make()
    engine = start(Case(stage=3, overrides=(PARTITIONED, *overrides), lr=1e-2), model)
    losses = []
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
    return losses, leaves


@pytest.mark.deepspeed
@ranks(1)
def test_leaf_modules_may_be_called_twice_before_one_backward_pass() -> None:
    (ours, leaves), (layerwise, none) = twice(text_unet), twice(text_unet, OFF)
    assert (leaves, none) == (18, 0)
    assert ours == layerwise
    assert ours[-1] < ours[0]


@pytest.mark.deepspeed
@ranks(1)
def test_an_error_names_the_leaf_modules_that_the_plan_requests() -> None:
    with pytest.raises(
        EngineError, match=r"(?s)leaf_module\.classes = \['Transformer2DModel'\].*an empty list"
    ):
        twice(text_unet, ("leaf_module", {"classes": ["Transformer2DModel"]}))
