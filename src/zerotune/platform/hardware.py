"""Which accelerator training runs on."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from zerotune.decisions import Decision, Severity
from zerotune.platform.facts import DEEPSPEED_NAMES, Accelerator, Device
from zerotune.platform.probe import TorchFacts


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
    found = _found(torch)
    native = next(iter(found))
    chosen = native
    decisions = list(_missing_cuda(torch, environ))
    requested = environ.get("DS_ACCELERATOR")
    if requested is not None and requested != DEEPSPEED_NAMES[native]:
        chosen = next((name for name in found if DEEPSPEED_NAMES[name] == requested), native)
        if chosen != native:
            decisions.append(_overridden(native, chosen, found[native]))
    facts = torch or TorchFacts()
    return Hardware(
        accelerator=chosen,
        devices=found[chosen],
        bf16=_runs_bf16(chosen, found[chosen], facts),
        fp16=_runs_fp16(chosen, found[chosen], facts),
        decisions=tuple(decisions),
    )


def _found(torch: TorchFacts | None) -> dict[Accelerator, tuple[Device, ...]]:
    """Everything the machine could train on, best first; the CPU is always there."""
    found: dict[Accelerator, tuple[Device, ...]] = {}
    if torch is not None and torch.cuda_devices:
        found["rocm" if torch.hip else "cuda"] = torch.cuda_devices
    if torch is not None and torch.xpu_devices:
        found["xpu"] = torch.xpu_devices
    if torch is not None and torch.mps_device is not None:
        found["mps"] = (torch.mps_device,)
    found["cpu"] = ()
    return found


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
