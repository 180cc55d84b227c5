"""The plain engine trains channels_last weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.backend.plain import PlainEngine
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError
from zerotune.plan.plan import DeepSpeedPlan

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
    offload: str = "none", *, last: bool = True,
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
    )
    return build(model, plan, deepspeed=stage is not None)


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


@pytest.mark.parametrize("optimizer", ["AdamWBF16States"])
@ranks(1)
def test_the_plain_engine_resumes_channels_last_training(optimizer: str, tmp_path: Path) -> None:
    with begin(optimizer=optimizer) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        train(engine, ema, 0, 1, 2)
        # Save with one memory layout and load with another.
        save_checkpoint(tmp_path / "saved", engine=engine, shadows={"ema": ema})
        losses = train(engine, ema, 3, 4, 5)
        expected, averages = weights(engine.master_weights), weights(ema)
    with begin(optimizer=optimizer, last=False) as engine:
        engine.module.to(memory_format=torch.channels_last)
        ema = EMAShadow(decay=0.5).attach(engine)
        train(engine, ema, 7)
        load_checkpoint(tmp_path / "saved", engine=engine, shadows={"ema": ema})
        assert train(engine, ema, 3, 4, 5) == losses
        assert alike(weights(engine.master_weights), expected)
        assert alike(weights(ema), averages)
        assert engine.module[0].weight.is_contiguous(memory_format=torch.channels_last)


@ranks(1)
def test_channels_last_weights_keep_their_optimizer_on_the_device() -> None:
    with begin("cpu") as engine:
        assert isinstance(engine, PlainEngine)
        (said,) = (each for each in engine.decisions if "0.weight" in each.reason)
    assert (said.before, said.after, said.severity) == ("cpu", None, "warning")
    assert "contiguous_format" in said.reason


@ranks(1)
def test_a_channels_last_checkpoint_continues_under_deepspeed(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
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


@ranks(1)
def test_weights_may_move_to_channels_last_and_back() -> None:
    # torch's fused step pairs weights and moments by address, whatever their strides.
    engine = begin(last=False, weight_decay=0.01)
    reference = net(last=False)
    ordinary = torch.optim.AdamW(reference.parameters(), lr=2e-3, foreach=False)
    formats = [torch.contiguous_format, torch.channels_last]
    ema = EMAShadow(decay=0.5).attach(engine)
    for step in range(8):
        engine.backward(engine(torch.ones(2, 3, 8, 8)).mean())
        for parameter, other in zip(
            engine.module.parameters(), reference.parameters(), strict=True
        ):
            generator = torch.Generator().manual_seed(step)
            other.grad = torch.randn(other.shape, generator=generator) * 1e-3
            # Gradients may have another memory format too.
            gradient = other.grad.clone()
            if gradient.dim() == 4 and step % 3 == 0:
                gradient = gradient.contiguous(memory_format=torch.channels_last)
            parameter.grad = gradient
        engine.step()
        ema.step()
        ordinary.step()
        engine.module.to(memory_format=formats[step % 3 == 1])
    for (name, parameter), other in zip(
        engine.module.named_parameters(), reference.parameters(), strict=True
    ):
        # The unfused loop rounds square roots differently.
        torch.testing.assert_close(parameter.data, other.data, rtol=0, atol=1e-6, msg=name)
    engine.close()


@ranks(1)
def test_a_flat_optimizer_refuses_weights_moved_to_channels_last() -> None:
    with begin(optimizer="Lamb", last=False) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        train(engine, ema, 0)
        engine.module.to(memory_format=torch.channels_last)
        with pytest.raises(EngineError) as caught:
            train(engine, ema, 1)
    message = str(caught.value)
    assert "0.weight" in message
    assert "contiguous_format" in message


@ranks(1)
def test_a_flat_optimizer_refuses_channels_last_weights_with_the_fix() -> None:
    messages = []
    for arguments in ({"optimizer": "Lamb"}, {"stage": 0}, {"stage": 2}, {"stage": 3}):
        with pytest.raises(EngineError) as caught:
            begin(**arguments)
        messages.append(str(caught.value))
    for message in messages:
        assert "0.weight" in message
        assert "contiguous_format" in message
