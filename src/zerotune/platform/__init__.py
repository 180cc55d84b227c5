"""Facts about this machine: accelerator, memory, cores, versions, and DeepSpeed support.

Importing this package loads neither torch nor deepspeed; only ``detect_platform`` imports torch.
Detection code is loaded on first use, so that describing a machine is cheap.
``zerotune.platform.toolchain`` covers compilers and libraries.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
