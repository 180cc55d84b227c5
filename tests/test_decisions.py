"""Decisions are logged once, on rank 0, at the level of their severity."""

from __future__ import annotations

import logging
import uuid

import pytest

from zerotune.decisions import Decision, announce, render_decisions


def decision(severity: str = "note") -> Decision:
    # Use a new key each time: a process logs each decision only once.
    return Decision(
        key=f"k-{uuid.uuid4()}", before="auto", after=3, reason="because", severity=severity
    )


def test_a_decision_is_rendered_in_one_line() -> None:
    shown = str(Decision(key="zero.stage", before=None, after=2, reason="the default"))
    assert shown == "zero.stage: unset -> 2 (the default)"


def test_a_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zerotune")
    once = decision()
    announce([once], rank=0)
    announce([once, once], rank=0)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert once.key in caplog.text


def test_a_warning_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    announce([decision("warning")], rank=0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_other_ranks_log_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="zerotune")
    announce([decision("warning")], rank=1)
    monkeypatch.setenv("RANK", "3")
    announce([decision("warning")])
    assert caplog.records == []


def test_warnings_are_shown_first() -> None:
    note, warning = decision(), decision("warning")
    lines = render_decisions([note, warning]).splitlines()
    assert warning.key in lines[0]
    assert note.key in lines[1]


def test_an_unchanged_value_is_recorded_but_not_shown():
    kept = Decision(key="threads", before=2, after=2, reason="two cores")
    warned = Decision(key="disk", before=None, after=None, reason="slow", severity="warning")
    assert render_decisions([kept, warned]) == f"  [warning] {warned}"
