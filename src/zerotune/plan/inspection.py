"""Everything that is wrong with a plan: what rules find, what resolving and settling refuse.

The rules are this layer's; what optimizer and schedule will run is settled by ``zerotune.optim``,
which lies above it. So whoever asks hands over how they are settled, and whatever the rules
refuse, the optimizer and the schedule are looked at as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
    mistakes: Collection[ZeroTuneError] = (),
) -> Inspection[ResolvedT]:
    """See ``DeepSpeedPlan.inspect``."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    refusals: list[Refusal] = []
    if not mistakes and not any(finding.severity == "error" for finding in findings):
        step = "resolve"
        try:
            resolved = resolve(plan, where, into=into)
            step = "optimizer"
            settled = settle(resolved)
        except ZeroTuneError as error:
            refusals += [Refusal(step=step, error=each) for each in error.each()]
        else:
            decided = settled.decisions[len(resolved.decisions) :]
            return Inspection(findings=findings, resolved=settled, settled=decided)
    told = {finding.key for finding in findings if finding.severity == "error"}
    for refusal in _settled_apart(plan, where, settle, into):
        same = [one for one in refusals if one.error.key == refusal.error.key]
        refusals += [] if same or refusal.error.key in told else [refusal]
    found = Inspection[ResolvedT](findings=findings, refusals=tuple(refusals))
    return _beside(found, mistakes) if mistakes else found


def _settled_apart(
    plan: PlanValue,
    context: Context,
    settle: Callable[[ResolvedT], ResolvedT],
    into: type[ResolvedT],
) -> Iterator[Refusal]:
    """What is wrong with the optimizer, and with the schedule, wherever they would run."""
    both = type(plan)(optimizer=plan.optimizer, scheduler=plan.scheduler)
    for alone in (both, type(plan)(scheduler=plan.scheduler)):
        try:
            settle(resolve(alone, context, into=into))
        except ZeroTuneError as error:
            yield from (Refusal(step="optimizer", error=each) for each in error.each())
        else:
            return


def _beside(
    found: Inspection[ResolvedT], mistakes: Collection[ZeroTuneError]
) -> Inspection[ResolvedT]:
    """What is refused besides ``mistakes``, and not because of what they took away."""
    keys = [error.key for error in mistakes if error.key]
    sections = {key.partition(".")[0] for key in keys}
    findings = [
        finding
        for finding in found.findings
        if finding.severity == "error"
        and not any(f"{finding.key}.".startswith(f"{key}.") for key in keys)
        and not any(f"{key}.".startswith(f"{finding.key}.") for key in keys)
    ]
    refusals = [
        refusal
        for refusal in found.refusals
        if (refusal.error.key or "").partition(".")[0] not in sections
    ]
    return Inspection(findings=tuple(findings), refusals=tuple(refusals))
