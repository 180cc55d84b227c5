"""What this machine is: accelerator, memory, cores, versions, and whether DeepSpeed can run.

Importing this package loads neither torch nor deepspeed; ``detect_platform`` imports torch. What
looks at the machine is loaded on first use, so that describing one costs nothing. Compilers and
libraries are in ``zerotune.platform.toolchain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zerotune._util.lazy import lazy_attribute
from zerotune.platform.facts import (
    GIB,
    Accelerator,
    DeepSpeedSupport,
    Device,
    HostMemory,
    Platform,
)

if TYPE_CHECKING:
    from zerotune.platform.detect import detect_platform
    from zerotune.platform.probe import Cores, MachineProbe, PlatformProbe, TorchFacts

_HOMES: Final = {
    "Cores": "probe",
    "MachineProbe": "probe",
    "PlatformProbe": "probe",
    "TorchFacts": "probe",
    "detect_platform": "detect",
}

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

__getattr__ = lazy_attribute(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
