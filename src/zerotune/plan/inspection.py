"""Everything that is wrong with a plan: what rules find, what resolving and settling refuse.

The rules are this layer's; which optimizers and schedules exist is known to ``zerotune.optim``,
which lies above it. So whoever asks hands over how they are settled, and whatever the rules
refuse, the optimizer and the schedule are looked at as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import attrs

from zerotune.decisions import Decision
from zerotune.errors import ZeroTuneError
from zerotune.plan.model import Context, PlanValue, ResolvedT
from zerotune.plan.resolve import resolve
from zerotune.plan.rules import Finding, check_plan


@attrs.frozen(kw_only=True)
class Refusal:
    """An error of a later step than the rules."""

    step: str
    """``"resolve"`` or ``"optimizer"``."""
    error: ZeroTuneError


@attrs.frozen(kw_only=True)
class Inspection(Generic[ResolvedT]):
    """What was found in a plan. Made by ``DeepSpeedPlan.inspect``."""

    findings: tuple[Finding, ...]
    """Of the rules, errors first."""
    refusals: tuple[Refusal, ...] = ()
    """What else stops it."""
    resolved: ResolvedT | None = None
    """What will run; ``None`` when something stops it."""
    settled: tuple[Decision, ...] = ()
    """What settling the optimizer and the schedule decided."""


def inspect(
    plan: PlanValue,
    context: Context,
    *,
    resolve_in: Context | None,
    settle: Callable[[ResolvedT], ResolvedT],
    into: type[ResolvedT],
) -> Inspection[ResolvedT]:
    """See ``DeepSpeedPlan.inspect``."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    refusals: tuple[Refusal, ...] = ()
    if not any(finding.severity == "error" for finding in findings):
        try:
            resolved = resolve(plan, where, into=into)
        except ZeroTuneError as error:
            refusals = (Refusal(step="resolve", error=error),)
        else:
            return _settled(findings, resolved, settle)
    return Inspection(
        findings=findings, refusals=(*refusals, *_settled_alone(plan, where, settle, into))
    )


def _settled(
    findings: tuple[Finding, ...], resolved: ResolvedT, settle: Callable[[ResolvedT], ResolvedT]
) -> Inspection[ResolvedT]:
    try:
        settled = settle(resolved)
    except ZeroTuneError as error:
        refusal = Refusal(step="optimizer", error=error)
        return Inspection(findings=findings, refusals=(refusal,))
    decided = settled.decisions[len(resolved.decisions) :]
    return Inspection(findings=findings, resolved=settled, settled=decided)


def _settled_alone(
    plan: PlanValue,
    context: Context,
    settle: Callable[[ResolvedT], ResolvedT],
    into: type[ResolvedT],
) -> tuple[Refusal, ...]:
    """What is wrong with the optimizer and the schedule wherever they would run."""
    alone = type(plan)(optimizer=plan.optimizer, scheduler=plan.scheduler)
    try:
        settle(resolve(alone, context, into=into))
    except ZeroTuneError as error:
        return (Refusal(step="optimizer", error=error),)
    return ()
