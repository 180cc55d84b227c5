"""Where the facts about a machine come from."""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from zerotune._util.environment import installed_version
from zerotune.errors import PlatformError
from zerotune.platform.facts import Device


@attrs.frozen(kw_only=True)
class Cores:
    """CPU cores, counted three ways."""

    physical: int
    logical: int
    affinity: int
    """Logical cores this process may be scheduled on."""


@attrs.frozen(kw_only=True)
class TorchFacts:
    """What the installed torch says about itself and about the devices it can reach."""

    cuda: str | None = None
    """CUDA version torch was built for."""
    hip: str | None = None
    """ROCm version torch was built for; such a build reports its devices as CUDA."""
    cuda_devices: tuple[Device, ...] = ()
    """CUDA or ROCm devices that can be used."""
    cuda_error: str | None = None
    """Why a build for CUDA or ROCm found no device."""
    xpu_devices: tuple[Device, ...] = ()
    mps_device: Device | None = None
    mps_bf16: bool = False
    """Whether the macOS is new enough for bf16 on its GPU (14 or later)."""
    cpu_fp16: bool = False
    """Whether this CPU has native fp16 arithmetic, without which DeepSpeed refuses fp16."""
    import_error: str | None = None
    """Why ``import torch`` failed although torch is installed."""


class PlatformProbe(Protocol):
    """Raw facts about a machine; a test passes its own to be on another one."""

    def system(self) -> str:
        """As ``platform.system()``."""

    def machine(self) -> str:
        """As ``platform.machine()``."""

    def processor(self) -> str:
        """Name of the CPU, or an empty string."""

    def environ(self) -> Mapping[str, str]:
        """Environment variables."""

    def python_version(self) -> str:
        """Version of the running Python."""

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, or ``None``; never imports it."""

    def read_text(self, path: str) -> str | None:
        """Text of a file, or ``None`` when it cannot be read."""

    def memory(self) -> tuple[int, int]:
        """Total and available RAM of the host in bytes, containers ignored."""

    def cores(self) -> Cores:
        """CPU cores, quotas ignored."""

    def memlock(self) -> int | None:
        """Soft limit on locked memory in bytes; ``None`` when unlimited or not a concept here."""

    def torch(self) -> TorchFacts | None:
        """Facts from torch, or ``None`` when it is not installed.

        Raises:
            PlatformError: This process was forked from one that had used CUDA.
        """


class MachineProbe:
    """Facts of the machine this process runs on."""

    def system(self) -> str:
        """As ``platform.system()``."""
        return platform.system()

    def machine(self) -> str:
        """As ``platform.machine()``."""
        return platform.machine()

    def processor(self) -> str:
        """Name of the CPU, or an empty string."""
        if self.system() == "Darwin":
            return _sysctl("machdep.cpu.brand_string")
        for line in (self.read_text("/proc/cpuinfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
        return platform.processor()

    def environ(self) -> Mapping[str, str]:
        """Environment variables."""
        return os.environ

    def python_version(self) -> str:
        """Version of the running Python."""
        return platform.python_version()

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution, or ``None``; never imports it."""
        return installed_version(distribution)

    def read_text(self, path: str) -> str | None:
        """Text of a file, or ``None`` when it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def memory(self) -> tuple[int, int]:
        """Total and available RAM of the host in bytes, containers ignored."""
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def cores(self) -> Cores:
        """CPU cores, quotas ignored."""
        import psutil

        logical = os.cpu_count() or 1
        physical = psutil.cpu_count(logical=False) or logical
        # macOS and Windows lack the call; every core is usable there.
        affinity = getattr(os, "sched_getaffinity", None)
        return Cores(
            physical=physical,
            logical=logical,
            affinity=len(affinity(0)) if affinity is not None else logical,
        )

    def memlock(self) -> int | None:
        """Soft limit on locked memory in bytes; ``None`` when unlimited or not a concept here."""
        try:
            import resource
        except ImportError:
            return None
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft in {resource.RLIM_INFINITY, -1} else soft

    def torch(self) -> TorchFacts | None:
        """Facts from torch, or ``None`` when it is not installed.

        Raises:
            PlatformError: This process was forked from one that had used CUDA.
        """
        if self.version("torch") is None:
            return None
        try:
            import torch
        except (ImportError, OSError) as error:
            return TorchFacts(import_error=first_line(error))
        devices, problem = _cuda_devices(torch)
        mps = torch.backends.mps.is_available()
        return TorchFacts(
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            cuda_devices=devices,
            cuda_error=problem,
            xpu_devices=_xpu_devices(torch),
            mps_device=_mps_device(torch, self.processor()) if mps else None,
            mps_bf16=mps and torch.backends.mps.is_macos_or_newer(14, 0),
            cpu_fp16=_cpu_fp16(torch),
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _cuda_devices(torch: Any) -> tuple[tuple[Device, ...], str | None]:
    if torch.version.cuda is None and torch.version.hip is None:
        return (), None
    if torch.cuda._is_in_bad_fork():
        # Every CUDA call fails here, which must not look like a machine without a GPU.
        raise PlatformError(
            "CUDA was used before this process was forked from another, and cannot be used in it",
            key="platform.accelerator",
            value="cuda",
            fix="start processes with the method 'spawn', or let nothing touch CUDA, not even "
            "detect_platform(), before they are forked",
        )
    # A driver that is too old makes torch warn and answer "not available"; initializing after
    # that raises with the reason, which is what the user needs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available() and torch.cuda.device_count() > 0
        if not available:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as error:
                return (), first_line(error)
            return (), "the driver reports no device"
        try:
            found = [
                torch.cuda.get_device_properties(index)
                for index in range(torch.cuda.device_count())
            ]
        except RuntimeError as error:
            return (), first_line(error)
    is_nvidia = torch.version.hip is None
    return tuple(
        Device(
            name=str(device.name),
            total_memory=int(device.total_memory),
            capability=(int(device.major), int(device.minor)) if is_nvidia else None,
        )
        for device in found
    ), None


def _xpu_devices(torch: Any) -> tuple[Device, ...]:
    if not torch.xpu.is_available():
        return ()
    found = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
    return tuple(
        Device(name=str(device.name), total_memory=int(device.total_memory)) for device in found
    )


def _mps_device(torch: Any, processor: str) -> Device:
    return Device(
        name=processor or "Apple GPU", total_memory=int(torch.mps.recommended_max_memory())
    )


def _cpu_fp16(torch: Any) -> bool:
    # A private operator, but the one DeepSpeed's CPU accelerator decides by.
    with contextlib.suppress(AttributeError, RuntimeError):
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def _sysctl(name: str) -> str:
    import subprocess

    try:
        done = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
