"""The device that a process computes on: all that torch answers by kind of device.

No other module uses ``torch.cuda`` or ``torch.xpu``, or compares a device with ``"cuda"``. Callers
ask for what they need (``streams``, ``memory()``) instead of the kind, so a device that another
package registers with torch needs no change here. The CPU answers too: it has no streams, and
waiting for it does nothing.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from zerotune.platform.detect import MachineProbe
from zerotune.platform.facts import CUDA, DEEPSPEED_NAMES

_HOST: Final = torch.device("cpu")
_DRIVERS: Final = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Device memory in bytes, as reported by the driver and torch's allocator."""

    total: int
    free: int
    """Free bytes on the whole device."""
    allocated_peak: int
    """Peak bytes of tensors."""
    reserved: int
    """Bytes that torch's allocator holds now."""
    reserved_peak: int
    """Peak bytes held by torch's allocator."""
    others: int = 0
    """Bytes held by other processes, if the driver reports them."""

    @property
    def context(self) -> int:
        """Bytes outside torch's allocator, used by this process's context and libraries.

        The value grows during a run, because cuBLAS, cuDNN and NCCL are loaded on first use.
        """
        return max(0, self.total - self.free - self.reserved - self.others)

    @property
    def peak(self) -> int:
        """Return this process's peak device memory in bytes."""
        return self.reserved_peak + self.context


@attrs.frozen
class RunningAccelerator:
    """What torch offers for one device; see ``accelerator_of``."""

    device: torch.device
    """The device; without an index, the process's current device of that type."""

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU, which computes in host memory."""
        return self.device.type == "cpu"

    @property
    def is_available(self) -> bool:
        """Whether this process can use the device."""
        return bool(self._module.is_available())

    @property
    def is_nvidia(self) -> bool:
        """Whether the device is an available NVIDIA GPU; ROCm builds report AMD's GPUs as CUDA."""
        return self.device.type == CUDA and torch.version.hip is None and self.is_available

    @property
    def streams(self) -> Any:
        """Module with ``Stream``, ``Event``, ``stream`` and ``current_stream``; ``None`` without.

        Copies between the host and a device without streams cannot overlap with computation.
        """
        return self._module if not self.is_host and hasattr(self._module, "Stream") else None

    @property
    def fuses_adam(self) -> bool:
        """Whether torch has a fused kernel of Adam for the device."""
        return self.is_host or self.streams is not None

    @property
    def communication_backend(self) -> str:
        """Name of the backend for collectives of the device's tensors."""
        try:
            backend = dist.get_default_backend_for_device(self.device)
        except ValueError:
            return "gloo"
        return backend if dist.is_backend_available(backend) else "gloo"

    @property
    def name(self) -> str:
        """Product name and compute capability, as far as the driver reports them."""
        properties = getattr(self._module, "get_device_properties", None)
        if self.is_host or properties is None or not self.is_available:
            return self.device.type
        facts = properties(self._module.current_device())
        numbers = [str(getattr(facts, p)) for p in ("major", "minor") if hasattr(facts, p)]
        return ", ".join(filter(None, (str(facts.name), ".".join(numbers))))

    @property
    def driver(self) -> str:
        """Version of the driver; of the system if the driver is part of it; ``"none"`` on a CPU."""
        if self.is_host:
            return "none"
        properties = getattr(self._module, "get_device_properties", None)
        if properties is not None and self.is_available:
            version = getattr(properties(self._module.current_device()), "driver_version", None)
            if version is not None:
                return str(version)
        if self.device.type == CUDA:
            for path in _DRIVERS:
                if text := (MachineProbe().read_text(path) or "").strip():
                    return text.splitlines()[0]
            version_of: Any = getattr(torch._C, "_cuda_getDriverVersion", None)
            if version_of is not None and self.is_available:
                return str(version_of())
        return platform.platform()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if not self.is_host:
            torch.accelerator.synchronize(self.device)

    def empty_cache(self) -> None:
        """Return memory that torch's allocator holds, but does not use, to the driver."""
        if not self.is_host and self.is_available:
            self._module.empty_cache()

    # -- Memory.

    def memory(self) -> DeviceMemory | None:
        """Return the device's memory figures; ``None`` on a CPU or if they are not reported."""
        module = self._module
        if not hasattr(module, "mem_get_info") or not self.is_available:
            return None
        try:
            free, total = module.mem_get_info(self.device)
        except RuntimeError:  # Drivers of some integrated GPUs do not report free memory.
            return None
        return DeviceMemory(
            total=total,
            free=free,
            allocated_peak=module.max_memory_allocated(self.device),
            reserved=module.memory_reserved(self.device),
            reserved_peak=module.max_memory_reserved(self.device),
            others=_held_by_others(self),
        )

    def page_locked(self, figure: str) -> int | None:
        """Return a figure of page-locked bytes that torch has allocated in this process.

        Args:
            figure: ``"peak"``, ``"current"``, or ``"allocated"``, the total of all allocations.

        Returns:
            The bytes; ``None`` if torch does not report them for this kind of device.
        """
        statistics = getattr(self._module, "host_memory_stats", None)
        if statistics is None or not self.is_available:
            return None
        return int(statistics().get(f"allocated_bytes.{figure}", 0))

    @property
    def registers_memory(self) -> bool:
        """Whether the driver page-locks memory that was allocated without it."""
        return hasattr(self._module, "cudart") and self.is_available

    def register_memory(self, tensor: torch.Tensor) -> None:
        """Page-lock a host tensor; requires ``registers_memory``."""
        module = self._module
        code = module.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        module.check_error(int(code))

    def unregister_memory(self, tensor: torch.Tensor) -> None:
        """Unlock a tensor that ``register_memory`` has locked."""
        self._module.check_error(int(self._module.cudart().cudaHostUnregister(tensor.data_ptr())))

    # -- Random numbers.

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's generator; ``None`` on a CPU or if never used."""
        initialised = getattr(self._module, "is_initialized", lambda: True)
        if self.is_host or not self.is_available or not initialised():
            return None
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def restore_random_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's generator to a result of ``random_state``."""
        self._module.set_rng_state(state)


