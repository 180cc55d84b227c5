"""What a machine is, as values: devices, memory, cores and what DeepSpeed can do there."""

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
"""What a machine trains on."""
ACCELERATORS: Final[tuple[Accelerator, ...]] = get_args(Accelerator)

GIB: Final = 1024**3
"""Bytes of a gibibyte."""


def user_cache() -> Path:
    """Where measurements of this machine are kept: ``zerotune`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotune"


DEEPSPEED_NAMES: Final[Mapping[Accelerator, str]] = MappingProxyType(
    {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "xpu": "xpu", "cpu": "cpu"}
)
"""DeepSpeed's name of each accelerator; ROCm builds of torch present themselves as CUDA."""


@attrs.frozen(kw_only=True)
class Device:
    """One accelerator device that training may use."""

    name: str
    """Marketing name as the driver gives it."""
    total_memory: int
    """Bytes; on Apple silicon the working set that Metal recommends, a part of the RAM."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` for everything that is not NVIDIA."""


@attrs.frozen(kw_only=True)
class HostMemory:
    """RAM of the host and what a container leaves of it, in bytes."""

    total: int
    """Physical RAM."""
    available: int
    """What can be allocated now without swapping, the container's limit respected."""
    cgroup_limit: int | None = None
    """Smallest limit on the path from this process's control group to the root."""

    @property
    def limit(self) -> int:
        """The most this process may ever hold."""
        return self.total if self.cgroup_limit is None else min(self.total, self.cgroup_limit)


@attrs.frozen(kw_only=True)
class DeepSpeedSupport:
    """Whether DeepSpeed can run here, and if not, why and what to do."""

    available: bool
    accelerator: str | None = None
    """DeepSpeed's own name of what it runs on: ``"cuda"`` (ROCm too), ``"cpu"``, ``"xpu"``,
    ``"mps"``; ``None`` when it does not run."""
    reason: str
    """One sentence."""
    fix: str | None = None
    """What to do when it does not run and something can be done."""

    @property
    def environment(self) -> dict[str, str]:
        """What the backend sets before it imports deepspeed; empty when DeepSpeed does not run.

        DeepSpeed chooses its accelerator while it is imported, so this is the only way to make
        its choice this one.
        """
        return {} if self.accelerator is None else {"DS_ACCELERATOR": self.accelerator}


def _check_known_accelerator(_instance: object, _attribute: Any, value: str) -> None:
    if value not in ACCELERATORS:
        raise InvalidValueError(
            "no such accelerator",
            key="accelerator",
            value=value,
            fix=f"use one of {', '.join(ACCELERATORS)}",
        )


@attrs.frozen(kw_only=True)
class Platform:
    """The machine a plan is resolved for."""

    system: str
    """``platform.system()``: ``"Linux"``, ``"Darwin"``, ``"Windows"``."""
    machine: str
    """``platform.machine()``: ``"x86_64"``, ``"arm64"`` …"""
    processor: str = ""
    """Name of the CPU; empty when the system does not tell."""
    accelerator: Accelerator = attrs.field(validator=_check_known_accelerator)
    """What training runs on, with either engine."""
    devices: tuple[Device, ...] = ()
    """Devices of ``accelerator``; empty on ``"cpu"``."""
    host_memory: HostMemory
    memlock_limit: int | None = None
    """Bytes this process may lock in RAM (pinned buffers); ``None`` when nothing limits it."""
    physical_cores: int
    logical_cores: int
    """Cores of the machine, not those this process may use."""
    usable_cores: int
    """Logical cores left by CPU affinity and the container's CPU quota, at least 1."""
    versions: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    """Of python, torch, deepspeed, accelerate and diffusers; a missing key is not installed."""
    torch_build: str | None = None
    """What the installed torch was built for (``"cuda 12.8"``, ``"rocm 6.4"``, ``"cpu"``)."""
    bf16: bool
    """Whether the hardware runs bf16; emulation on a GPU does not count."""
    native_bf16: bool
    """Whether it has arithmetic for bf16; a CPU without it emulates, many times slower."""
    fp16: bool
    """Whether the hardware runs fp16 and DeepSpeed accepts it."""
    deepspeed: DeepSpeedSupport
    decisions: tuple[Decision, ...] = ()
    """Automatic choices made while detecting."""

    @property
    def vram(self) -> int | None:
        """Bytes of the smallest device, what every rank can count on; ``None`` without one."""
        return min((device.total_memory for device in self.devices), default=None)

    @classmethod
    def synthetic(
        cls,
        accelerator: Accelerator = "cpu",
        *,
        device_count: int = 1,
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
        """A machine that need not exist, to plan for another one or to test.

        Args:
            accelerator: What it trains on.
            device_count: Number of devices; ignored for ``"cpu"``.
            vram: Bytes of each device; ignored for ``"cpu"``.
            ram: Bytes of RAM.
            available_ram: Bytes of it that are free; everything the limits leave by default.
            cgroup_limit: Bytes a container allows.
            memlock_limit: Bytes that may be locked; ``None`` for no limit.
            cores: Physical cores, each counted once.
            bf16: Whether the hardware runs bf16.
            native_bf16: Whether it does so without emulation; by default everything that runs
                bf16 but ``"cpu"`` does.
            fp16: Whether it runs fp16; by default everything but ``"cpu"`` does.
            versions: Installed versions; none by default.
            deepspeed: Whether DeepSpeed runs there, or a full account of it.
            decisions: Decisions to carry along.

        Raises:
            InvalidValueError: ``accelerator`` is not one zerotune knows.
        """
        _check_known_accelerator(None, None, accelerator)
        is_mac = accelerator == "mps"
        names = {"mps": "Apple GPU", "rocm": "ROCm device"}
        device = Device(
            name=f"Synthetic {names.get(accelerator, f'{accelerator.upper()} device')}",
            total_memory=vram,
            capability=(8, 9) if accelerator == "cuda" else None,
        )
        if not isinstance(deepspeed, DeepSpeedSupport):
            deepspeed = DeepSpeedSupport(
                available=deepspeed,
                accelerator=DEEPSPEED_NAMES[accelerator] if deepspeed else None,
                reason=f"the synthetic platform was made {'with' if deepspeed else 'without'} "
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
