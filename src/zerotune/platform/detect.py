"""Detect this machine's accelerator, memory and cores, and whether DeepSpeed can run.

All facts come from a ``PlatformProbe``, so that tests can simulate other machines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

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
    probe: PlatformProbe | None = None,
    allow_rocm: bool = False,
    allow_mps: bool = False,
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
        allow_mps: Enable DeepSpeed on Apple GPUs.
        log: Log each decision once per process, on rank 0 only.
    """
    probe = probe or MachineProbe()
    torch, environ = probe.torch(), probe.environ()
    facts = torch or TorchFacts()
    hardware = choose_hardware(facts, environ)
    here = _Machine(
        probe=probe,
        torch=torch,
        accelerator=hardware.accelerator,
        allow_rocm=allow_rocm,
        allow_mps=allow_mps,
    )
    support, support_decisions = here.support()
    cores, quota = probe.cores(), cpu_quota(probe.read_text)
    versions = {name: probe.version(name) for name in _DISTRIBUTIONS}
    detected = Platform(
        system=probe.system(),
        machine=probe.machine(),
        processor=probe.processor(),
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        host_memory=host_memory(probe),
        memlock_limit=None if here.locks_everything() else probe.memlock(),
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        # Rounded down: threads beyond the quota are throttled and slow the others.
        usable_cores=max(1, min(cores.affinity, cores.affinity if quota is None else int(quota))),
        versions={
            "python": probe.python_version(),
            **{name: version for name, version in versions.items() if version is not None},
        },
        torch_build=None if torch is None or torch.import_error else torch.build,
        bf16=hardware.bf16,
        native_bf16=hardware.bf16 and (hardware.accelerator != "cpu" or here.computes_bf16()),
        fp16=hardware.fp16,
        deepspeed=support,
        decisions=(*hardware.decisions, *support_decisions),
    )
    if log:
        announce(detected.decisions)
    return detected


def host_memory(probe: PlatformProbe, *, with_swap: bool = False) -> HostMemory:
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


@attrs.frozen(kw_only=True)
class Hardware:
    """The chosen accelerator and its capabilities."""

    accelerator: Accelerator
    devices: tuple[Device, ...] = ()
    bf16: bool
    fp16: bool
    decisions: tuple[Decision, ...] = ()


def choose_hardware(torch: TorchFacts, environ: Mapping[str, str]) -> Hardware:
    """Choose the best available accelerator, or the one that ``DS_ACCELERATOR`` names.

    DeepSpeed and the plain engine both read ``DS_ACCELERATOR``, so disabling DeepSpeed does not
    move a run to a different device. If the machine lacks the named accelerator, the best available
    one is chosen.

    Args:
        torch: Facts from torch.
        environ: Environment variables.
    """
    usable = torch.usable
    native = chosen = next(iter(usable))
    decisions = torch.missing_cuda(environ)
    requested = environ.get("DS_ACCELERATOR")
    if requested is not None and requested != DEEPSPEED_NAMES[native]:
        chosen = next((name for name in usable if DEEPSPEED_NAMES[name] == requested), native)
        if chosen != native:
            unused = ", ".join(device.name for device in usable[native])
            decisions.append(
                Decision(
                    "platform.accelerator",
                    native,
                    chosen,
                    f"the environment variable DS_ACCELERATOR={requested} is set, so "
                    f"{unused} is not used",
                    "warning",
                )
            )
    devices = usable[chosen]
    return Hardware(
        accelerator=chosen,
        devices=devices,
        bf16=torch.mps_bf16 if chosen == "mps" else _at_least(devices, (8, 0)),
        # Compute capability 6 has slow fp16, which DeepSpeed refuses.
        fp16=torch.cpu_fp16 if chosen == "cpu" else _at_least(devices, (7, 0)),
        decisions=tuple(decisions),
    )


def _at_least(devices: tuple[Device, ...], capability: tuple[int, int]) -> bool:
    """Return whether every NVIDIA device has the capability; other devices have none and pass."""
    return all(device.capability is None or device.capability >= capability for device in devices)


# -- Whether DeepSpeed can run: an ordered list of reasons why not.

_Refusal = tuple[str, "str | None"]
"""Reason and fix."""


