"""Everything that is wrong with a plan: what rules find, what resolving and settling refuse.

The rules are this layer's; what optimizer and schedule will run is settled by ``zerotune.optim``,
which lies above it. So whoever asks hands over how they are settled, and whatever the rules
refuse, the optimizer and the schedule are looked at as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs

from zerotune.decisions import Decision
from zerotune.errors import ZeroTuneError
from zerotune.plan.model import Context, DeepSpeedPlan, ResolvedPlan
from zerotune.plan.rules import check_plan, resolve


@attrs.frozen(kw_only=True)
class Inspection:
    """What was found in a plan. Made by ``DeepSpeedPlan.inspect``."""

    findings: tuple[Decision, ...]
    """Of the rules, errors first."""
    refusals: tuple[Decision, ...] = ()
    """What else stops it; ``rule`` is the step, ``"resolve"`` or ``"optimizer"``."""
    resolved: ResolvedPlan | None = None
    """What will run; ``None`` when something stops it."""
    settled: tuple[Decision, ...] = ()
    """What settling the optimizer and the schedule decided."""

    def _besides(self, mistakes: Collection[ZeroTuneError]) -> Inspection:
        """What is refused besides ``mistakes``, and not because of what they took away."""
        keys = [error.key for error in mistakes if error.key]
        sections = {key.partition(".")[0] for key in keys}
        findings = [
            finding
            for finding in self.findings
            if finding.severity == "error"
            and not any(f"{finding.key}.".startswith(f"{key}.") for key in keys)
            and not any(f"{key}.".startswith(f"{finding.key}.") for key in keys)
        ]
        refusals = [
            refusal for refusal in self.refusals if refusal.key.partition(".")[0] not in sections
        ]
        return Inspection(findings=tuple(findings), refusals=tuple(refusals))


def inspect(
    plan: DeepSpeedPlan,
    context: Context,
    *,
    resolve_in: Context | None,
    settle: Callable[[ResolvedPlan], ResolvedPlan],
    mistakes: Collection[ZeroTuneError] = (),
) -> Inspection:
    """See ``DeepSpeedPlan.inspect``."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    refusals: list[Decision] = []
    if not mistakes and not any(finding.severity == "error" for finding in findings):
        step = "resolve"
        try:
            resolved = resolve(plan, where)
            step = "optimizer"
            settled = settle(resolved)
        except ZeroTuneError as error:
            refusals += [Decision.of(each, rule=step) for each in error.each()]
        else:
            decided = settled.decisions[len(resolved.decisions) :]
            return Inspection(findings=findings, resolved=settled, settled=decided)
    told = {finding.key for finding in findings if finding.severity == "error"}
    for refusal in _settled_apart(plan, where, settle):
        if refusal.key not in {*told, *(one.key for one in refusals)}:
            refusals.append(refusal)
    found = Inspection(findings=findings, refusals=tuple(refusals))
    return found._besides(mistakes) if mistakes else found


def _settled_apart(
    plan: DeepSpeedPlan, context: Context, settle: Callable[[ResolvedPlan], ResolvedPlan]
) -> Iterator[Decision]:
    """What is wrong with the optimizer, and with the schedule, wherever they would run."""
    both = DeepSpeedPlan(optimizer=plan.optimizer, scheduler=plan.scheduler)
    for alone in (both, DeepSpeedPlan(scheduler=plan.scheduler)):
        try:
            settle(resolve(alone, context))
        except ZeroTuneError as error:
            yield from (Decision.of(each, rule="optimizer") for each in error.each())
        else:
            return
