"""Past failures stay fixed, and new ones would be found."""

from __future__ import annotations

import argparse
import json

import pytest

from stress.fuzz import __main__ as session
from stress.fuzz.attack import Attacker
from stress.fuzz.cases import Case, make_case
from zerotune.plan import DeepSpeedPlan

CASES = sorted(session.CORPUS.glob("*.json"))
PATIENT = 10.0
"""CPU seconds per operation; generous, as tests that run at the same time slow it down."""


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    client = session.builder_client(tmp_path / "root")
    found = Attacker(tmp_path / "root", client, longest=PATIENT)
    found(Case(text='{"train_batch_size": 1}', seed="warm-up"))
    return found


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_no_case_of_the_corpus_fails_again(file, attack):
    kept = json.loads(file.read_text())
    assert attack(Case.from_json(kept), kept["operation"]) == []


def test_new_cases_find_no_failure(attack):
    for number in range(25):
        case = make_case(16, number)
        if len(case.text) < 10**6:
            assert attack(case) == [], number


def test_a_foreign_exception_is_found_minimised_and_saved(attack, tmp_path, monkeypatch, capsys):
    def broken(plan, **_):
        if plan.steps_per_print == 7:
            raise KeyError("seven")

    monkeypatch.setattr(DeepSpeedPlan, "check", broken)
    text = json.dumps({"train_batch_size": 4, "bf16": {"enabled": True}, "steps_per_print": 7})
    monkeypatch.setattr(session, "make_case", lambda *_: Case(text=text, seed="x"))
    arguments = argparse.Namespace(minutes=1e-5, seed=1, first=0, keep=tmp_path / "kept")
    ((operation, what, _),) = session._attacked(attack, arguments)
    assert (operation, what) == ("check", "KeyError")
    (file,) = (tmp_path / "kept").iterdir()
    kept = json.loads(file.read_text())
    assert kept["found"].startswith("KeyError")
    assert json.loads(kept["text"]) == {"steps_per_print": 7}
    assert "case 0: check" in capsys.readouterr().out