@attrs.frozen(kw_only=True)
class _Machine:
    """A probed machine, and whether DeepSpeed can run on it."""

    probe: PlatformProbe
    torch: TorchFacts | None
    accelerator: Accelerator
    allow_rocm: bool
    allow_mps: bool

    def _refusals(self) -> Iterator[_Refusal]:
        system = self.probe.system()
        if system not in {"Linux", "Darwin"}:
            yield (
                f"DeepSpeed's offload kernels and asynchronous I/O do not build on {system}",
                "train in WSL2" if system == "Windows" else "train on Linux",
            )
        if self.torch is None:
            yield "torch is not installed", "pip install torch"
        elif self.torch.import_error is not None:
            yield (
                f"torch is installed but cannot be imported: {self.torch.import_error}",
                "reinstall torch with pip install --force-reinstall torch",
            )
        if system == "Darwin" and not self.allow_mps:
            yield (
                f"DeepSpeed is disabled on macOS; {_TRAINS_WITHOUT}",
                f"pass allow_mps=True to try DeepSpeed {OLDEST_DEEPSPEED} or later on MPS",
            )
        elif system == "Darwin" and self.accelerator != "mps":
            yield "allow_mps=True has no effect without an Apple GPU to train on", None
        if self.accelerator == "rocm" and not self.allow_rocm:
            yield (
                f"DeepSpeed is disabled on ROCm, where zerotune is not tested; {_TRAINS_WITHOUT}",
                "pass allow_rocm=True to try DeepSpeed on ROCm",
            )
        yield from self._version_refusals()
        yield from self._environment_refusals()

    def _version_refusals(self) -> Iterator[_Refusal]:
        from packaging.version import Version  # late, to keep ``import zerotune`` light

        version = self.probe.version("deepspeed")
        if version is None:
            yield "deepspeed is not installed", f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'"
        elif release_of(version) and Version(version) < Version(OLDEST_DEEPSPEED):
            yield (
                f"deepspeed {version} is older than {OLDEST_DEEPSPEED}",
                f"pip install --upgrade 'deepspeed>={OLDEST_DEEPSPEED}'",
            )

    def _environment_refusals(self) -> Iterator[_Refusal]:
        requested = self.probe.environ().get("DS_ACCELERATOR")
        native = DEEPSPEED_NAMES[self.accelerator]
        if requested is None or requested == native:
            return
        yield (
            f"DS_ACCELERATOR={requested} names an accelerator that this machine does not have"
            if requested in _DEEPSPEED_ACCELERATORS
            else f"DS_ACCELERATOR={requested!r} is not an accelerator that DeepSpeed supports",
            f"unset DS_ACCELERATOR or set it to {native}",
        )

    def locks_everything(self) -> bool:
        """Return whether the limit on locked memory does not apply to this process.

        The limit on locked memory does not apply to a process with ``CAP_IPC_LOCK`` in the initial
        user namespace. Most processes of root have this capability. ``CAP_IPC_LOCK`` has no effect
        in rootless containers.
        """
        if not has_capability(self.probe.read_text("/proc/self/status") or "", CAP_IPC_LOCK):
            return False
        return (self.probe.read_text("/proc/self/uid_map") or "").split() == _INITIAL_NAMESPACE

    def computes_bf16(self) -> bool:
        """Return whether the CPU has bf16 arithmetic."""
        for line in (self.probe.read_text("/proc/cpuinfo") or "").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in {"flags", "Features"}:
                return not _BF16_FLAGS.isdisjoint(flags.split())
        return False

    def support(self) -> tuple[DeepSpeedSupport, tuple[Decision, ...]]:
        """Return whether DeepSpeed can run, and a decision unless DeepSpeed runs on CUDA or XPU."""
        refusal = next(self._refusals(), None)
        if refusal is not None:
            reason, fix = refusal
            decision = Decision(
                "platform.deepspeed",
                None,
                "disabled",
                reason if fix is None else f"{reason}; {fix}",
                "warning",
            )
            return DeepSpeedSupport(available=False, reason=reason, fix=fix), (decision,)
        where = {
            "cpu": "its CPU accelerator (DS_ACCELERATOR=cpu)",
            "rocm": "ROCm, because of allow_rocm=True",
            "mps": "MPS, because of allow_mps=True",
        }
        name = DEEPSPEED_NAMES[self.accelerator]
        place = where.get(self.accelerator, self.accelerator)
        reason = f"deepspeed {self.probe.version('deepspeed')} runs on {place}"
        support = DeepSpeedSupport(available=True, accelerator=name, reason=reason)
        decision = Decision("platform.deepspeed", None, name, reason)
        return support, (decision,) if self.accelerator in where else ()


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

    cuda: str | None = None
    """CUDA version for which torch was built."""
    hip: str | None = None
    """ROCm version for which torch was built; a ROCm build reports its devices as CUDA devices."""
    cuda_devices: tuple[Device, ...] = ()
    """Usable CUDA or ROCm devices."""
    cuda_error: str | None = None
    """Why a CUDA or ROCm build found no device."""
    xpu_devices: tuple[Device, ...] = ()
    mps_device: Device | None = None
    mps_bf16: bool = False
    """Whether macOS supports bf16 on the GPU, as macOS 14 and later versions do."""
    cpu_fp16: bool = False
    """Whether this CPU has native fp16 arithmetic, which DeepSpeed requires for fp16."""
    import_error: str | None = None
    """Why ``import torch`` failed although torch is installed."""

    @property
    def build(self) -> str:
        """Platform for which torch was built."""
        if self.hip is not None:
            return f"rocm {self.hip}"
        if self.cuda is not None:
            return f"cuda {self.cuda}"
        if self.xpu_devices:
            return "xpu"
        return "mps" if self.mps_device is not None else "cpu"

    @property
    def usable(self) -> dict[Accelerator, tuple[Device, ...]]:
        """Devices of each usable accelerator, best accelerator first; always includes the CPU."""
        devices: dict[Accelerator, tuple[Device, ...]] = {}
        if self.cuda_devices:
            devices["rocm" if self.hip else "cuda"] = self.cuda_devices
        if self.xpu_devices:
            devices["xpu"] = self.xpu_devices
        if self.mps_device is not None:
            devices["mps"] = (self.mps_device,)
        devices["cpu"] = ()
        return devices

    def missing_cuda(self, environ: Mapping[str, str]) -> list[Decision]:
        """Return a decision if torch was built for CUDA or ROCm but finds no device.

        Args:
            environ: Environment variables.
        """
        if self.cuda_error is None or self.cuda_devices:
            return []
        wanted: Accelerator = "rocm" if self.hip else "cuda"
        severity: Severity = "warning"
        reason = f"torch was built for {wanted} but found no device: {self.cuda_error}"
        if environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
            severity = "note"
            reason = "the environment variable CUDA_VISIBLE_DEVICES hides every device"
        return [Decision("platform.accelerator", wanted, "cpu", reason, severity)]


