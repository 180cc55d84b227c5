"""Looking at the machine: what training runs on, whether DeepSpeed can, and what there is of it.

Facts come from a probe, so that a test can be on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from zerotune._util.proc import CAP_IPC_LOCK, has_capability
from zerotune.decisions import Decision, Severity, announce
from zerotune.platform.cgroups import cpu_quota, memory_constraint
from zerotune.platform.facts import (
    DEEPSPEED_NAMES,
    Accelerator,
    DeepSpeedSupport,
    Device,
    HostMemory,
    Platform,
)
from zerotune.platform.probe import MachineProbe, PlatformProbe, TorchFacts

OLDEST_DEEPSPEED: Final = "0.19.8"
"""Oldest release that trains all of it. With 0.19.3 swapping to NVMe aborts the process, host
memory is up to 28 % above the estimate, and as in all up to 0.19.7 no step can be taken in one
pass. The bound in ``pyproject.toml`` is the same."""

_DEEPSPEED_ACCELERATORS: Final = (
    "cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu",
)  # fmt: skip
_TRAINS_WITHOUT: Final = "zerotune trains with its plain engine instead"
_DISTRIBUTIONS: Final = ("torch", "deepspeed", "accelerate", "diffusers")
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
        allow_mps: Let DeepSpeed run on Apple GPUs.
        log: Log each decision, once per process and on rank 0 only.
    """
    probe = probe or MachineProbe()
    torch = probe.torch()
    hardware = choose_hardware(torch, probe.environ())
    situation = Situation(
        system=probe.system(),
        accelerator=hardware.accelerator,
        torch=torch,
        deepspeed_version=probe.version("deepspeed"),
        environ=probe.environ(),
        allow_rocm=allow_rocm,
        allow_mps=allow_mps,
    )
    support, decisions = deepspeed_support(situation)
    cores, quota = probe.cores(), cpu_quota(probe.read_text)
    total, available = probe.memory()
    cgroup = memory_constraint(probe.read_text)
    if cgroup.available is not None:
        available = min(available, cgroup.available)
    versions = {name: probe.version(name) for name in _DISTRIBUTIONS}
    platform = Platform(
        system=probe.system(),
        machine=probe.machine(),
        processor=probe.processor(),
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        host_memory=HostMemory(total=total, available=available, cgroup_limit=cgroup.limit),
        memlock_limit=None if _may_lock_everything(probe) else probe.memlock(),
        physical_cores=cores.physical,
        logical_cores=cores.logical,
        # Rounded down: threads beyond the quota are throttled and slow the others.
        usable_cores=max(1, min(cores.affinity, cores.affinity if quota is None else int(quota))),
        versions={
            "python": probe.python_version(),
            **{name: version for name, version in versions.items() if version is not None},
        },
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


def _may_lock_everything(probe: PlatformProbe) -> bool:
    """Whether the kernel spares this process the limit, as it does root's as a rule.

    It asks for a capability in the initial user namespace; the same capability inside of a
    rootless container does not count.
    """
    if not has_capability(probe.read_text("/proc/self/status") or "", CAP_IPC_LOCK):
        return False
    return (probe.read_text("/proc/self/uid_map") or "").split() == _INITIAL_NAMESPACE


def _cpu_computes_bf16(probe: PlatformProbe) -> bool:
    for line in (probe.read_text("/proc/cpuinfo") or "").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


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


# -- What training runs on.


@attrs.frozen(kw_only=True)
class Hardware:
    """The accelerator that was chosen and what it can do."""

    accelerator: Accelerator
    devices: tuple[Device, ...] = ()
    bf16: bool
    fp16: bool
    decisions: tuple[Decision, ...] = ()


def choose_hardware(torch: TorchFacts | None, environ: Mapping[str, str]) -> Hardware:
    """Choose what to train on: the best the machine has, or what ``DS_ACCELERATOR`` names.

    The variable is DeepSpeed's, but both engines follow it, so that switching DeepSpeed off does
    not move a run to another device. A name the machine does not have is left for
    ``deepspeed_support`` to refuse.

    Args:
        torch: Facts from torch; ``None`` when it is not installed.
        environ: Environment variables.
    """
    usable = _usable_devices(torch)
    native = next(iter(usable))
    chosen = native
    decisions = list(_missing_cuda(torch, environ))
    requested = environ.get("DS_ACCELERATOR")
    if requested is not None and requested != DEEPSPEED_NAMES[native]:
        chosen = next((name for name in usable if DEEPSPEED_NAMES[name] == requested), native)
        if chosen != native:
            decisions.append(_overridden(native, chosen, usable[native]))
    facts = torch or TorchFacts()
    return Hardware(
        accelerator=chosen,
        devices=usable[chosen],
        bf16=_runs_bf16(chosen, usable[chosen], facts),
        fp16=_runs_fp16(chosen, usable[chosen], facts),
        decisions=tuple(decisions),
    )


def _usable_devices(torch: TorchFacts | None) -> dict[Accelerator, tuple[Device, ...]]:
    """Everything the machine could train on, best first; the CPU is always there."""
    devices: dict[Accelerator, tuple[Device, ...]] = {}
    if torch is not None and torch.cuda_devices:
        devices["rocm" if torch.hip else "cuda"] = torch.cuda_devices
    if torch is not None and torch.xpu_devices:
        devices["xpu"] = torch.xpu_devices
    if torch is not None and torch.mps_device is not None:
        devices["mps"] = (torch.mps_device,)
    devices["cpu"] = ()
    return devices


def _missing_cuda(torch: TorchFacts | None, environ: Mapping[str, str]) -> list[Decision]:
    if torch is None or torch.cuda_error is None or torch.cuda_devices:
        return []
    wanted: Accelerator = "rocm" if torch.hip else "cuda"
    severity: Severity = "warning"
    reason = f"torch was built for {wanted} but found no device: {torch.cuda_error}"
    if environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        severity = "note"
        reason = "CUDA_VISIBLE_DEVICES hides every device"
    return [
        Decision(
            key="platform.accelerator",
            before=wanted,
            after="cpu",
            reason=reason,
            severity=severity,
        )
    ]


def _overridden(native: Accelerator, chosen: Accelerator, unused: tuple[Device, ...]) -> Decision:
    names = ", ".join(device.name for device in unused)
    return Decision(
        key="platform.accelerator",
        before=native,
        after=chosen,
        reason=f"the environment sets DS_ACCELERATOR={DEEPSPEED_NAMES[chosen]}, "
        f"which leaves {names} unused",
        severity="warning",
    )


def _runs_bf16(accelerator: Accelerator, devices: tuple[Device, ...], torch: TorchFacts) -> bool:
    if accelerator == "mps":
        return torch.mps_bf16
    return _at_least(devices, (8, 0))


def _runs_fp16(accelerator: Accelerator, devices: tuple[Device, ...], torch: TorchFacts) -> bool:
    if accelerator == "cpu":
        return torch.cpu_fp16
    # Compute capability 6 has slow fp16, which DeepSpeed refuses.
    return _at_least(devices, (7, 0))


def _at_least(devices: tuple[Device, ...], capability: tuple[int, int]) -> bool:
    """Whether every NVIDIA device is that new; other devices have no capability to fall short."""
    return all(device.capability is None or device.capability >= capability for device in devices)


# -- Whether DeepSpeed can run: an ordered list of reasons why not.


@attrs.frozen(kw_only=True)
class Situation:
    """What the rules look at."""

    system: str
    accelerator: Accelerator
    torch: TorchFacts | None
    deepspeed_version: str | None
    environ: Mapping[str, str]
    allow_rocm: bool = False
    allow_mps: bool = False


_Refusal = tuple[str, "str | None"]
_Rule = Callable[[Situation], "_Refusal | None"]


def deepspeed_support(
    situation: Situation,
) -> tuple[DeepSpeedSupport, tuple[Decision, ...]]:
    """Say whether DeepSpeed can run, with the decisions that follow.

    Args:
        situation: The machine, the installed software and what the user allowed.

    Returns:
        The support, and one decision when DeepSpeed is disabled, allowed by request or put on
        the CPU.
    """
    for rule in _RULES:
        refusal = rule(situation)
        if refusal is not None:
            reason, fix = refusal
            support = DeepSpeedSupport(available=False, reason=reason, fix=fix)
            return support, (_disabled(support),)
    name = DEEPSPEED_NAMES[situation.accelerator]
    support = DeepSpeedSupport(available=True, accelerator=name, reason=_account(situation))
    return support, _allowed(situation, support)


def _foreign_system(situation: Situation) -> _Refusal | None:
    if situation.system in {"Linux", "Darwin"}:
        return None
    fix = "use WSL2, which is Linux" if situation.system == "Windows" else "train on Linux"
    return (
        f"DeepSpeed's offload kernels and asynchronous I/O do not build on {situation.system}",
        fix,
    )


def _no_torch(situation: Situation) -> _Refusal | None:
    if situation.torch is None:
        return "torch is not installed", "pip install torch"
    if situation.torch.import_error is not None:
        return (
            f"torch is installed but cannot be imported: {situation.torch.import_error}",
            "reinstall torch for this machine (pip install --force-reinstall torch)",
        )
    return None


def _macos(situation: Situation) -> _Refusal | None:
    if situation.system != "Darwin":
        return None
    if not situation.allow_mps:
        return (
            f"DeepSpeed is disabled on macOS; {_TRAINS_WITHOUT}",
            f"pass allow_mps=True to try DeepSpeed {OLDEST_DEEPSPEED} or later on MPS",
        )
    if situation.accelerator != "mps":
        return "allow_mps was given, but training does not run on an Apple GPU here", None
    return None


def _rocm(situation: Situation) -> _Refusal | None:
    if situation.accelerator != "rocm" or situation.allow_rocm:
        return None
    return (
        f"DeepSpeed is disabled on ROCm, where zerotune is not tested; {_TRAINS_WITHOUT}",
        "pass allow_rocm=True to try it",
    )


def _not_installed(situation: Situation) -> _Refusal | None:
    if situation.deepspeed_version is not None:
        return None
    return "deepspeed is not installed", f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'"


def _too_old(situation: Situation) -> _Refusal | None:
    # Parsing versions is only needed here, and importing zerotune stays lighter without it.
    from packaging.version import InvalidVersion, Version

    try:
        if Version(situation.deepspeed_version or "") >= Version(OLDEST_DEEPSPEED):
            return None
    except InvalidVersion:
        return None
    return (
        f"deepspeed {situation.deepspeed_version} is too old; {OLDEST_DEEPSPEED} is the oldest",
        f"pip install --upgrade 'deepspeed>={OLDEST_DEEPSPEED}'",
    )


def _contradicting_environment(situation: Situation) -> _Refusal | None:
    requested = situation.environ.get("DS_ACCELERATOR")
    native = DEEPSPEED_NAMES[situation.accelerator]
    if requested is None or requested == native:
        return None
    fix = f"unset DS_ACCELERATOR or set it to {native}"
    if requested not in _DEEPSPEED_ACCELERATORS:
        return f"DS_ACCELERATOR={requested!r} is not a name DeepSpeed knows", fix
    return (
        f"DS_ACCELERATOR={requested} names an accelerator zerotune finds no device for",
        fix,
    )


_RULES: Final[tuple[_Rule, ...]] = (
    _foreign_system,
    _no_torch,
    _macos,
    _rocm,
    _not_installed,
    _too_old,
    _contradicting_environment,
)


def _account(situation: Situation) -> str:
    version = situation.deepspeed_version
    if situation.accelerator == "cpu":
        return f"deepspeed {version} runs on its CPU accelerator (DS_ACCELERATOR=cpu)"
    if situation.accelerator == "rocm":
        return f"deepspeed {version} runs on ROCm, as allow_rocm=True allows"
    if situation.accelerator == "mps":
        return f"deepspeed {version} runs on MPS, as allow_mps=True allows"
    return f"deepspeed {version} runs on {situation.accelerator}"


def _disabled(support: DeepSpeedSupport) -> Decision:
    advice = "" if support.fix is None else f"; {support.fix}"
    return Decision(
        key="platform.deepspeed",
        before=None,
        after="disabled",
        reason=support.reason + advice,
        severity="warning",
    )


def _allowed(situation: Situation, support: DeepSpeedSupport) -> tuple[Decision, ...]:
    if situation.accelerator not in {"cpu", "rocm", "mps"}:
        return ()
    return (
        Decision(
            key="platform.deepspeed",
            before=None,
            after=support.accelerator,
            reason=support.reason,
        ),
    )
