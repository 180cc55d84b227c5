"""What this machine is: accelerator, memory, cores, versions, and whether DeepSpeed can run.

Importing this package loads neither torch nor deepspeed; ``detect_platform`` imports torch.
Compilers and libraries are in ``zerotune.platform.toolchain``.
"""

from __future__ import annotations

from zerotune.platform.detection import detect_platform
from zerotune.platform.facts import (
    GIB,
    Accelerator,
    DeepSpeedSupport,
    Device,
    HostMemory,
    Platform,
)
from zerotune.platform.probe import Cores, MachineProbe, PlatformProbe, TorchFacts

__all__ = [
    "GIB",
    "Accelerator",
    "Cores",
    "DeepSpeedSupport",
    "Device",
    "HostMemory",
    "MachineProbe",
    "Platform",
    "PlatformProbe",
    "TorchFacts",
    "detect_platform",
]
