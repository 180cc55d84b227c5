"""Plans in Markdown, for issues, reports and documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zerotune.decisions import Decision
from zerotune.errors import UNSET
from zerotune.plan.explaining import plan_rows, resolved_rows, told_and_defaults
from zerotune.plan.markdown import Code, cell, table
from zerotune.plan.rules import RuleContext, check_plan

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.explaining import Row
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.plan.rules import Finding
    from zerotune.platform import Platform


def plan_markdown(
    plan: DeepSpeedPlan, *, world_size: int = 1, platform: Platform | None = None
) -> str:
    """What a plan asks for, what reading changed and what the rules find, as Markdown."""
    findings = plan.check(world_size=world_size, platform=platform)
    return _document(f"Plan from {plan.source}", plan_rows(plan), plan.decisions, findings)


def resolved_markdown(resolved: ResolvedPlan) -> str:
    """What will run, every decision with its reason, and what the rules find, as Markdown."""
    context = RuleContext(
        world_size=resolved.world_size,
        platform=resolved.platform,
        model=resolved.model,
        run=resolved.run,
        uses_deepspeed=resolved.uses_deepspeed,
    )
    findings = check_plan(resolved.requested, context)
    return _document(
        f"Resolved plan from {resolved.requested.source}",
        resolved_rows(resolved),
        resolved.decisions,
        # Errors cannot be here, and warnings are decisions already.
        [finding for finding in findings if finding.severity == "note"],
    )


def value_text(value: Any) -> str:
    """A value of a configuration as JSON spells it; nothing where there is none."""
    if value is None or value is UNSET:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _document(
    title: str,
    rows: Iterable[Row],
    decisions: Iterable[Decision],
    findings: Iterable[Finding],
) -> str:
    parts = [f"# {cell(title)}", table(("setting", "value"), rows)]
    told, defaults = told_and_defaults(decisions)
    if told:
        rows_told = [_decision_row(one) for one in told]
        parts += ["## Decisions", table(("", "setting", "from", "to", "why"), rows_told)]
    if defaults:
        parts += [
            "## DeepSpeed's defaults, written because defaults move",
            table(("setting", "value"), [_default_row(one) for one in defaults]),
        ]
    found = [_finding_row(finding) for finding in findings]
    if found:
        header = ("", "rule", "setting", "value", "why", "fix")
        parts += ["## Findings", table(header, found)]
    return "\n\n".join(parts) + "\n"


def _decision_row(decision: Decision) -> tuple[str, ...]:
    return (
        decision.severity,
        Code(decision.key),
        Code(value_text(decision.before)),
        Code(value_text(decision.after)),
        decision.reason,
    )


def _default_row(decision: Decision) -> tuple[str, ...]:
    return Code(decision.key), Code(value_text(decision.after))


def _finding_row(finding: Finding) -> tuple[str, ...]:
    return (
        finding.severity,
        finding.rule,
        Code(finding.key),
        Code(value_text(finding.value)),
        finding.reason,
        finding.fix,
    )
