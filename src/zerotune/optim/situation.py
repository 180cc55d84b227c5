"""Where an optimizer is to run: everything a capability or an implementation depends on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from zerotune.plan.resolved import ResolvedPlan


@attrs.frozen(kw_only=True)
class Situation:
    """Engine, stage, offload, precision, accelerator and versions."""

    uses_deepspeed: bool = True
    """``False`` for the plain engine."""
    stage: int = 0
    """ZeRO stage; 0 without DeepSpeed."""
    offload: str = "none"
    """Where the optimizer states are: ``"none"``, ``"cpu"`` or ``"nvme"``."""
    precision: str = "fp32"
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    accelerator: str = "cpu"
    """Accelerator DeepSpeed runs on (``"cuda"``, ``"cpu"``, ``"xpu"``, ``"mps"``); the platform's
    own for the plain engine."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Installed versions by package."""
    allow_untested: bool | None = None
    """``zero_allow_untested_optimizer`` as the configuration says; ``None`` when it does not."""
    force_cpu: bool | None = None
    """``zero_force_ds_cpu_optimizer`` as the configuration says; ``None`` when it does not."""
    bf16_states: bool = False
    """Whether ``bf16.bf16_optimizer_states`` keeps the states in bf16."""
    packages: frozenset[str] | None = None
    """Optional packages that are installed; ``None``: not looked at, none is missed."""
    world_size: int = 1
    """Number of processes."""
    zenflow: bool = False
    """Whether ``zero_optimization.zenflow`` replaces the CPU optimizer."""

    @classmethod
    def of(cls, resolved: ResolvedPlan) -> Situation:
        """Read the situation off a resolved plan."""
        platform = resolved.platform
        accelerator: str = platform.accelerator
        if resolved.uses_deepspeed and platform.deepspeed.accelerator:
            accelerator = platform.deepspeed.accelerator
        zero = resolved.plan.zero_optimization
        bf16 = resolved.plan.bf16
        return cls(
            uses_deepspeed=resolved.uses_deepspeed,
            stage=resolved.stage,
            offload=resolved.offload_optimizer if resolved.uses_deepspeed else "none",
            precision=resolved.precision,
            accelerator=accelerator,
            versions={**optional_versions(), **platform.versions},
            # The resolved plan writes every key; only the request tells what the user wrote.
            allow_untested=_flag(resolved.requested.zero_allow_untested_optimizer),
            force_cpu=_flag(resolved.requested.zero_force_ds_cpu_optimizer),
            bf16_states=resolved.precision == "bf16"
            and bf16 is not None
            and bf16.bf16_optimizer_states is True,
            packages=installed_packages(),
            world_size=resolved.world_size,
            zenflow=zero is not None and bool(zero.extra.get("zenflow")),
        )

    @property
    def offloaded(self) -> bool:
        """Whether the update runs on the CPU while the model is elsewhere."""
        return self.uses_deepspeed and self.offload != "none"

    @property
    def sharded(self) -> bool:
        """Whether ZeRO hands the optimizer flat partitions."""
        return self.uses_deepspeed and self.stage >= 1

    def before(self, package: str, *release: int) -> bool:
        """Whether the installed ``package`` is older than ``release``; ``False`` when unknown."""
        found = release_of(self.versions.get(package, ""))
        return bool(found) and found < release

    def __str__(self) -> str:
        if not self.uses_deepspeed:
            return f"the plain engine on {self.accelerator}"
        place = f"stage {self.stage}, optimizer offload {self.offload}, {self.precision}"
        return f"DeepSpeed on {self.accelerator}, {place}"


OPTIONAL_PACKAGES: Final = ("mup", "bitsandbytes", "torchao", "prodigyopt", "schedulefree")


def installed_packages() -> frozenset[str]:
    """Which of the optional packages can be found, without importing any."""
    return frozenset(name for name in OPTIONAL_PACKAGES if find_spec(name) is not None)


def optional_versions() -> dict[str, str]:
    """Versions of those of them that were installed as distributions."""
    found = {}
    for name in OPTIONAL_PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def release_of(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"0.19.8+cpu"`` becomes ``(0, 19, 8)``."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
