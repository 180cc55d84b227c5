"""Resolve a plan: apply every rule once, fill in all values, choose optimizer and engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import attrs

from zerotune.decisions import Decision, Log, raise_all
from zerotune.errors import OptimizerError, ZeroTuneError
from zerotune.plan.context import Context, DeviceUpdate, EngineName, Streaming
from zerotune.plan.optimizer.capability import Situation
from zerotune.plan.optimizer.choose import BY_CHOICE, choose
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.resolve.case import Case
from zerotune.plan.resolve.engine import filled, prepared, with_engine, without_inactive_offload
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules.rule import Rule
from zerotune.plan.rules.table import FIRST, REPAIRS, check_plan, findings_of
from zerotune.plan.section import (
    SectionT,
    evolved,
)
from zerotune.plan.settings import Settings


def resolve(
    requested: Settings,
    context: Context,
    *,
    streamed: bool | Streaming | None = None,
    engine: EngineName | None = None,
    update: DeviceUpdate | None = None,
    resolver: OptimizerResolver | None = None,
) -> Resolved:
    """Resolve a plan: apply every rule once, fill in all values, choose optimizer and engine."""
    log = Log(decisions=[*requested.decisions])
    case = prepared(requested, context, log)
    for each in FIRST:
        case = attrs.evolve(case, plan=_repaired(case, (each,), log))
    case = attrs.evolve(case, plan=without_inactive_offload(case.plan))
    plan, by_weight = _repaired(case, REPAIRS, log), update is not None
    resolver = resolver or OptimizerResolver()
    resolved = filled(requested, plan, case, log, resolver, by_weight=by_weight)
    if streamed is None and engine is None and update is None:
        return resolved
    resolved = with_engine(attrs.evolve(resolved, streamed=streamed, engine=engine, update=update))
    if by_weight and resolved.update is None:
        return _chosen_for_host(resolved, resolver)
    return resolved


def _chosen_for_host(resolved: Resolved, resolver: OptimizerResolver) -> Resolved:
    """Choose the optimizer of a plan whose update on the device cannot run."""
    where = resolved.plan, resolved.context, resolved.precision
    try:
        return resolved.with_choice(resolver.choose(*where, by_weight=False))
    except OptimizerError as error:
        reason = next(each.reason for each in resolved.decisions if each.key == "update")
        reason = f"{error.reason}; it cannot be updated on the device: {reason}"
        raise OptimizerError(reason, error.fix, error.key, error.value, edits=error.edits) from None


def _repaired(case: Case, rules: tuple[Rule, ...], log: Log) -> Settings:
    """Return the plan with the corrections of the rules; raise their errors."""
    plan, findings = case.plan, findings_of(case, rules)
    raise_all([finding.as_error() for finding in findings if finding.severity == "error"])
    for finding in findings:
        log.decisions.append(finding)
        if finding.after is not finding.before:
            plan = _with_setting(plan, finding.key.split("."), finding.after)
    return plan


def _with_setting(section: SectionT, path: list[str], value: Any) -> SectionT:
    name, *below = path
    new = _with_setting(getattr(section, name), below, value) if below else value
    return evolved(section, **{name: new})


# -- All errors of a plan: from the rules, from resolution, and from the optimizer's choice.


@attrs.frozen(kw_only=True)
class Inspection:
    """Findings about a plan, returned by ``DeepSpeedPlan.inspect``."""

    findings: tuple[Decision, ...]
    """Findings of the rules, errors first."""
    refusals: tuple[Decision, ...] = ()
    """Errors of later steps; ``rule`` names the step, ``"resolve"`` or ``"optimizer"``."""
    resolved: Resolved | None = None
    """The resolved plan; ``None`` if there is an error."""

    def _besides(self, mistakes: Collection[ZeroTuneError]) -> Inspection:
        """Return the errors that ``mistakes`` neither contain nor cause."""
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
    plan: Settings,
    context: Context,
    *,
    resolve_in: Context | None,
    mistakes: Collection[ZeroTuneError] = (),
    update: DeviceUpdate | None = None,
) -> Inspection:
    """Return all findings about a plan, as ``DeepSpeedPlan.inspect`` does."""
    findings = check_plan(plan, context)
    where = resolve_in or context
    told = {finding.key for finding in findings if finding.severity == "error"}
    refusals: dict[str, Decision] = {}
    if not mistakes and not told:
        try:
            return Inspection(findings=findings, resolved=resolve(plan, where, update=update))
        except ZeroTuneError as error:
            for each in error.each():
                step = BY_CHOICE if (each.key or "").startswith(_CHOSEN) else "resolve"
                refusals[each.key or ""] = Decision.of(each, rule=step)
    # Errors that hold in any plan: those of resolution may have hidden them.
    try:
        choose(plan, Situation(), run=where.run, model=where.model)
    except ZeroTuneError as error:
        for each in error.each():
            if each.key not in told:
                refusals.setdefault(each.key or "", Decision.of(each, rule=BY_CHOICE))
    found = Inspection(findings=findings, refusals=tuple(refusals.values()))
    return found._besides(mistakes) if mistakes else found


_CHOSEN: Final = ("optimizer", "scheduler")
