"""Errors when memory runs out, on synthetic machines."""

from __future__ import annotations

import pickle
import re

import attrs
import pytest
import torch

from zerotune.errors import EngineError, OffloadError, OutOfMemoryError
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.platform.facts import GIB
from zerotune.training.memory import Limits, Situation, advising, out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB"


def situation(*, vram=24, ram=64, stage=2, offload="none"):
    plan = DeepSpeedPlan.build(
        stage=stage,
        offload=offload,
        precision="bf16",
        micro_batch_size=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-5}},
    )
    machine = Platform.synthetic("cuda", vram=vram * GIB, ram=ram * GIB)
    estimate = plan.estimate("sdxl", platform=machine, ema="host")
    limits = Limits(device=vram * GIB, host=ram * GIB, host_free=ram * GIB // 2)
    return Situation(
        plan=estimate.resolved,
        doing="backward of optimizer step 12",
        estimate=estimate,
        limits=limits,
    )


def told(error, where):
    with pytest.raises(OutOfMemoryError) as caught, advising(lambda: where):
        raise error
    return caught.value


def test_the_plan_that_fits_can_be_pasted_as_code():
    found = told(torch.OutOfMemoryError(CUDA), situation())
    text = str(found)
    assert "device memory ran out in backward of optimizer step 12 (CUDA out of memory." in text
    assert "the plan expected 53.11 GiB in the optimizer step" in text
    assert "this process can use up to 24.00 GiB" in text
    call = text.split("Trainer(plan=")[1].rstrip(".").removesuffix(")")
    call = call.removesuffix(", gradient_checkpointing=True")
    pasted = eval(call, {"DeepSpeedPlan": DeepSpeedPlan})
    assert pasted == found.plan
    assert (pasted.stage, pasted.offload_optimizer_device) == (2, "cpu")
    assert pasted.optimizer.params == {"lr": 1e-5}
    assert isinstance(found.original, torch.OutOfMemoryError)
    assert found.__cause__ is found.original


def test_a_plan_as_large_as_the_failed_one_is_not_advised():
    """The estimate fits 9 GiB, but the run did not: the advised plan must need less."""
    failed = situation(offload="cpu", vram=9)
    assert failed.estimate.device < 0.95 * 9 * GIB
    text = str(told(torch.OutOfMemoryError(CUDA), failed))
    (needs,) = re.findall(r"needs ([\d.]+) GiB device", text)
    assert float(needs) * GIB < failed.estimate.device


def test_when_nothing_fits_the_error_says_what_would():
    found = told(torch.OutOfMemoryError(CUDA), situation(vram=1, ram=4))
    assert found.plan is None
    assert "no plan fits this machine: provide" in str(found)


def test_memory_used_by_other_processes_is_not_blamed_on_the_plan():
    found = told(MemoryError(), situation(ram=512))
    assert "host memory ran out" in str(found)
    assert "is used by other processes" in str(found)
    assert found.plan is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(CUDA),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_out_of_memory_errors_are_recognised_when_wrapped(error):
    assert out_of_memory(error) is error
    wrapped = EngineError("DeepSpeed refused the plan")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) is error


PAGE_LOCKING = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to ..."


def test_a_failed_page_locked_allocation_is_blamed_on_host_memory():
    """torch's allocator says more of a full device; this is the driver's page-locking error."""
    where = situation(offload="cpu", ram=32)
    with_room = attrs.evolve(where, limits=attrs.evolve(where.limits, device_free=20 * GIB))
    for told_of in (where, with_room):
        found = told(RuntimeError(PAGE_LOCKING), told_of)
        assert found.key == "memory.host"
        assert "host memory ran out" in str(found)
        assert "a page-locked allocation failed: CUDA error: out of memory" in str(found)


def test_a_driver_error_on_a_full_device_is_blamed_on_device_memory():
    where = situation()
    full = attrs.evolve(where, limits=attrs.evolve(where.limits, device_free=10 * 2**20))
    assert told(RuntimeError(PAGE_LOCKING), full).key == "memory.device"


def test_other_errors_propagate_unchanged():
    for error in (RuntimeError("no"), OffloadError("the plan needs more; out of memory", key="x")):
        assert out_of_memory(error) is None
        with pytest.raises(type(error)) as caught, advising(lambda: None):
            raise error
        assert caught.value is error


def test_the_error_survives_pickling():
    found = told(torch.OutOfMemoryError(CUDA), situation())
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found)
    assert again.plan == found.plan
