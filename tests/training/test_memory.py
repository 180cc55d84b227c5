"""Bytes per component, computed by hand for a model small enough to do so."""

from __future__ import annotations

import pytest
import torch

from zerotune.errors import InvalidValueError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts, ParameterFacts
from zerotune.platform import Platform
from zerotune.training import expected_memory
from zerotune.training.memory import device_peak, host_now, host_peak

# 10 + 5 trainable, 100 frozen elements; over 2 ranks stage 3 keeps 5 + 3, one flat tensor 8.
MODEL = ModelFacts(
    parameters=[
        ParameterFacts(name="a", shape=(2, 5)),
        ParameterFacts(name="b", shape=(5,)),
        ParameterFacts(name="frozen", shape=(100,), trainable=False),
    ]
)


def parts(stage, *, ranks=1, accelerator="cuda", precision="bf16", ema=False, deepspeed=True, **at):
    resolved = DeepSpeedPlan.build(
        stage=stage,
        precision=precision,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        **at,
    ).resolve(
        platform=Platform.synthetic(accelerator, versions={"deepspeed": "0.19.8"}),
        model=MODEL,
        world_size=ranks,
        deepspeed=deepspeed,
    )
    plan = OptimizerResolver().apply(resolved)
    found = expected_memory(plan, ema=ema)
    return {part.component: (part.place, part.nbytes) for part in found}


def test_stage_0_in_bf16_keeps_everything_on_the_gpu():
    assert parts(0) == {
        "weights": ("GPU", 2 * 115),
        "gradients": ("GPU", 2 * 15),
        "master weights": ("GPU", 4 * 15),
        "optimizer states": ("GPU", 8 * 15),
    }


def test_in_fp32_without_partitioning_the_weights_are_the_master_weights():
    for deepspeed in (True, False):
        found = parts(0, precision="fp32", deepspeed=deepspeed)
        assert found["weights"] == ("GPU", 4 * 115)
        assert found["gradients"] == ("GPU", 4 * 15)
        assert found["master weights"] == ("GPU", 0)


def test_the_plain_engine_casts_on_the_fly():
    found = parts(0, precision="bf16", deepspeed=False)
    assert found["weights"] == ("GPU", 4 * 115)
    assert found["master weights"] == ("GPU", 0)
    assert found["optimizer states"] == ("GPU", 8 * 15)


@pytest.mark.parametrize(("stage", "gradients"), [(1, 2 * 15), (2, 2 * 8)])
def test_stages_1_and_2_split_one_flat_tensor(stage, gradients):
    assert parts(stage, ranks=2, ema=True) == {
        "weights": ("GPU", 2 * 115),
        "gradients": ("GPU", gradients),
        "master weights": ("GPU", 4 * 8),
        "optimizer states": ("GPU", 8 * 8),
        "EMA": ("host", 4 * 8),
    }


def test_cpu_offload_moves_gradients_in_fp32_too():
    assert parts(2, ranks=2, offload="cpu") == {
        "weights": ("GPU", 2 * 115),
        "gradients": ("host", 4 * 8),
        "master weights": ("host", 4 * 8),
        "optimizer states": ("host", 8 * 8),
    }


def test_stage_3_splits_each_parameter_and_swaps():
    found = parts(3, ranks=2, offload="nvme", offload_param="cpu", ema=True)
    assert found == {
        "weights": ("host", 2 * (5 + 3 + 50)),
        "gradients": ("NVMe", 4 * 8),
        "master weights": ("NVMe", 4 * 8),
        "optimizer states": ("NVMe", 8 * 8),
        "EMA": ("host", 4 * 8),
    }


def test_without_a_gpu_the_device_is_the_host():
    places = {place for place, _ in parts(1, accelerator="cpu", precision="fp32").values()}
    assert places == {"host"}


def test_a_plan_without_a_model_cannot_be_counted():
    resolved = DeepSpeedPlan.build(stage=1).resolve(platform=Platform.synthetic())
    with pytest.raises(InvalidValueError, match="model="):
        expected_memory(OptimizerResolver().apply(resolved))


def test_measured_memory_moves_with_what_is_allocated():
    before = host_now()
    held = torch.ones(2**24)
    assert host_now() > before + 2**25
    assert host_peak() >= before + held.nbytes // 2
    assert device_peak(torch.device("cpu")) is None
