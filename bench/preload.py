"""Imported once by the fork server of the workers: DeepSpeed, for this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools

import torch

with contextlib.suppress(ImportError):
    # Where torch was built for GPUs the first call of CUDA must come after the fork: nothing is
    # probed or preloaded here.
    if torch.version.cuda is None and torch.version.hip is None:
        from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        # The classes: diffusers loads what is behind a name when it is asked for.
        from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DModel  # noqa: F401


with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed asks several times per engine, and each answer starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
