"""Which precision trains: what was asked, and what the platform can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from zerotune.decisions import Decision
from zerotune.errors import PlanConflictError
from zerotune.plan.facts import RunFacts
from zerotune.plan.kinds import AUTO, Choice
from zerotune.plan.sections import (
    PRECISION_SYNONYMS,
    PRECISIONS,
    Bf16Section,
    Fp16Section,
)

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.filling import Filler
    from zerotune.platform import Platform

_RUN_KIND = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)


def decide_precision(
    plan: DeepSpeedPlan, *, run: RunFacts, platform: Platform
) -> tuple[str, list[Decision]]:
    """The precision that trains: ``"bf16"``, ``"fp16"`` or ``"fp32"``, and why.

    What the configuration enables stands. ``"auto"`` is filled from the run, then from the
    launcher's file, then from the platform: bf16 where the hardware computes in it, else fp32;
    fp16 only when asked, because it needs loss scaling.

    Raises:
        InvalidValueError: ``run.mixed_precision`` is not a precision.
        PlanConflictError: The platform cannot compute in the precision asked for.
    """
    written = _written(plan)
    launched = plan.launch.mixed_precision if plan.launch else None
    decisions: list[Decision] = []
    enabled = next((name for name, state in written.items() if state is True), None)
    for asked, who in ((_asked_by_run(run), "run"), (launched, "launcher's file")):
        if asked in (None, AUTO) or asked == enabled:
            continue
        if enabled is not None or written.get(asked) is False:
            decisions.append(_overruled(asked, enabled or "fp32", who))
            continue
        decisions.append(_chosen(asked, f"the {who} asks for it"))
        return _adapt(asked, who, platform, decisions), decisions
    if enabled is not None:
        return _adapt(enabled, "configuration", platform, decisions), decisions
    if AUTO not in (*written.values(), launched, run.mixed_precision):
        decisions.append(_chosen("fp32", "no precision is on, which DeepSpeed reads as fp32"))
        return "fp32", decisions
    allowed = written["bf16"] is not False
    best = "bf16" if allowed and platform.bf16 and platform.native_bf16 else "fp32"
    reason = _what_it_computes(platform) if allowed else "the configuration switches bf16 off"
    decisions.append(_chosen(best, reason))
    return best, decisions


def _what_it_computes(platform: Platform) -> str:
    who = f"this platform ({platform.accelerator})"
    if platform.bf16 and not platform.native_bf16:
        # Forward and backward of one layer on an AVX2 core: linear 9.5, convolution 45 times.
        return (
            f"{who} has no bf16 arithmetic (AVX512_BF16, AMX) and would emulate it, many times"
            " slower than fp32; write bf16.enabled = true to rehearse bf16"
        )
    return f"{who} {'can' if platform.bf16 else 'cannot'} compute in bf16"


def fill_precision(
    plan: DeepSpeedPlan, precision: str, filler: Filler
) -> tuple[Bf16Section, Fp16Section]:
    """The ``bf16`` and ``fp16`` sections, every key explicit."""
    bf16 = attrs.evolve(plan.bf16 or Bf16Section(), enabled=precision == "bf16")
    fp16 = attrs.evolve(plan.fp16 or Fp16Section(), enabled=precision == "fp16")
    for name in ("immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
        bf16 = _quiet_fill(bf16, "bf16", name, False, filler)
    bf16 = _quiet_fill(bf16, "bf16", "check_grad_overflow", True, filler)
    for name, value in _FP16_DEFAULTS.items():
        fp16 = _quiet_fill(fp16, "fp16", name, value, filler)
    return bf16, fp16


_FP16_DEFAULTS: dict[str, Any] = {
    "auto_cast": False,
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}


def _quiet_fill(section: Any, path: str, name: str, value: Any, filler: Filler) -> Any:
    # The keys of a precision that is off are written too, but nobody needs to read why.
    if section.enabled:
        return filler.fill(section, path, name, value)
    if getattr(section, name) in (None, AUTO):
        return attrs.evolve(section, **{name: value})
    return section


def _asked_by_run(run: RunFacts) -> str | None:
    if run.mixed_precision is None:
        return None
    return str(_RUN_KIND.read(run.mixed_precision, "run.mixed_precision")[0])


def _written(plan: DeepSpeedPlan) -> dict[str, Any]:
    return {
        "bf16": plan.bf16.enabled if plan.bf16 else None,
        "fp16": plan.fp16.enabled if plan.fp16 else None,
    }


def _overruled(asked: str, used: str, who: str) -> Decision:
    return Decision(
        key="precision",
        before=asked,
        after=used,
        reason=f"the configuration's own precision stands before that of the {who}",
        severity="warning",
    )


def _adapt(precision: str, who: str, platform: Platform, decisions: list[Decision]) -> str:
    works = {"bf16": platform.bf16, "fp16": platform.fp16, "fp32": True}
    if works[precision]:
        return precision
    if precision == "fp16" and platform.accelerator == "cpu" and platform.bf16:
        # A CPU run is a rehearsal of a GPU configuration: bf16 takes the same memory, and
        # DeepSpeed's CPU accelerator refuses fp16 outright.
        decisions.append(
            Decision(
                key="fp16.enabled",
                before=True,
                after=False,
                reason="DeepSpeed's CPU accelerator has no fp16 on this machine; bf16 is used,"
                " which takes the same memory and needs no loss scaling",
                severity="warning",
            )
        )
        return "bf16"
    possible = [name for name, can in works.items() if can]
    raise PlanConflictError(
        f"the {who} asks for it, but this platform ({platform.accelerator}) cannot compute in it",
        key=f"{precision}.enabled",
        value=True,
        fix=f'use {" or ".join(possible)}, or write "{AUTO}"',
    )


def _chosen(precision: str, reason: str) -> Decision:
    return Decision(key="precision", before=None, after=precision, reason=reason)