@cache
def _held_by_others(accelerator: RunningAccelerator) -> int:
    """Return other processes' device bytes; cached, because steps must not wait for NVML."""
    try:
        pynvml = importlib.import_module("pynvml")
        handle = accelerator._module._get_pynvml_handler(accelerator.device)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # noqa: BLE001 - pynvml may be missing, or the driver may not support it
        return 0
    held = {one.pid: one.usedGpuMemory or 0 for one in running}
    # In a container the driver may report the host's process ids. Then this process cannot be told
    # from others, and nothing counts as another's.
    return sum(held.values()) - held[os.getpid()] if os.getpid() in held else 0


@cache
def accelerator_of(device: torch.device) -> RunningAccelerator:
    """Return what torch offers for a device.

    Args:
        device: The device, with or without an index.
    """
    return RunningAccelerator(device)


def current_accelerator() -> RunningAccelerator:
    """Return what torch offers for this process's accelerator; without one, for the CPU."""
    return accelerator_of(torch.accelerator.current_accelerator(check_available=True) or _HOST)


def accelerator_for(kind: str) -> RunningAccelerator:
    """Return what torch offers for the device that runs a plan.

    Args:
        kind: The plan's kind of accelerator, or DeepSpeed's or torch's name for it. Any kind except
            ``"cpu"`` means this process's accelerator, if it has one.
    """
    running = _HOST if kind == _HOST.type else torch.accelerator.current_accelerator(True)
    names: Mapping[Any, str] = DEEPSPEED_NAMES
    return accelerator_of(running or torch.device(names.get(kind, kind)))
