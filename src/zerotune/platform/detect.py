"""Detect this machine's accelerator, memory and cores, and whether DeepSpeed can run.

All facts come from a ``MachineProbe``, so that tests can simulate other machines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.proc import CAP_IPC_LOCK, has_capability, installed_version, parse_mount
from zerotune._util.text import release_of
from zerotune.decisions import Decision, Severity, announce
from zerotune.errors import PlatformError
from zerotune.platform.facts import (
    DEEPSPEED_NAMES,
    Accelerator,
    DeepSpeedSupport,
    Device,
    HostMemory,
    Platform,
)

Read = Callable[[str], "str | None"]

OLDEST_DEEPSPEED: Final = "0.19.8"
"""Oldest DeepSpeed release that supports all features; ``pyproject.toml`` sets the same minimum.
With 0.19.3, swapping to NVMe aborts the process, and host memory is up to 28 % above the
estimate."""

_DEEPSPEED_ACCELERATORS: Final = (
    "cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu",
)  # fmt: skip
_TRAINS_WITHOUT: Final = "zerotune trains with its plain engine instead"
_DISTRIBUTIONS: Final = ("torch", "deepspeed", "accelerate", "diffusers")
_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names of CPU features for bf16 arithmetic, on x86 (the first two) and on ARM."""
_INITIAL_NAMESPACE: Final = ["0", "0", "4294967295"]


def detect_platform(
    *,
    probe: MachineProbe | None = None,
    allow_rocm: bool = False,
    log: bool = True,
) -> Platform:
    """Detect this machine's hardware and software, and whether DeepSpeed can run on it.

    DeepSpeed is disabled on macOS, ROCm and Windows, and unavailable if torch or the ``deepspeed``
    package is missing. ``Platform.deepspeed`` and ``Platform.decisions`` contain the reason and the
    fix.

    Args:
        probe: Source of the facts; by default this machine.
        allow_rocm: Enable DeepSpeed on ROCm; users report that DeepSpeed works on some ROCm
            hardware.
        log: Log each decision once per process, on rank 0 only.
    """
    probe = probe or MachineProbe()
    torch, environ = probe.torch(), probe.environ()
    facts = torch or TorchFacts()
    accelerator, devices, decisions = _chosen(facts, environ)
    # Compute capability 6 has slow fp16, which DeepSpeed refuses.
    fp16 = facts.cpu_fp16 if accelerator == "cpu" else _at_least(devices, (7, 0))
    bf16 = facts.mps_bf16 if accelerator == "mps" else _at_least(devices, (8, 0))
    support, support_decisions = _support(probe, torch, accelerator, allow_rocm=allow_rocm)
    cores, quota = probe.cores(), cpu_quota(probe.read_text)
    versions = {name: probe.version(name) for name in _DISTRIBUTIONS}
    computes_bf16 = not _BF16_FLAGS.isdisjoint(_cpu_facts(probe, "flags", "Features").split())
    detected = Platform(
        system=probe.system(),
        machine=probe.machine(),
        processor=probe.processor(),
        accelerator=accelerator,
        devices=devices,
        host_memory=host_memory(probe),
        memlock_limit=None if _locks_everything(probe) else probe.memlock(),
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        # Rounded down: threads beyond the quota are throttled and slow the others.
        usable_cores=max(1, min(cores.affinity, cores.affinity if quota is None else int(quota))),
        versions={
            "python": probe.python_version(),
            **{name: version for name, version in versions.items() if version is not None},
        },
        torch_build=None if torch is None or torch.import_error else torch.build,
        bf16=bf16,
        native_bf16=bf16 and (accelerator != "cpu" or computes_bf16),
        fp16=fp16,
        deepspeed=support,
        decisions=(*decisions, *support_decisions),
    )
    if log:
        announce(detected.decisions)
    return detected


def host_memory(probe: MachineProbe, *, with_swap: bool = False) -> HostMemory:
    """Return the RAM of a host, and the container's memory limit.

    Args:
        probe: Source of the facts.
        with_swap: Whether free swap space counts as available.
    """
    total, available = probe.memory()
    if with_swap:
        import psutil

        available += int(psutil.swap_memory().free)
    container = memory_constraint(probe.read_text)
    if container.available is not None:
        available = min(available, container.available)
    return HostMemory(total=total, available=available, cgroup_limit=container.limit)


# -- What training runs on.


