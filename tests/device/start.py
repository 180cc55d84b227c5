"""Make the device part of torch, torch.distributed and DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache

import torch
import torch.distributed as dist


@cache
def install() -> None:
    """Make the device this process's accelerator, also for DeepSpeed; may be called again.

    Compiles the device first, once per machine.
    """
    simdev = importlib.import_module("tests.device.simdev")
    torch.utils.rename_privateuse1_backend("simdev")
    torch._register_device_module("simdev", simdev)
    sys.modules["torch.simdev"] = simdev
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _make_group, devices=["simdev"])
    # accelerate knows no other devices than its own list, unless this names one.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "simdev"
    if importlib.util.find_spec("deepspeed"):
        _tell_deepspeed()


def _make_group(store, rank, size, timeout):
    from tests.device.build import load_device

    host = dist.ProcessGroupGloo(store, rank, size, timeout)
    return load_device().make_group(host, rank, size)


def _tell_deepspeed() -> None:
    from deepspeed.accelerator import set_accelerator

    from tests.device.accelerator import SimulatedAccelerator

    accelerator = SimulatedAccelerator()
    set_accelerator(accelerator)
    # These modules ask the accelerator when imported, and the fork server has imported them.
    if utilities := sys.modules.get("deepspeed.runtime.utils"):
        utilities.torch_memory_reserved = accelerator.memory_reserved
        utilities.torch_max_memory_reserved = accelerator.max_memory_reserved
    if adam := sys.modules.get("deepspeed.ops.adam.fused_adam"):
        adam.FusedAdamBuilder = accelerator.get_op_builder("FusedAdamBuilder")
