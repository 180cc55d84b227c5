"""Imported once by the workers' fork server: loads DeepSpeed for this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools

import torch

with contextlib.suppress(ImportError):
    # With a GPU build of torch, the first CUDA call must come after the fork: probe and preload
    # nothing.
    if torch.version.cuda is None and torch.version.hip is None:
        from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        # Name the classes: diffusers loads a class's module only on first access.
        from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DModel  # noqa: F401


with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed calls it several times per engine, and each call starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