class PlatformProbe(Protocol):
    """Source of facts about a machine; tests override its methods."""

    def system(self) -> str:
        """Return ``platform.system()``."""
        return platform.system()

    def machine(self) -> str:
        """Return ``platform.machine()``."""
        return platform.machine()

    def processor(self) -> str:
        """Return the name of the CPU, or an empty string."""
        if self.system() == "Darwin":
            return _mac_processor()
        for line in (self.read_text("/proc/cpuinfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
        return platform.processor()

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
        devices, problem = self._cuda_devices(torch)
        mps = torch.backends.mps.is_available()
        memory = torch.mps.recommended_max_memory() if mps else 0
        xpus = torch.xpu.device_count() if torch.xpu.is_available() else 0
        cpu_fp16 = False
        # A private operator, but DeepSpeed's CPU accelerator decides by it.
        with contextlib.suppress(AttributeError, RuntimeError):
            cpu_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return TorchFacts(
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            cuda_devices=devices,
            cuda_error=problem,
            xpu_devices=tuple(
                Device(name=str(device.name), total_memory=int(device.total_memory))
                for device in map(torch.xpu.get_device_properties, range(xpus))
            ),
            mps_device=Device(name=self.processor() or "Apple GPU", total_memory=int(memory))
            if mps
            else None,
            mps_bf16=mps and torch.backends.mps.is_macos_or_newer(14, 0),
            cpu_fp16=cpu_fp16,
        )

    def _cuda_devices(self, torch: Any) -> tuple[tuple[Device, ...], str | None]:
        if torch.version.cuda is None and torch.version.hip is None:
            return (), None
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
            Device(
                name=str(device.name),
                total_memory=int(device.total_memory),
                capability=(int(device.major), int(device.minor)) if is_nvidia else None,
            )
            for device in properties
        ), None


class MachineProbe(PlatformProbe):
    """Facts about the current machine."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _mac_processor() -> str:
    import subprocess

    try:
        done = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


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
