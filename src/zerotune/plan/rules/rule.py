"""A rule that checks a plan, and questions about plans that several rules ask.

A rule yields findings. ``DeepSpeedPlan.check`` returns all of them. Resolution raises findings of
severity *error*, applies and records each *warning*, and ignores each *note*. The documentation is
generated from ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs

from zerotune._util.text import as_sentence, is_integer, is_number
from zerotune.decisions import Decision, Severity
from zerotune.errors import (
    UNSET,
    Edits,
    PlanError,
    fix_of,
)
from zerotune.plan.context import Context
from zerotune.plan.resolve.case import Case
from zerotune.plan.section import value_at
from zerotune.plan.sections import OffloadSection
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO

Finding = Decision
"""One finding of a rule: a record with the rule's id and a fix."""


Findings = Iterator[Decision]


class _Names(dict[str, str]):
    """Placeholders for the values of a finding, for the documentation."""

    def __missing__(self, name: str) -> str:
        return f"``{name}``"


@attrs.frozen(kw_only=True)
class Rule:
    """A check of plans for one kind of mistake."""

    id: str
    severity: Severity
    summary: str
    """The mistake, in one sentence for the documentation."""
    check: Callable[[Case, Rule], Findings] = attrs.field(repr=False)
    reason: str = ""
    """Reason for a finding, with placeholders such as ``{name}`` for its values; empty if each
    finding states its own reason."""
    edits: tuple[Edits, ...] = ()
    """Alternative changes that mend the plan, if they are the same for each finding."""
    fix: str = attrs.Factory(lambda rule: fix_of(rule.edits), takes_self=True)
    """What to write instead, with the same placeholders as ``reason``; by default what ``edits``
    do."""
    remark: str = ""
    """Additional sentences for the documentation."""
    only_deepspeed: bool = True
    """Whether the rule applies only to runs with DeepSpeed."""
    resolved_elsewhere: bool = False
    """Whether the choice of the optimizer, that of the precision or the launcher decides what the
    rule reports, so that resolution does not act on it."""
    refused_elsewhere: bool = False
    """Whether DeepSpeed or accelerate refuses what zerotune accepts; ``plan check`` reports such
    findings as errors."""
    stages: tuple[int, ...] = ()
    """ZeRO stages to which the rule applies; empty for all stages."""
    when: Callable[[Case], Any] = attrs.field(default=lambda _case: True, repr=False)
    """Additional condition for the rule to apply."""

    @property
    def advice(self) -> str:
        """Fix, reason and remark, for the documentation."""
        first, _, last = ", ".join(map(str, self.stages)).rpartition(", ")
        words = _Names(stage=f"{first} or {last}" if first else last)
        fix, reason = (as_sentence(each.format_map(words)) for each in (self.fix, self.reason))
        # Without the values of a finding, a reason with placeholders only repeats the summary.
        reason = "" if "``" in reason else reason
        told = "`zerotune plan check` reports an error." if self.refused_elsewhere else ""
        return " ".join(filter(None, (fix, reason, self.remark, told)))

    def __call__(self, plan: Settings, context: Context) -> list[Decision]:
        """Return the findings of this rule for ``plan``."""
        return self.find(Case(plan=plan, context=context))

    def find(self, case: Case) -> list[Decision]:
        """Return the findings of this rule for the plan and context in ``case``."""
        if self.only_deepspeed and not case.context.uses_deepspeed:
            return []
        here = not self.stages or case.plan.stage in self.stages
        return list(self.check(case, self)) if here and self.when(case) else []

    def finding(
        self,
        key: str,
        value: Any,
        /,
        *,
        after: Any = UNSET,
        edits: Sequence[Edits] = (),
        **words: Any,
    ) -> Decision:
        """Return a finding about one setting.

        Args:
            key: Path of the setting.
            value: Value of the setting in the plan.
            after: Value after resolution; ``None`` removes the setting, and the default is
                ``value``.
            edits: Alternative changes that mend the plan; by default those of the rule.
            **words: Values for the placeholders in ``reason`` and ``fix``, or texts that replace
                ``reason`` and ``fix``.
        """
        return Decision(
            key,
            value,
            value if after is UNSET else after,
            words.get("reason") or self.reason.format(**words),
            self.severity,
            fix=words.get("fix") or self.fix.format(**words) or fix_of(edits),
            edits=tuple(edits) or self.edits,
            rule=self.id,
        )

    def refused(self, error: PlanError) -> Decision:
        """Return the finding that corresponds to ``error``."""
        return Decision.of(error, rule=self.id, severity=self.severity)


def rule(
    rule_id: str, severity: Severity, **options: Any
) -> Callable[[Callable[[Case, Rule], Findings]], Rule]:
    """Turn a function into a rule.

    The first line of the function's docstring describes the mistake. The other lines are additional
    sentences for the documentation.

    Args:
        rule_id: The rule's name.
        severity: Severity of the findings; resolution raises errors, corrects what warnings report,
            and ignores notes.
        **options: Attributes of ``Rule``, such as ``reason`` and ``edits``.
    """

    def made(function: Callable[[Case, Rule], Findings]) -> Rule:
        summary, _, remark = (function.__doc__ or "").strip().partition("\n")
        options.update(summary=summary, remark=" ".join(remark.split()))
        return Rule(id=rule_id, severity=severity, check=function, **options)

    return made


# -- Questions about a plan that several groups of rules ask.


def offload_section(plan: Settings, part: str) -> OffloadSection | None:
    """Return the section ``offload_optimizer`` or ``offload_param`` as written."""
    section: OffloadSection | None = getattr(plan.zero_optimization, f"offload_{part}", None)
    return section


def active(section: OffloadSection | None) -> bool:
    """Whether the section names a device to offload to."""
    return section is not None and section.device not in (None, "none", AUTO)


def number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number, otherwise ``None``."""
    return float(value) if is_number(value) else None


def integer(value: Any) -> int | None:
    """Return ``value`` as an int if it is a whole number, otherwise ``None``."""
    return int(value) if is_integer(value) else None


def wide_weight(case: Case) -> str | None:
    """Return the name of a trained weight with more than two dimensions, if there is one."""
    trained = case.context.model.trainable if case.context.model else ()
    return next((each.name for each in trained if len(each.shape) > 2), None)


def swaps_optimizer(case: Case) -> bool:
    """Whether the optimizer is offloaded to NVMe."""
    return case.plan.stage == 3 and case.plan.offload_optimizer_device == "nvme"


def swaps_parameters(case: Case) -> bool:
    """Whether parameters are offloaded to NVMe."""
    return case.plan.stage == 3 and case.plan.offload_param_device == "nvme"


def is_from_file(plan: Settings) -> bool:
    """Whether the plan was read from a configuration that may have trained with DeepSpeed."""
    return plan.source not in ("code", "form")


def set_twice(case: Case, this: Rule, key: str, places: tuple[str, ...]) -> Findings:
    """Yield a finding for each of ``places`` that contradicts the top-level ``key``."""
    first = getattr(case.plan, key)
    for place in places:
        second = value_at(case.plan, place, None)
        if is_number(first) and is_number(second) and first != second:
            yield this.finding(place, second, key=key, first=first)


ZERO_PATH: Final = "zero_optimization"


OPTIMIZER: Final = f"{ZERO_PATH}.offload_optimizer"


PARAM: Final = f"{ZERO_PATH}.offload_param"


STAGE: Final = f"{ZERO_PATH}.stage"


RATIO: Final = f"{OPTIMIZER}.ratio"


ON_CPU: Final = {f"{OPTIMIZER}.device": "cpu"}
