"""All rules, in the order they are checked."""

from __future__ import annotations

from typing import Final

import attrs

from zerotune.decisions import Decision, name_of, worst_first
from zerotune.plan.context import Context
from zerotune.plan.resolve.case import Case
from zerotune.plan.rules import choice, offload, rows, training, zero
from zerotune.plan.rules.rule import Rule
from zerotune.plan.settings import Settings

# Their statements about DeepSpeed come from the code of 0.19.8, or from runs with it.

RULES: Final = (
    *(
        each
        for module in (training, offload, choice, zero)
        for each in vars(module).values()
        if isinstance(each, Rule)
    ),
    *rows.SETTING_RULES,
)
"""Every rule, in the order they are checked: as they are written."""
FIRST: Final = (zero.stage_auto, offload.offload_without_device)
"""Rules whose corrections other rules depend on, applied first."""
REPAIRS: Final = tuple(
    each
    for each in RULES
    if each.severity != "note" and not each.resolved_elsewhere and each not in FIRST
)
"""Other rules that reject a plan or change it during resolution."""


def all_rules() -> tuple[Rule, ...]:
    """Return all rules in the order of checking."""
    return RULES


def check_plan(plan: Settings, context: Context) -> tuple[Decision, ...]:
    """Return all findings of the rules: errors first, then in the order of the rules."""
    return findings_of(Case(plan=plan, context=context), RULES)


def findings_of(case: Case, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    """Return the findings of some rules, errors first."""
    findings = [finding for each in rules for finding in each.find(case)]
    names = case.plan.names
    if names:
        findings = [attrs.evolve(each, written=name_of(each.key, names)) for each in findings]
    return tuple(worst_first(findings))
