"""Imported once by the fork server: DeepSpeed, for this machine's accelerator."""

from __future__ import annotations

import contextlib

from zerotune.platform import detect_platform

with contextlib.suppress(ImportError):
    from zerotune.backend.require import quiet_deepspeed, require_deepspeed

    platform = detect_platform()
    if platform.deepspeed.available and platform.accelerator == "cpu":
        # On a GPU the first CUDA call must come after the fork, so nothing is preloaded there.
        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
