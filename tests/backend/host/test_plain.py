"""The host engine without DeepSpeed: fp32 units, torch's Adam, autocast and loss scale."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.backend.host.plain import LossScale, PlainHostEngine
from zerotune.backend.plain import PlainEngine
from zerotune.backend.step import kernel
from zerotune.errors import PlatformError
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import detect_platform


def net() -> torch.nn.Module:
    """A model with weights that fill no vector, a scalar, and a frozen layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 67), torch.nn.SiLU(), torch.nn.Linear(67, 67), torch.nn.Linear(67, 33)
    )
    model[2].requires_grad_(False)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    model.register_forward_hook(lambda module, _args, output: output * module.scale)
    return model


def begin(offload: str = "cpu", *, precision: str = "bf16", **changes: Any) -> Any:
    settings = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    plan = DeepSpeedPlan.build(
        stage=0, offload=offload, precision=precision, **{**settings, **changes}
    )
    platform = attrs.evolve(detect_platform(log=False), fp16=True)
    return build(net(), plan, platform=platform, deepspeed=False)


def train(engine: Any, steps: int = 12, factor: float = 1.0) -> list[Any]:
    norms = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(2 * step + engine.group.rank)
        loss = factor * (engine(torch.randn(2, 33, generator=generator)) - 1).square().mean()
        engine.backward(loss)
        norms.append(engine.step().grad_norm)
    return norms


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: full.clone() for name, full in engine.master_weights.gather()}


FUSED = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "fused": True}}


@pytest.mark.parametrize(
    ("world_size", "precision", "decay"),
    [(1, "fp32", "AdamW"), (1, "fp16", "AdamW"), (1, "fp32", "Adam"),
     (2, "bf16", "AdamW")],
)  # fmt: skip
@ranks()
def test_results_are_bit_identical_to_torchs_fused_adam(
    world_size: int, precision: str, decay: str
) -> None:
    params = {"lr": 1e-2, "weight_decay": 0.01}
    adam: dict[str, Any] = {"type": decay, "params": params}
    if decay == "Adam":
        params["adam_w_mode"] = False
    # With several ranks, DDP adds up micro batches before ranks.
    case = {
        "precision": precision,
        "optimizer": adam,
        "gradient_accumulation_steps": 3 - world_size,
    }
    with begin("none", **case) as engine:
        assert type(engine) is PlainEngine
        for group in engine.optimizer.param_groups:
            group["fused"] = True
        norms, expected = train(engine), weights(engine)
    with begin(**case) as engine:
        assert isinstance(engine, PlainHostEngine)
        assert engine.plan.precision == precision
        found = train(engine)
        assert all(torch.equal(expected[name], each) for name, each in weights(engine).items())
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float32
                assert torch.equal(parameter, expected[name])
    # A norm is added up in another order.
    assert [one for one in found if one] == pytest.approx([one for one in norms if one], rel=1e-6)


@ranks(1)
def test_clipped_results_agree_with_torchs_up_to_the_rounding_of_the_norm() -> None:
    found = []
    for offload in ("none", "cpu"):
        with begin(offload, precision="fp32", gradient_clipping=0.5, optimizer=FUSED) as engine:
            train(engine)
            found.append(weights(engine))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=1e-6)


@ranks(1)
def test_the_forward_pass_runs_under_autocast_and_returns_fp32() -> None:
    with begin() as engine:
        seen = []
        engine.module[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
        assert engine(torch.ones(2, 33)).dtype == engine.dtype == torch.float32
        assert seen == [torch.bfloat16]


@ranks(1)
def test_fp16_steps_are_skipped_until_the_loss_scale_fits() -> None:
    states, weights_of = [], []
    for offload in ("none", "cpu"):
        with begin(offload, precision="fp16", optimizer=FUSED) as engine:
            before = weights(engine)
            train(engine, 2, factor=500.0)
            assert all(torch.equal(before[name], each) for name, each in weights(engine).items())
            train(engine, 20, factor=500.0)
            states.append(engine.state)
            weights_of.append(weights(engine))
            engine.load_state(states[0])
            assert engine.state == states[-1]
    assert 0 < states[0].skipped_steps < 11
    assert states[0].skipped_steps == states[1].skipped_steps
    for name in ("scale", "_growth_tracker"):
        assert states[0].loss_scaler[name] == states[1].loss_scaler[name]
    assert all(torch.equal(weights_of[1][name], each) for name, each in weights_of[0].items())


def test_the_loss_scale_follows_grad_scaler() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    scale, tracker = torch.tensor(theirs.get_scale()), torch.zeros((), dtype=torch.int32)
    for step in range(6100):
        overflow = step in (3, 7, 4050)
        ours.update_scale(overflow)
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(overflow)), theirs.get_growth_factor(),
            theirs.get_backoff_factor(), theirs.get_growth_interval(),
        )  # fmt: skip
        assert ours.loss_scale == scale.item()
    assert ours._growth_tracker == tracker.item()


@ranks(1)
def test_neither_deepspeed_nor_accelerate_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("accelerate", "deepspeed"):
        # Every further import fails.
        monkeypatch.setitem(sys.modules, package, None)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    with begin(precision="fp16", scheduler=schedule) as engine:
        assert isinstance(engine, PlainHostEngine)
        train(engine)
        assert engine.state.global_step == 6


@ranks(1)
def test_without_a_compiler_the_optimizer_stays_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unable() -> None:
        raise PlatformError("no compiler", fix="install g++")

    monkeypatch.setattr("zerotune.backend.host.obstacles.load_host_step", unable)
    with begin() as engine:
        assert type(engine) is PlainEngine
        (said,) = (each for each in engine.decisions if "no compiler" in each.reason)
    assert (said.key, said.after, said.severity) == (
        "zero_optimization.offload_optimizer", None, "warning"
    )  # fmt: skip
    assert kernel.load_host_step is not unable


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
@ranks(1)
def test_options_that_the_kernels_lack_run_on_the_device(option: str) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-2, option: True}}
    with begin(optimizer=adam) as engine:
        assert type(engine) is PlainEngine
        assert any(option in each.reason for each in engine.decisions)
