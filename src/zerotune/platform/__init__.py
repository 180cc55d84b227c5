"""What this machine is: accelerator, memory, cores, versions, and whether DeepSpeed can run.

Importing this package loads neither torch nor deepspeed; ``detect_platform`` imports torch. What
looks at the machine is loaded on first use, so that describing one costs nothing. Compilers and
libraries are in ``zerotune.platform.toolchain``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from zerotune.platform.facts import (
    GIB,
    Accelerator,
    DeepSpeedSupport,
    Device,
    HostMemory,
    Platform,
)

if TYPE_CHECKING:
    from zerotune.platform.detection import detect_platform
    from zerotune.platform.probe import Cores, MachineProbe, PlatformProbe, TorchFacts

_HOMES: Final = {
    "Cores": "probe",
    "MachineProbe": "probe",
    "PlatformProbe": "probe",
    "TorchFacts": "probe",
    "detect_platform": "detection",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
