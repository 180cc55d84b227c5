"""Imported once by the fork server: DeepSpeed, for this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools

from zerotune.platform import detect_platform

with contextlib.suppress(ImportError):
    from zerotune.backend.require import quiet_deepspeed, require_deepspeed

    platform = detect_platform()
    if platform.deepspeed.available and platform.accelerator == "cpu":
        # On a GPU the first CUDA call must come after the fork, so nothing is preloaded there.
        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()

with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed asks several times per engine, and each answer starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