def _chosen(
    torch: TorchFacts, environ: Mapping[str, str]
) -> tuple[Accelerator, tuple[Device, ...], list[Decision]]:
    """Return torch's accelerator, or the CPU if ``DS_ACCELERATOR`` names it, and its devices.

    DeepSpeed and the plain engine both read ``DS_ACCELERATOR``, so disabling DeepSpeed does not
    move a run to a different device.
    """
    decisions = torch.missing_devices(environ)
    if not torch.devices:
        return "cpu", (), decisions
    if environ.get("DS_ACCELERATOR") != "cpu":
        return torch.accelerator, torch.devices, decisions
    unused = ", ".join(device.name for device in torch.devices)
    reason = f"the environment variable DS_ACCELERATOR=cpu is set, so {unused} is not used"
    return (
        "cpu",
        (),
        [Decision("platform.accelerator", torch.accelerator, "cpu", reason, "warning")],
    )


def _at_least(devices: tuple[Device, ...], capability: tuple[int, int]) -> bool:
    """Return whether every NVIDIA device has the capability; other devices have none and pass."""
    return all(device.capability is None or device.capability >= capability for device in devices)


# -- Whether DeepSpeed can run: an ordered list of reasons why not.

_Refusal = tuple[str, "str | None"]
"""Reason and fix."""


def _refusals(
    probe: MachineProbe, torch: TorchFacts | None, accelerator: Accelerator, *, allow_rocm: bool
) -> Iterator[_Refusal]:
    system = probe.system()
    if system not in {"Linux", "Darwin"}:
        yield (
            f"DeepSpeed's offload kernels and asynchronous I/O do not build on {system}",
            "train in WSL2" if system == "Windows" else "train on Linux",
        )
    if torch is None:
        yield "torch is not installed", "pip install torch"
    elif torch.import_error is not None:
        yield (
            f"torch is installed but cannot be imported: {torch.import_error}",
            "reinstall torch with pip install --force-reinstall torch",
        )
    if system == "Darwin":
        yield f"DeepSpeed is disabled on macOS; {_TRAINS_WITHOUT}", None
    if accelerator == "rocm" and not allow_rocm:
        yield (
            f"DeepSpeed is disabled on ROCm, where zerotune is not tested; {_TRAINS_WITHOUT}",
            "pass allow_rocm=True to try DeepSpeed on ROCm",
        )
    yield from _version_refusals(probe.version("deepspeed"))
    yield from _environment_refusals(probe.environ(), DEEPSPEED_NAMES[accelerator])


def _version_refusals(version: str | None) -> Iterator[_Refusal]:
    from packaging.version import Version  # late, to keep ``import zerotune`` light

    if version is None:
        yield "deepspeed is not installed", f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'"
    elif release_of(version) and Version(version) < Version(OLDEST_DEEPSPEED):
        yield (
            f"deepspeed {version} is older than {OLDEST_DEEPSPEED}",
            f"pip install --upgrade 'deepspeed>={OLDEST_DEEPSPEED}'",
        )


def _environment_refusals(environ: Mapping[str, str], native: str) -> Iterator[_Refusal]:
    requested = environ.get("DS_ACCELERATOR")
    if requested is None or requested == native:
        return
    yield (
        f"DS_ACCELERATOR={requested} names an accelerator that this machine does not have"
        if requested in _DEEPSPEED_ACCELERATORS
        else f"DS_ACCELERATOR={requested!r} is not an accelerator that DeepSpeed supports",
        f"unset DS_ACCELERATOR or set it to {native}",
    )


def _support(
    probe: MachineProbe, torch: TorchFacts | None, accelerator: Accelerator, *, allow_rocm: bool
) -> tuple[DeepSpeedSupport, tuple[Decision, ...]]:
    """Return whether DeepSpeed can run, and a decision unless DeepSpeed runs on CUDA or XPU."""
    key = "platform.deepspeed"
    refusal = next(_refusals(probe, torch, accelerator, allow_rocm=allow_rocm), None)
    if refusal is not None:
        reason, fix = refusal
        why = reason if fix is None else f"{reason}; {fix}"
        decision = Decision(key, None, "disabled", why, "warning")
        return DeepSpeedSupport(available=False, reason=reason, fix=fix), (decision,)
    where = {
        "cpu": "its CPU accelerator (DS_ACCELERATOR=cpu)",
        "rocm": "ROCm, because of allow_rocm=True",
    }
    name, place = DEEPSPEED_NAMES[accelerator], where.get(accelerator, accelerator)
    reason = f"deepspeed {probe.version('deepspeed')} runs on {place}"
    support = DeepSpeedSupport(available=True, accelerator=name, reason=reason)
    return support, (Decision(key, None, name, reason),) if accelerator in where else ()


