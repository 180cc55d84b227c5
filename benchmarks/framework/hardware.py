"""What a result was measured on."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

_PACKAGES: Final = (
    "zerotune", "torch", "deepspeed", "accelerate", "diffusers", "transformers", "numpy",
    "safetensors", "pillow", "timm", "ema-pytorch",
)  # fmt: skip


def hardware() -> dict[str, Any]:
    """Processor, memory and devices of this machine."""
    from zerotune import detect_platform

    platform = detect_platform(log=False)
    return {
        "processor": platform.processor or platform.machine,
        "usable_cores": platform.usable_cores,
        "host_gib": round(platform.host_memory.limit / 2**30, 1),
        "devices": [
            {"name": device.name, "gib": round(device.total_memory / 2**30, 1)}
            for device in platform.devices
        ],
        "system": platform.system,
    }


def versions() -> dict[str, str]:
    """Of Python and of what takes part."""
    import platform

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """Variables that decide how threads are used."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def load_average() -> float | None:
    """Processes that wanted a core in the last minute; tells a busy machine from an idle one."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None
