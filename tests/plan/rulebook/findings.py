"""Findings of one rule in a configuration."""

from __future__ import annotations

from typing import Any

from zerotune.plan import DeepSpeedPlan
from zerotune.plan.context import Context
from zerotune.plan.rules.rule import Finding
from zerotune.plan.rules.table import all_rules
from zerotune.plan.sections import LaunchSection

RULES = {rule.id: rule for rule in all_rules()}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def read(config: dict[str, Any], **launch: Any) -> DeepSpeedPlan:
    plan = DeepSpeedPlan.from_dict(config)
    if not launch:
        return plan
    import attrs

    return attrs.evolve(plan, launch=LaunchSection(**launch))


def find(rule: str, plan: DeepSpeedPlan | dict[str, Any], **context: Any) -> list[Finding]:
    if isinstance(plan, dict):
        plan = DeepSpeedPlan.from_dict(plan)
    return RULES[rule](plan, Context(**context))


def one(rule: str, plan: DeepSpeedPlan | dict[str, Any], **context: Any) -> Finding:
    (finding,) = find(rule, plan, **context)
    assert finding.rule == rule
    assert finding.severity == RULES[rule].severity
    assert finding.reason
    assert finding.fix
    return finding
