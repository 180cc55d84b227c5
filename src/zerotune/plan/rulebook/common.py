"""What several subjects ask a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zerotune.plan.kinds import AUTO, is_integer, is_number
from zerotune.plan.rules import Finding, Report, RuleContext
from zerotune.plan.sections import OffloadSection

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

Findings = Iterator[Finding]


def offload_section(plan: DeepSpeedPlan, part: str) -> OffloadSection | None:
    """``offload_optimizer`` or ``offload_param`` as written."""
    zero = plan.zero_optimization
    section: OffloadSection | None = getattr(zero, f"offload_{part}") if zero else None
    return section


def active(section: OffloadSection | None) -> bool:
    """Whether the section names a device to offload to."""
    return section is not None and section.device not in (None, "none", AUTO)


def zero_extra(plan: DeepSpeedPlan, key: str) -> Any:
    """A key of ``zero_optimization`` that zerotune passes through; ``None``: not written."""
    zero = plan.zero_optimization
    return zero.extra.get(key) if zero else None


def optimizer_name(plan: DeepSpeedPlan) -> str:
    """Letters of the optimizer's name in lower case; empty when none is written."""
    name = plan.optimizer.type if plan.optimizer else None
    return re.sub(r"[^a-z]", "", (name or "").lower())


def number(value: Any) -> float | None:
    """``value`` when it is a finite number."""
    return float(value) if is_number(value) else None


def integer(value: Any) -> int | None:
    """``value`` when it is a whole number."""
    return int(value) if is_integer(value) else None


def clips(plan: DeepSpeedPlan, context: RuleContext) -> bool:
    """Whether gradients are clipped: unless something says 0, zerotune clips."""
    launched = plan.launch.gradient_clipping if plan.launch else None
    sources = (plan.gradient_clipping, context.run.gradient_clipping, launched)
    first = next((value for value in map(number, sources) if value is not None), 1.0)
    return first != 0


def set_twice(plan: DeepSpeedPlan, report: Report, key: str, places: dict[str, Any]) -> Findings:
    """A finding for each of ``places`` that contradicts the top-level ``key``."""
    first = getattr(plan, key)
    for place, second in places.items():
        if is_number(first) and is_number(second) and first != second:
            yield report(
                place,
                second,
                f"{key} is set to {first} as well, and that one is used",
                f"keep only {key}",
            )


def older_than_removal(context: RuleContext) -> bool:
    """Whether the installed DeepSpeed is older than 0.19, which removed much."""
    version = context.platform.versions.get("deepspeed", "") if context.platform else ""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < (0, 19)
