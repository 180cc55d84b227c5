"""The plain engine trains channels_last weights, wherever it steps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.backend import plain
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError
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
    offload: str = "none", *, apart: bool = False, last: bool = True,
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
    with pytest.MonkeyPatch.context() as patch:
        # Keep the model's weights separate from the stepped ones, as on a device.
        patch.setattr(plain, "_has_memory_of_its_own", lambda _: apart)
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWBF16States"])
@ranks()
def test_offload_changes_no_bit_of_channels_last_training(
    optimizer: str, world_size: int, tmp_path: Path
) -> None:
    fused = {"fused": True} if optimizer == "AdamW" else {}
    with begin(optimizer=optimizer, **fused) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        losses = train(engine, ema, *range(6))
        expected, averages = weights(engine.master_weights), weights(ema)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, expected[name])
    for number, apart in enumerate((False, True)):
        where = {"apart": apart, "optimizer": optimizer}
        with begin("cpu", **where) as engine:
            ema = EMAShadow(decay=0.5).attach(engine)
            found = train(engine, ema, 0, 1, 2)
            # Save with one memory layout and load with another.
            save_checkpoint(tmp_path / str(number), engine=engine, shadows={"ema": ema})
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
            load_checkpoint(tmp_path / str(number), engine=engine, shadows={"ema": ema})
            assert train(engine, ema, 3, 4, 5) == losses[3:]
            assert alike(weights(engine.master_weights), expected)


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


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWBF16States"])
@ranks(1)
def test_weights_may_move_to_channels_last_and_back(optimizer: str, offload: str) -> None:
    # torch's fused step pairs weights and moments by address, whatever their strides.
    engine = begin(offload, optimizer=optimizer, last=False, weight_decay=0.01)
    reference = net(last=False)
    ordinary = torch.optim.AdamW(reference.parameters(), lr=2e-3, foreach=False)
    own = type(engine._torch_optimizer)
    if own is not torch.optim.AdamW:
        ordinary = own(reference.parameters(), lr=2e-3)
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
        # The unfused loop rounds square roots differently; eight steps of bf16 moments, whose noise
        # follows the order in memory, differ by 8 * lr * 2**-8. Moments of the wrong element would
        # differ by 1e-3.
        atol = 1e-6 if optimizer == "AdamW" else 1e-4
        torch.testing.assert_close(parameter.data, other.data, rtol=0, atol=atol, msg=name)
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
