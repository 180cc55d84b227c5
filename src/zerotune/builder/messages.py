"""Everything zerotune has to say about a form, each at the key it is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs

from zerotune.decisions import Decision
from zerotune.errors import ZeroTuneError
from zerotune.plan import Finding
from zerotune.plan.explaining import told_and_defaults

Severity = Literal["error", "warning", "note"]


@attrs.frozen(kw_only=True)
class Message:
    """One sentence or two about one setting."""

    severity: Severity
    key: str
    """Path of the setting; empty for the whole."""
    text: str
    fix: str = ""
    rule: str = ""
    """Id of the rule that found it, where one did."""
    change: str = ""
    """``before → after``, where something was chosen automatically."""


def of_error(error: ZeroTuneError) -> Message:
    """An error as a message."""
    return Message(
        severity="error", key=error.key or "", text=_sentence(error.reason), fix=error.fix or ""
    )


def of_finding(finding: Finding) -> Message:
    """A rule's finding as a message."""
    return Message(
        severity=finding.severity,
        key=finding.key,
        text=_sentence(finding.reason),
        fix=finding.fix,
        rule=finding.rule,
    )


def of_decision(decision: Decision) -> Message:
    """A decision as a message."""
    return Message(
        severity=decision.severity,
        key=decision.key,
        text=_sentence(decision.reason),
        change=f"{_show(decision.before)} → {_show(decision.after)}",
    )


def of_decisions(decisions: Iterable[Decision], *, said: Iterable[Finding] = ()) -> list[Message]:
    """Decisions as messages, without DeepSpeed's own defaults and what ``said`` already says."""
    known = [finding.as_decision() for finding in said]
    told, _ = told_and_defaults(decisions)
    unique: list[Decision] = []
    for decision in told:
        if decision not in known and decision not in unique:
            unique.append(decision)
    return [of_decision(decision) for decision in unique]


def _sentence(reason: str) -> str:
    text = reason.strip()
    text = f"{text[:1].upper()}{text[1:]}"
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _show(value: Any) -> str:
    if value is None:
        return "not written"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
