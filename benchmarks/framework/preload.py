"""Imported once by the fork server of the workers: DeepSpeed, for this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools

import torch

with contextlib.suppress(ImportError):
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
    from zerotune.platform import detect_platform

    # Where torch was built for GPUs the first call of CUDA must come after the fork: nothing is
    # probed or preloaded here.
    on_cpu = torch.version.cuda is None and torch.version.hip is None
    if on_cpu and detect_platform(log=False).deepspeed.available:
        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        import accelerate

        # The classes: diffusers loads what is behind a name when it is asked for.
        from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel

        import zerotune.training

        _ = accelerate, zerotune.training
        _ = DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel

with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed asks several times per engine, and each answer starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
