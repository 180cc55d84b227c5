"""The plain engine trains weights that lie in memory as channels_last, wherever it steps them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from zerotune.backend import plain
from zerotune.backend.build import build_engine
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError
from zerotune.optim.resolver import OptimizerResolver
from zerotune.plan import ModelFacts
from zerotune.plan.model import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed


def net(*, last: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(2, 8),
        torch.nn.SiLU(),
        torch.nn.Conv2d(8, 3, 3, padding=1),
    )
    return model.to(memory_format=torch.channels_last) if last else model


def begin(
    offload: str = "none", *, apart: bool = False, hidden: bool = False, last: bool = True,
    optimizer: str = "AdamW", stage: int | None = None, **arguments: Any,
) -> Any:  # fmt: skip
    model = net(last=last)
    plan = DeepSpeedPlan.build(
        stage=stage or 0,
        offload=offload,
        precision="fp32",
        micro_batch_size=2,
        gradient_clipping=0.5,
        optimizer={"type": optimizer, "params": {"lr": 2e-3, **arguments}},
    ).resolve(
        model=ModelFacts.from_module(model),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        hidden=hidden,
        deepspeed=stage is not None,
    )
    with pytest.MonkeyPatch.context() as patch:
        # The model as on a device: its weights lie elsewhere than those that are stepped.
        patch.setattr(plain, "_has_memory_of_its_own", lambda _: apart)
        return build_engine(model=model, plan=OptimizerResolver().apply(plan))


def train(engine: Any, ema: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + engine.group.rank)
        x = torch.randn(2, 3, 8, 8, generator=generator)
        x = x.to(memory_format=torch.channels_last).to(engine.dtype)
        loss = (engine(x).float() - 1).square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
        ema.step()
    return losses


def weights(source: Any) -> dict[str, torch.Tensor]:
    return {name: full.clone() for name, full in source.gather()}


def alike(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def compared(optimizer: str, folder: Path) -> None:
    fused = {"fused": True} if optimizer == "AdamW" else {}
    with begin(optimizer=optimizer, **fused) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        losses = train(engine, ema, *range(6))
        expected, averages = weights(engine.master_weights), weights(ema)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, expected[name])
    for number, (apart, hidden) in enumerate(((False, False), (True, False), (True, True))):
        where = {"apart": apart, "hidden": hidden, "optimizer": optimizer}
        with begin("cpu", **where) as engine:
            ema = EMAShadow(decay=0.5).attach(engine)
            found = train(engine, ema, 0, 1, 2)
            # Written by one that lies otherwise than it is read by.
            save_checkpoint(folder / str(number), engine=engine, shadows={"ema": ema})
            found += train(engine, ema, 3, 4, 5)
            assert found == losses, where
            assert alike(weights(engine.master_weights), expected), where
            assert alike(weights(ema), averages), where
            kernel = engine.module[0].weight
            assert torch.equal(kernel, expected["0.weight"])
            assert kernel.is_contiguous(memory_format=torch.channels_last)
        with begin(optimizer=optimizer, **fused) as engine:
            ema = EMAShadow(decay=0.5).attach(engine)
            train(engine, ema, 7)
            load_checkpoint(folder / str(number), engine=engine, shadows={"ema": ema})
            assert train(engine, ema, 3, 4, 5) == losses[3:]
            assert alike(weights(engine.master_weights), expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWBF16States"])
def test_offload_changes_no_bit(optimizer: str, world_size: int, tmp_path: Path) -> None:
    run_ranks(compared, optimizer, tmp_path, world_size=world_size)


def taken_to_deepspeed(folder: Path) -> None:
    with begin() as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        train(engine, ema, 0, 1, 2)
        save_checkpoint(folder, engine=engine)
        expected = weights(engine.master_weights)
        moments = {
            fragment.address.name: {name: each.clone() for name, each in fragment.states.items()}
            for fragment in engine.master_weights.read()
        }
    with begin(stage=2, last=False) as engine:
        load_checkpoint(folder, engine=engine)
        assert alike(weights(engine.master_weights), expected)
        for fragment in engine.master_weights.read():
            theirs = moments[fragment.address.name]
            part = slice(fragment.address.start, fragment.address.stop)
            for name, state in fragment.states.items():
                assert torch.equal(state, theirs[name][part])


def test_a_checkpoint_of_it_continues_under_deepspeed(tmp_path: Path) -> None:
    run_ranks(taken_to_deepspeed, tmp_path / "saved")


def refused() -> list[str]:
    messages = []
    for arguments in ({"optimizer": "Lamb"}, {"stage": 0}, {"stage": 2}):
        with pytest.raises(EngineError) as caught:
            begin(**arguments)
        messages.append(str(caught.value))
    return messages


def test_what_steps_flat_weights_refuses_it_with_the_fix() -> None:
    (messages,) = run_ranks(refused)
    for message in messages:
        assert "0.weight" in message
        assert "contiguous_format" in message
