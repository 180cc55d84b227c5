"""Values that describe a machine: devices, memory, cores and DeepSpeed support."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError

Accelerator = Literal["cuda", "rocm", "mps", "xpu", "cpu"]
"""Kind of device on which a machine trains."""
ACCELERATORS: Final[tuple[Accelerator, ...]] = get_args(Accelerator)
CUDA: Final = "cuda"
"""NVIDIA's GPUs. As torch's and DeepSpeed's name of a device, the name includes AMD's GPUs."""
CUDA_ALLOCATORS: Final[frozenset[Accelerator]] = frozenset({CUDA, "rocm"})
"""Accelerators with the allocators and kernels of torch's CUDA API."""
DISCRETE: Final[frozenset[Accelerator]] = frozenset({*CUDA_ALLOCATORS, "xpu"})
"""Accelerators with their own memory, a context in it, and streams for copies."""

GIB: Final = 1024**3
"""Number of bytes in a gibibyte."""


def user_cache() -> Path:
    """Return the folder for measurements: ``zerotune`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotune"


DEEPSPEED_NAMES: Final[Mapping[Accelerator, str]] = MappingProxyType(
    {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "xpu": "xpu", "cpu": "cpu"}
)
"""DeepSpeed's name for each accelerator; ROCm builds of torch report themselves as CUDA."""


@attrs.frozen(kw_only=True)
class Device:
    """An accelerator device that training may use."""

    name: str
    """Product name from the driver."""
    total_memory: int
    """Bytes of memory; on Apple silicon, Metal's recommended maximum working set, which is part of
    the RAM."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` for devices that are not from NVIDIA."""


@attrs.frozen(kw_only=True)
class HostMemory:
    """RAM of the host, and the container's memory limit, in bytes."""

    total: int
    """Physical RAM."""
    available: int
    """RAM that is available without swapping, within the container's limit."""
    cgroup_limit: int | None = None
    """Smallest memory limit of this process's control group and its parents; ``None`` without a
    limit."""

    @property
    def limit(self) -> int:
        """Maximum RAM that this process may use."""
        return self.total if self.cgroup_limit is None else min(self.total, self.cgroup_limit)


@attrs.frozen(kw_only=True)
class DeepSpeedSupport:
    """Whether DeepSpeed can run on a machine, with a reason and a fix."""

    available: bool
    accelerator: str | None = None
    """DeepSpeed's name for the accelerator: ``"cuda"`` (including ROCm), ``"cpu"``, ``"xpu"``,
    ``"mps"``; ``None`` if DeepSpeed cannot run."""
    reason: str
    """Why DeepSpeed can or cannot run, in one sentence."""
    fix: str | None = None
    """What to do if DeepSpeed cannot run; ``None`` if nothing helps."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables to set before importing deepspeed; empty if DeepSpeed cannot run.

        DeepSpeed chooses its accelerator on import; only environment variables affect the choice.
        """
        return {} if self.accelerator is None else {"DS_ACCELERATOR": self.accelerator}


def _check_known_accelerator(_instance: object, _attribute: Any, value: str) -> None:
    if value not in ACCELERATORS:
        raise InvalidValueError(
            "is not an accelerator", f"use one of {', '.join(ACCELERATORS)}", "accelerator", value
        )


