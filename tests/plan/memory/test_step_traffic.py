"""Bytes a step moves, counted by hand for 16 trained elements."""

from __future__ import annotations

import pytest

from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.traffic import step_traffic
from zerotune.platform import Platform

MODEL = ModelFacts.from_shapes([("a", (3, 4)), ("b", (4,))])


def moved(stage, offload="none", *, param="none", accelerator="cuda", precision="bf16", **options):
    ranks, accumulation = options.pop("ranks", 1), options.pop("accumulation", 1)
    plan = DeepSpeedPlan.build(
        stage=stage,
        offload=offload,
        offload_param=param,
        precision=precision,
        optimizer="AdamW",
        gradient_accumulation_steps=accumulation,
        nvme_path="/swap" if "nvme" in (offload, param) else None,
    )
    resolved = plan.resolve(
        platform=Platform.synthetic(accelerator),
        model=options.pop("model", MODEL),
        world_size=ranks,
        run=RunFacts(micro_batch_size=1),
        deepspeed=options.pop("deepspeed", True),
        engine=options.pop("engine", None),
    )
    return step_traffic(resolved.estimate(Workload(**options)))


def test_parts_that_stay_on_the_gpu_cause_no_traffic():
    found = moved(2)
    assert (found.bus, found.optimizer, found.ema) == (0, 0, 0)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_an_ema_on_the_host_copies_master_weights_from_the_device(place):
    found = moved(2, ema=place)
    assert (found.bus, found.ema_from_device) == (4 * 16, 4 * 16)
    assert moved(2, ema="device").bus == 0
    assert moved(2, "cpu", ema=place).ema_from_device == 0
    assert moved(2, ema=place, accelerator="cpu").bus == 0


def test_stage_2_of_deepspeed_sends_gradients_in_fp32_and_receives_weights():
    found = moved(2, "cpu", ema="host", engine="deepspeed")
    assert (found.gradients, found.weights, found.parameters) == (4 * 16, 2 * 16, 0)
    assert found.bus == 6 * 16
    # Adam: 3 fp32 values, 2 states read and written, and the weight in bf16.
    assert found.optimizer == (12 + 16 + 2) * 16
    assert found.ema == 12 * 16
    on_disk = moved(2, "cpu", ema="nvme", engine="deepspeed")
    assert (on_disk.ema, on_disk.ema_on_disk, found.ema_on_disk) == (12 * 16, 4 * 16, 0)
    assert moved(2, "cpu", ranks=2, engine="deepspeed").gradients == 4 * 8
    summed = moved(2, "cpu", accumulation=3, engine="deepspeed")
    assert (summed.gradients, summed.returned) == ((3 * 2 + 4) * 16, 2 * 2 * 16)


def test_the_host_engine_takes_gradients_as_they_are_and_averages_in_its_pass():
    found = moved(2, "cpu", ema="host", engine="host")
    # It aligns each of the two parameters to 256 elements.
    assert (found.gradients, found.weights, found.parameters) == (2 * 512, 2 * 512, 0)
    assert found.ema == 8 * 512


def test_stage_3_moves_sums_both_ways_and_fetches_parameters_twice():
    found = moved(3, "cpu", param="cpu")
    assert (found.gradients, found.parameters, found.weights) == (6 * 16, 4 * 16, 0)
    assert found.returned == 2 * 16
    assert moved(3, "cpu", param="cpu", accumulation=2).parameters == 8 * 16


def test_gradients_for_states_on_nvme_leave_the_device_in_fp32():
    # DeepSpeed casts them on the device, and writes them to the disk beside the states.
    in_memory = moved(3, "cpu", engine="deepspeed")
    assert moved(3, "nvme").gradients == in_memory.gradients == (2 + 4) * 16


def test_without_a_gpu_there_is_no_bus_traffic():
    found = moved(3, "cpu", accelerator="cpu", precision="fp32")
    assert found.bus == 0
    # The host engine aligns each of the two parameters to 256 elements.
    assert found.optimizer == (12 + 16 + 4) * 512


@pytest.mark.parametrize("deepspeed", [True, False])
def test_fp32_weights_without_separate_masters_are_written_once(deepspeed):
    found = moved(0, accelerator="cpu", precision="fp32", deepspeed=deepspeed)
    assert found.optimizer == (12 + 16) * 16


def test_swap_file_traffic_is_counted_too():
    # Smaller tensors than 1 MiB stay in memory.
    found = moved(3, "nvme", model=ModelFacts.from_shapes([("a", (2**20,))]))
    assert found.swap.read == found.swap.written == 16 * 2**20
    assert moved(3, "nvme").swap.written == 0
