"""Training checks that the model's weights are still those that the optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backend.host.test_hidden import Web, begin, loss_of
from tests.support.ranks import ranks, run_ranks
from zerotune.errors import EngineError

pytestmark = pytest.mark.deepspeed

PLAIN = None
"""Stands for the plain engine in place of a ZeRO stage."""


def trained_on(stage: int | None, what: str) -> str | None:
    """Return the error of a run whose model is changed after the third step."""
    from zerotune.errors import EngineError

    engine = begin(stage, Web(), hidden=False)
    try:
        for step in range(20):
            if step == 3:
                tampered(engine.module, what)
            engine.backward(loss_of(engine, step))
            engine.step()
    except EngineError as error:
        return str(error)
    finally:
        engine.close()
    return None


def tampered(module: Any, what: str) -> None:
    match what:
        case "unfreeze":
            module.frozen.requires_grad_(True)
        case "add":
            module.adapter = torch.nn.Linear(2, 2)
        case "write":
            for parameter in module.parameters():
                with torch.no_grad():
                    getattr(parameter, "ds_tensor", parameter).mul_(1.25)


@pytest.mark.parametrize(
    ("stage", "what", "key"),
    [
        (PLAIN, "unfreeze", "model.frozen.weight"),
        (3, "unfreeze", "model.frozen.weight"),
        (2, "add", "adapter"),
    ],
)
def test_a_parameter_that_is_not_trained_is_named(stage, what, key):
    (error,) = run_ranks(trained_on, stage, what)
    assert key in error
    assert "would not be trained" in error


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_written_by_the_user_end_the_run(stage):
    (error,) = run_ranks(trained_on, stage, "write")
    assert "differ from the optimizer's master weights" in error
    assert "master weight" in error


@pytest.mark.parametrize("stage", [2, 3])
@ranks(1)
def test_an_edit_that_stops_early_leaves_model_and_masters_equal(stage):
    engine = begin(stage, Web(), hidden=False)
    with engine.master_weights.editing() as fragments:
        next(fragments).value.mul_(1.5)
    for sample in range(60):
        engine.master_weights.check_model(sample)
    engine.close()


@ranks(1)
def test_a_memory_format_that_deepspeed_cannot_train_is_named():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(8, 3, 3, padding=1)
    )
    engine = begin(2, model, hidden=False)
    engine.module.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, dtype=engine.dtype)
    with pytest.raises(EngineError, match=r"(?s)0\.weight.*contiguous_format"):
        engine.backward(engine(x).float().square().mean())
    engine.close()


@pytest.mark.parametrize("stage", [PLAIN, 2, 3])
@ranks(1)
def test_after_a_failed_backward_pass_the_run_continues_or_raises_a_clear_error(stage):
    from zerotune.errors import EngineError

    engine = begin(stage, Web(), hidden=False)
    engine.backward(loss_of(engine, 0))
    engine.step()
    loss = loss_of(engine, 1)
    hook = engine.module.twice.weight.register_hook(lambda _: 1 / 0)
    try:
        engine.backward(loss)
    except ZeroDivisionError:
        hook.remove()
    said = []
    for go_on in (engine.discard, lambda: loss_of(engine, 2)):
        try:
            go_on()
            said.append("went on")
        except EngineError as error:
            said.append(str(error))
    engine.close()
    dropped = said[0]
    then = said[1]
    if stage == PLAIN:
        assert (dropped, then) == ("went on", "went on")
        return
    for said in (dropped, then):
        assert "ZeroDivisionError" in said
        assert "last checkpoint" in said