@attrs.frozen(kw_only=True)
class Platform:
    """The machine for which a plan is resolved."""

    system: str
    """``platform.system()``: ``"Linux"``, ``"Darwin"``, ``"Windows"``."""
    machine: str
    """``platform.machine()``: ``"x86_64"``, ``"arm64"`` …"""
    processor: str = ""
    """Name of the CPU; empty if unknown."""
    accelerator: Accelerator = attrs.field(validator=_check_known_accelerator)
    """Accelerator for training, with either engine."""
    devices: tuple[Device, ...] = ()
    """Devices of ``accelerator``; empty for ``"cpu"``."""
    host_memory: HostMemory
    memlock_limit: int | None = None
    """Bytes that this process may lock in RAM (pinned buffers); ``None`` without a limit."""
    physical_cores: int
    """Number of physical cores of the machine."""
    logical_cores: int
    """Number of logical cores of the machine."""
    usable_cores: int
    """Number of logical cores that this process may use, within its CPU affinity and the
    container's quota; at least 1."""
    versions: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    """Versions of python, and of torch, deepspeed, accelerate and diffusers if they are
    installed."""
    torch_build: str | None = None
    """Platform for which torch was built (``"cuda 12.8"``, ``"rocm 6.4"``, ``"cpu"``)."""
    bf16: bool
    """Whether the hardware supports bf16; emulation on a GPU does not count."""
    native_bf16: bool
    """Whether the hardware has bf16 arithmetic; a CPU without it emulates bf16 much more slowly."""
    fp16: bool
    """Whether the hardware supports fp16 and DeepSpeed accepts it."""
    deepspeed: DeepSpeedSupport
    decisions: tuple[Decision, ...] = ()
    """Decisions made during detection."""

    @property
    def vram(self) -> int | None:
        """Memory of the device with the least memory, in bytes; ``None`` without a device."""
        return min((device.total_memory for device in self.devices), default=None)

    @classmethod
    def synthetic(
        cls,
        accelerator: Accelerator = "cpu",
        *,
        device_count: int = 1,
        device_name: str | None = None,
        vram: int = 24 * GIB,
        ram: int = 64 * GIB,
        available_ram: int | None = None,
        cgroup_limit: int | None = None,
        memlock_limit: int | None = None,
        cores: int = 8,
        bf16: bool = True,
        native_bf16: bool | None = None,
        fp16: bool | None = None,
        versions: Mapping[str, str] | None = None,
        deepspeed: bool | DeepSpeedSupport = True,
        decisions: tuple[Decision, ...] = (),
    ) -> Platform:
        """Describe a hypothetical machine, for planning or tests.

        Args:
            accelerator: Accelerator for training.
            device_count: Number of devices; ignored for ``"cpu"``.
            device_name: Name of the devices, such as ``"RTX 4090"``, from which their rates are
                known; by default a made-up name.
            vram: Memory of each device in bytes; ignored for ``"cpu"``.
            ram: RAM in bytes.
            available_ram: Available RAM in bytes; by default the smaller of ``ram`` and
                ``cgroup_limit``.
            cgroup_limit: Memory limit of the container in bytes; ``None`` for no limit.
            memlock_limit: Bytes that a process may lock; ``None`` for no limit.
            cores: Number of physical cores.
            bf16: Whether the hardware supports bf16.
            native_bf16: Whether the hardware has bf16 arithmetic; by default the value of ``bf16``,
                but ``False`` for ``"cpu"``.
            fp16: Whether the hardware supports fp16; by default true except for ``"cpu"``.
            versions: Versions of installed packages; none by default.
            deepspeed: Whether DeepSpeed can run on the machine, or a ``DeepSpeedSupport``.
            decisions: Decisions that the platform reports; none by default.

        Raises:
            InvalidValueError: ``accelerator`` is not one of ``ACCELERATORS``.
        """
        _check_known_accelerator(None, None, accelerator)
        is_mac = accelerator == "mps"
        names = {"mps": "Apple GPU", "rocm": "ROCm device"}
        device = Device(
            name=device_name
            or f"Synthetic {names.get(accelerator, f'{accelerator.upper()} device')}",
            total_memory=vram,
            capability=(8, 9) if accelerator == "cuda" else None,
        )
        if not isinstance(deepspeed, DeepSpeedSupport):
            deepspeed = DeepSpeedSupport(
                available=deepspeed,
                accelerator=DEEPSPEED_NAMES[accelerator] if deepspeed else None,
                reason=f"the synthetic platform was created {'with' if deepspeed else 'without'} "
                "DeepSpeed",
            )
        return cls(
            system="Darwin" if is_mac else "Linux",
            machine="arm64" if is_mac else "x86_64",
            processor="Synthetic CPU",
            accelerator=accelerator,
            devices=() if accelerator == "cpu" else (device,) * device_count,
            host_memory=HostMemory(
                total=ram,
                available=min(
                    value for value in (ram, available_ram, cgroup_limit) if value is not None
                ),
                cgroup_limit=cgroup_limit,
            ),
            memlock_limit=memlock_limit,
            physical_cores=cores,
            logical_cores=cores,
            usable_cores=cores,
            versions=versions or {},
            bf16=bf16,
            native_bf16=bf16 and accelerator != "cpu" if native_bf16 is None else native_bf16,
            fp16=accelerator != "cpu" if fp16 is None else fp16,
            deepspeed=deepspeed,
            decisions=decisions,
        )
