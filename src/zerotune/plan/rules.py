"""The rules a plan is checked against: one function each, with an id, a severity and a fix.

An *error* stops ``resolve``; a *warning* becomes a decision of the resolved plan; a *note* is
only reported by ``DeepSpeedPlan.check``. ``RULES`` is the table the documentation is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs

from zerotune.decisions import Decision
from zerotune.errors import UNSET, InvalidValueError, PlanConflictError, PlanError
from zerotune.plan.facts import ModelFacts, RunFacts
from zerotune.plan.kinds import is_integer

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.platform import Platform

RuleSeverity = Literal["error", "warning", "note"]

_ORDER: dict[RuleSeverity, int] = {"error": 0, "warning": 1, "note": 2}


def check_world_size(world_size: Any) -> None:
    """Raise ``InvalidValueError`` unless that many ranks can train."""
    if not is_integer(world_size) or world_size < 1:
        raise InvalidValueError(
            "must be a whole number of at least 1",
            key="world_size",
            value=world_size,
            fix="pass the number of processes that train together",
        )


def _check_world_size(_instance: object, _attribute: Any, value: Any) -> None:
    check_world_size(value)


@attrs.frozen(kw_only=True)
class RuleContext:
    """What a rule may look at besides the plan."""

    world_size: int = attrs.field(default=1, validator=_check_world_size)
    platform: Platform | None = None
    model: ModelFacts | None = None
    run: RunFacts = attrs.field(factory=RunFacts)
    uses_deepspeed: bool = True
    """``False``: the plain engine trains, and what only concerns ZeRO is not looked at."""


@attrs.frozen(kw_only=True)
class Finding:
    """What one rule found in a plan."""

    rule: str
    """Id of the rule."""
    severity: RuleSeverity
    key: str
    """Path of the setting."""
    value: Any
    """The value found."""
    reason: str
    fix: str
    after: Any = UNSET
    """What resolution makes of it; ``None``: left out; unset: it stays."""
    recorded_elsewhere: bool = attrs.field(default=False, eq=False)
    """Whether resolution or the optimizer's settling records a decision of its own on it."""
    error: PlanError | None = attrs.field(default=None, eq=False)
    """The error to raise when it is not the usual ``PlanConflictError``."""

    def as_error(self) -> PlanError:
        """The finding as an exception."""
        if self.error is not None:
            return self.error
        return PlanConflictError(self.reason, key=self.key, value=self.value, fix=self.fix)

    def as_decision(self) -> Decision:
        """The finding as a decision of the resolved plan."""
        return Decision(
            key=self.key,
            before=self.value,
            after=self.value if self.after is UNSET else self.after,
            reason=f"{self.reason}; {self.fix}",
            severity="note" if self.severity == "note" else "warning",
        )

    def __str__(self) -> str:
        return f"[{self.severity}] {self.rule}: {self.as_error()}"


_Check = Callable[["DeepSpeedPlan", RuleContext], Iterator[Finding]]


@attrs.frozen(kw_only=True)
class Rule:
    """One thing that can be wrong with a plan."""

    id: str
    severity: RuleSeverity
    summary: str
    """What is wrong, in one sentence for the documentation."""
    advice: str
    """Why, and what to do about it, for the documentation."""
    check: _Check
    only_deepspeed: bool
    """Whether it concerns only runs that DeepSpeed trains."""

    def __call__(self, plan: DeepSpeedPlan, context: RuleContext) -> list[Finding]:
        """What this rule finds."""
        if self.only_deepspeed and not context.uses_deepspeed:
            return []
        return list(self.check(plan, context))


class Report:
    """Makes the findings of one rule; passed to nobody but rule functions."""

    def __init__(self, rule: str, severity: RuleSeverity, recorded_elsewhere: bool) -> None:
        self._rule = rule
        self._severity: RuleSeverity = severity
        self._recorded_elsewhere = recorded_elsewhere

    def __call__(
        self, key: str, value: Any, reason: str, fix: str, *, after: Any = UNSET
    ) -> Finding:
        """A finding of this rule."""
        return Finding(
            rule=self._rule,
            severity=self._severity,
            key=key,
            value=value,
            reason=reason,
            fix=fix,
            after=after,
            recorded_elsewhere=self._recorded_elsewhere,
        )

    def error(self, error: PlanError) -> Finding:
        """A finding made from an error."""
        return Finding(
            rule=self._rule,
            severity=self._severity,
            key=error.key or "",
            value=error.value,
            reason=error.reason,
            fix=error.fix or "",
            error=error,
        )


_Function = Callable[["DeepSpeedPlan", RuleContext, Report], Iterator[Finding]]

_registered: list[Rule] = []


def rule(
    rule_id: str,
    severity: RuleSeverity,
    *,
    only_deepspeed: bool = True,
    recorded_elsewhere: bool = False,
) -> Callable[[_Function], _Function]:
    """Register a rule.

    The first line of the function's docstring says what is wrong, the rest what to do about it.

    Args:
        rule_id: The rule's name.
        severity: What a finding means; see the module.
        only_deepspeed: Whether it concerns only runs that DeepSpeed trains.
        recorded_elsewhere: Whether whoever repairs it records the decision, so that a warning of
            this rule must not become a second one.
    """
    report = Report(rule_id, severity, recorded_elsewhere)

    def register(function: _Function) -> _Function:
        summary, _, advice = (function.__doc__ or "").strip().partition("\n")
        _registered.append(
            Rule(
                id=rule_id,
                severity=severity,
                summary=summary,
                advice=" ".join(advice.split()),
                check=lambda plan, context: function(plan, context, report),
                only_deepspeed=only_deepspeed,
            )
        )
        return function

    return register


def registered() -> tuple[Rule, ...]:
    """The rules registered so far."""
    return tuple(_registered)


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order they are checked."""
    from zerotune.plan.rulebook import RULES

    return RULES


def check_plan(plan: DeepSpeedPlan, context: RuleContext) -> tuple[Finding, ...]:
    """Everything the rules find, errors first, otherwise in the order of the rules."""
    findings = [finding for each in all_rules() for finding in each(plan, context)]
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))