def _locks_everything(probe: MachineProbe) -> bool:
    """Return whether the limit on locked memory does not apply to this process.

    The limit on locked memory does not apply to a process with ``CAP_IPC_LOCK`` in the initial
    user namespace. Most processes of root have this capability. ``CAP_IPC_LOCK`` has no effect in
    rootless containers.
    """
    if not has_capability(probe.read_text("/proc/self/status") or "", CAP_IPC_LOCK):
        return False
    return (probe.read_text("/proc/self/uid_map") or "").split() == _INITIAL_NAMESPACE


def _cpu_facts(probe: MachineProbe, *names: str) -> str:
    """Return the first of the named lines about a CPU in ``/proc/cpuinfo``, or an empty string."""
    for line in (probe.read_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


# -- Sources of the facts.


@attrs.frozen(kw_only=True)
class Cores:
    """Numbers of physical, logical and usable CPU cores."""

    physical: int
    logical: int
    affinity: int
    """Number of logical cores on which this process may run."""


@attrs.frozen(kw_only=True)
class TorchFacts:
    """Facts from the installed torch and its devices."""

    accelerator: Accelerator = "cpu"
    """Accelerator for which torch was built."""
    version: str = ""
    """Version of CUDA or ROCm for which torch was built."""
    devices: tuple[Device, ...] = ()
    """Usable devices of the accelerator."""
    problem: str | None = None
    """Why a build for CUDA or ROCm found no device."""
    mps_bf16: bool = False
    """Whether macOS supports bf16 on the GPU, as macOS 14 and later versions do."""
    cpu_fp16: bool = False
    """Whether this CPU has native fp16 arithmetic, which DeepSpeed requires for fp16."""
    import_error: str | None = None
    """Why ``import torch`` failed although torch is installed."""

    @property
    def build(self) -> str:
        """Platform for which torch was built."""
        return f"{self.accelerator} {self.version}".rstrip()

    def missing_devices(self, environ: Mapping[str, str]) -> list[Decision]:
        """Return a decision if torch was built for CUDA or ROCm but finds no device.

        Args:
            environ: Environment variables.
        """
        if self.problem is None or self.devices:
            return []
        severity: Severity = "warning"
        reason = f"torch was built for {self.accelerator} but found no device: {self.problem}"
        if environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
            severity = "note"
            reason = "the environment variable CUDA_VISIBLE_DEVICES hides every device"
        return [Decision("platform.accelerator", self.accelerator, "cpu", reason, severity)]


class MachineProbe:
    """Source of facts about this machine; tests override its methods."""

    def system(self) -> str:
        """Return ``platform.system()``."""
        return platform.system()

    def machine(self) -> str:
        """Return ``platform.machine()``."""
        return platform.machine()

    def processor(self) -> str:
        """Return the name of the CPU, or an empty string."""
        return _cpu_facts(self, "model name") or platform.processor()

    def environ(self) -> Mapping[str, str]:
        """Return the environment variables."""
        return os.environ

    def python_version(self) -> str:
        """Return the version of the running Python."""
        return platform.python_version()

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, or ``None``, without importing it.

        Args:
            distribution: Name of the distribution, such as ``"torch"``.
        """
        return installed_version(distribution)

    def read_text(self, path: str) -> str | None:
        """Return the text of a file, or ``None`` if it cannot be read.

        Args:
            path: Path of the file.
        """
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def memory(self) -> tuple[int, int]:
        """Return total and available RAM of the host in bytes, ignoring the container's limit."""
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def cores(self) -> Cores:
        """Return the numbers of CPU cores, ignoring quotas."""
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
        """Return the soft limit on locked memory in bytes; ``None`` without a limit."""
        try:
            import resource
        except ImportError:
            return None
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft in {resource.RLIM_INFINITY, -1} else soft

    def torch(self) -> TorchFacts | None:
        """Return facts from torch, or ``None`` if torch is not installed."""
        if self.version("torch") is None:
            return None
        try:
            import torch
        except (ImportError, OSError) as error:
            return TorchFacts(import_error=first_line(error))
        cpu_fp16 = False
        # A private operator, but DeepSpeed's CPU accelerator decides by it.
        with contextlib.suppress(AttributeError, RuntimeError):
            cpu_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        facts = TorchFacts(cpu_fp16=cpu_fp16)
        if version := torch.version.cuda or torch.version.hip:
            kind: Accelerator = "rocm" if torch.version.hip else "cuda"
            devices, problem = self._cuda_devices(torch)
            return attrs.evolve(
                facts, accelerator=kind, version=version, devices=devices, problem=problem
            )
        if torch.xpu.is_available():
            found = map(torch.xpu.get_device_properties, range(torch.xpu.device_count()))
            return attrs.evolve(facts, accelerator="xpu", devices=tuple(map(_device, found)))
        if torch.backends.mps.is_available():
            memory = int(torch.mps.recommended_max_memory())
            device = Device(name=self.processor() or "Apple GPU", total_memory=memory)
            bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
            return attrs.evolve(facts, accelerator="mps", devices=(device,), mps_bf16=bf16)
        return facts

    def _cuda_devices(self, torch: Any) -> tuple[tuple[Device, ...], str | None]:
        if torch.cuda._is_in_bad_fork():
            # Every CUDA call fails here, which must not look like a machine without a GPU.
            raise PlatformError(
                "the parent process used CUDA before it forked this process, which therefore "
                "cannot use CUDA",
                "start processes with the 'spawn' method, or fork before the first use of CUDA "
                "(detect_platform() uses CUDA)",
                "platform.accelerator",
                "cuda",
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
                properties = [
                    torch.cuda.get_device_properties(index)
                    for index in range(torch.cuda.device_count())
                ]
            except RuntimeError as error:
                return (), first_line(error)
        is_nvidia = torch.version.hip is None
        return tuple(
            _device(one, capability=(int(one.major), int(one.minor)) if is_nvidia else None)
            for one in properties
        ), None


def _device(properties: Any, *, capability: tuple[int, int] | None = None) -> Device:
    memory = int(properties.total_memory)
    return Device(name=str(properties.name), total_memory=memory, capability=capability)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# -- Limits of control groups (version 2).
# A limit at any level from the process's own group up to the root applies, so every visible level
# is read and the smallest limit wins. Sources: ``cgroups(7)``, ``proc_pid_mountinfo(5)``,
# the kernel's ``cgroup-v2`` admin guide.


@attrs.frozen(kw_only=True)
class CgroupMemory:
    """Memory limit of this process's control groups in bytes."""

    limit: int | None = None
    """The smallest memory limit in bytes; ``None`` if there is no limit."""
    available: int | None = None
    """Bytes left in the control group with the least memory left; reclaimable page cache counts as
    free."""


def memory_constraint(read: Read) -> CgroupMemory:
    """Return the memory limit of this process's control groups, and the bytes still available."""
    limits: list[int] = []
    available: list[int] = []
    for folder in _control_groups(read):
        limit = _cgroup_number(read(f"{folder}/memory.max"))
        if limit is None:
            continue
        usage = _cgroup_number(read(f"{folder}/memory.current")) or 0
        statistics = read(f"{folder}/memory.stat") or ""
        cache = re.search(r"(?m)^inactive_file ([0-9]{1,20})$", statistics)
        used = max(0, usage - (int(cache[1]) if cache else 0))
        limits.append(limit)
        available.append(max(0, limit - used))
    return CgroupMemory(limit=min(limits, default=None), available=min(available, default=None))


def cpu_quota(read: Read) -> float | None:
    """Return the CPU quota of this process in cores; ``None`` without a quota."""
    quotas = []
    for folder in _control_groups(read):
        fields = (read(f"{folder}/cpu.max") or "").split()
        microseconds, window = map(_cgroup_number, [*fields, "", ""][:2])
        if microseconds and window and microseconds > 0 and window > 0:
            quotas.append(microseconds / window)
    return min(quotas, default=None)


def _control_groups(read: Read) -> Iterator[str]:
    """Yield folders that may limit this process, from its own group up to each mount point."""
    mounts = map(parse_mount, (read("/proc/self/mountinfo") or "").splitlines())
    groups = [mount for mount in mounts if mount is not None and mount.kind == "cgroup2"]
    for line in (read("/proc/self/cgroup") or "").splitlines():
        if not line.startswith("0::"):
            continue
        path = line.removeprefix("0::")
        for mount in groups:
            prefix = mount.root.rstrip("/") + "/"
            # A container whose group lies outside the mount still sees its own limit at the mount
            # point.
            inside = (path + "/").startswith(prefix)
            parts = [part for part in path[len(prefix) :].split("/") if part] if inside else []
            parts = [] if ".." in parts else parts
            for length in range(len(parts), -1, -1):
                yield "/".join([str(mount.point).rstrip("/"), *parts[:length]])


def _cgroup_number(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"-?[0-9]{1,20}", stripped) else None
