"""Detecting the platform this process runs on."""

from __future__ import annotations

import re
from typing import Final

from zerotune.decisions import announce
from zerotune.platform.cgroups import cpu_quota, memory_constraint
from zerotune.platform.facts import HostMemory, Platform
from zerotune.platform.hardware import choose_hardware
from zerotune.platform.probe import Cores, MachineProbe, PlatformProbe, TorchFacts
from zerotune.platform.support import Situation, deepspeed_support

_DISTRIBUTIONS: Final = ("torch", "deepspeed", "accelerate", "diffusers")
_CAP_IPC_LOCK: Final = 14
_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What Linux calls bf16 arithmetic on x86 (the first two) and on ARM."""
_INITIAL_NAMESPACE: Final = ["0", "0", "4294967295"]


def detect_platform(
    *,
    probe: PlatformProbe | None = None,
    allow_rocm: bool = False,
    allow_mps: bool = False,
    log: bool = True,
) -> Platform:
    """Detect what this machine is, and whether DeepSpeed can run on it.

    DeepSpeed is disabled on macOS, ROCm and Windows, and where it or torch is missing; why, and
    what to do, is in ``Platform.deepspeed`` and among ``Platform.decisions``.

    Args:
        probe: Where the facts come from; this machine by default.
        allow_rocm: Let DeepSpeed run on ROCm, which is reported to work on some hardware.
        allow_mps: Let DeepSpeed run on Apple GPUs; needs DeepSpeed 0.19.6 or later.
        log: Log each decision, once per process and on rank 0 only.
    """
    probe = probe or MachineProbe()
    torch = probe.torch()
    environ = probe.environ()
    hardware = choose_hardware(torch, environ)
    support, decisions = deepspeed_support(
        Situation(
            system=probe.system(),
            accelerator=hardware.accelerator,
            torch=torch,
            deepspeed_version=probe.version("deepspeed"),
            environ=environ,
            allow_rocm=allow_rocm,
            allow_mps=allow_mps,
        )
    )
    cores = probe.cores()
    platform = Platform(
        system=probe.system(),
        machine=probe.machine(),
        processor=probe.processor(),
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        host_memory=_host_memory(probe),
        memlock_limit=_memlock_limit(probe),
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        usable_cores=_usable_cores(cores, probe),
        versions=_versions(probe),
        torch_build=_torch_build(torch),
        bf16=hardware.bf16,
        native_bf16=hardware.bf16 and (hardware.accelerator != "cpu" or _cpu_computes_bf16(probe)),
        fp16=hardware.fp16,
        deepspeed=support,
        decisions=(*hardware.decisions, *decisions),
    )
    if log:
        announce(platform.decisions)
    return platform


def _host_memory(probe: PlatformProbe) -> HostMemory:
    total, available = probe.memory()
    cgroup = memory_constraint(probe.read_text)
    if cgroup.available is not None:
        available = min(available, cgroup.available)
    return HostMemory(total=total, available=available, cgroup_limit=cgroup.limit)


def _memlock_limit(probe: PlatformProbe) -> int | None:
    return None if _may_lock_everything(probe) else probe.memlock()


def _may_lock_everything(probe: PlatformProbe) -> bool:
    """Whether the kernel spares this process the limit, as it does root's as a rule.

    It asks for a capability in the initial user namespace; the same capability inside of a
    rootless container does not count.
    """
    status = probe.read_text("/proc/self/status") or ""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)\s*$", status, re.MULTILINE)
    if capabilities is None or not int(capabilities.group(1), 16) >> _CAP_IPC_LOCK & 1:
        return False
    return (probe.read_text("/proc/self/uid_map") or "").split() == _INITIAL_NAMESPACE


def _cpu_computes_bf16(probe: PlatformProbe) -> bool:
    for line in (probe.read_text("/proc/cpuinfo") or "").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


def _usable_cores(cores: Cores, probe: PlatformProbe) -> int:
    quota = cpu_quota(probe.read_text)
    # Rounded down: threads beyond the quota are throttled and slow the others.
    return max(1, cores.affinity if quota is None else min(cores.affinity, int(quota)))


def _versions(probe: PlatformProbe) -> dict[str, str]:
    installed = {name: probe.version(name) for name in _DISTRIBUTIONS}
    known = {name: version for name, version in installed.items() if version is not None}
    return {"python": probe.python_version(), **known}


def _torch_build(torch: TorchFacts | None) -> str | None:
    if torch is None or torch.import_error is not None:
        return None
    if torch.hip is not None:
        return f"rocm {torch.hip}"
    if torch.cuda is not None:
        return f"cuda {torch.cuda}"
    if torch.xpu_devices:
        return "xpu"
    return "mps" if torch.mps_device is not None else "cpu"
