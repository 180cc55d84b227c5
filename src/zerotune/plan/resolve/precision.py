"""The training precision, from the requested precision and the platform."""

from __future__ import annotations

from typing import Any

from zerotune.decisions import Decision, Log, precedence
from zerotune.errors import (
    PlanConflictError,
    writes,
)
from zerotune.plan.context import RunFacts
from zerotune.plan.resolve.batch import overruled
from zerotune.plan.sections import (
    PRECISION_SYNONYMS,
    PRECISIONS,
    only_precision,
)
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO, Choice
from zerotune.platform.facts import Platform

_RUN_KIND = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)


def decide_precision(
    plan: Settings, *, run: RunFacts, platform: Platform
) -> tuple[str, list[Decision]]:
    """Return the training precision, ``"bf16"``, ``"fp16"`` or ``"fp32"``, with its decisions.

    An enabled precision in the configuration takes precedence. ``"auto"`` becomes the precision of
    the run, else that of the launcher's file, else bf16 if the hardware has bf16 arithmetic, else
    fp32. fp16 is never chosen automatically, because it needs loss scaling.
    """
    written = enabled_precisions(plan)
    launched = plan.launch.mixed_precision if plan.launch else None
    log = Log()
    enabled = next((name for name, state in written.items() if state is True), None)
    said = run.mixed_precision
    if said is not None:
        said, _ = _RUN_KIND.read(said, "run.mixed_precision")
    for asked, who in precedence(run=said, launched=launched):
        if asked == AUTO:
            continue
        if enabled is not None or written.get(asked) is False:
            stands = f"precision takes precedence over that of {who}"
            overruled(log, "precision", asked, enabled or "fp32", stands)
            continue
        log.decide("precision", None, asked, f"requested by {who}")
        return _adapt(asked, who, platform, log), log.decisions
    if enabled is not None:
        return _adapt(enabled, "the configuration", platform, log), log.decisions
    if AUTO not in (*written.values(), launched, run.mixed_precision):
        log.decide(
            "precision", None, "fp32", "no precision is enabled, which DeepSpeed treats as fp32"
        )
        return "fp32", log.decisions
    allowed = written["bf16"] is not False
    best = "bf16" if allowed and platform.bf16 and platform.native_bf16 else "fp32"
    reason = _what_it_computes(platform) if allowed else "the configuration disables bf16"
    log.decide("precision", None, best, reason)
    return best, log.decisions


def _what_it_computes(platform: Platform) -> str:
    who = f"this platform ({platform.accelerator})"
    if platform.bf16 and not platform.native_bf16:
        # Forward and backward on an AVX2 core: 9.5 times slower (linear), 45 times (convolution).
        return (
            f"{who} lacks bf16 arithmetic (AVX512_BF16, AMX), and emulated bf16 is many "
            "times slower than fp32; set bf16.enabled = true to test bf16"
        )
    return f"{who} {'can' if platform.bf16 else 'cannot'} compute in bf16"


def enabled_precisions(plan: Settings) -> dict[str, Any]:
    """Return ``enabled`` of both precisions as written."""
    return {
        "bf16": plan.bf16.enabled if plan.bf16 else None,
        "fp16": plan.fp16.enabled if plan.fp16 else None,
    }


def rehearses_in_bf16(platform: Platform) -> bool:
    """Whether bf16 replaces fp16, because the accelerator is a CPU with bf16 but no fp16."""
    return platform.accelerator == "cpu" and platform.bf16 and not platform.fp16


def _adapt(precision: str, who: str, platform: Platform, log: Log) -> str:
    works = {"bf16": platform.bf16, "fp16": platform.fp16, "fp32": True}
    if works[precision]:
        return precision
    if precision == "fp16" and rehearses_in_bf16(platform):
        # A CPU run is a rehearsal of a GPU configuration: bf16 takes the same memory, and
        # DeepSpeed's CPU accelerator refuses fp16 outright.
        log.decide(
            "fp16.enabled",
            True,
            False,
            "DeepSpeed's CPU accelerator does not support fp16 on this machine, so bf16 is "
            "used, which needs the same memory and no loss scaling",
            "warning",
        )
        return "bf16"
    possible = [name for name, can in works.items() if can]
    raise PlanConflictError(
        f"requested by {who}, but this platform ({platform.accelerator}) does not support this "
        "precision",
        f'use {" or ".join(possible)}, or "{AUTO}"',
        f"{precision}.enabled",
        True,
        edits=[*map(only_precision, possible), *writes(AUTO)],
    )
