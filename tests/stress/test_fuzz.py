"""Past failures stay fixed, and new ones would be found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from stress.fuzz import __main__ as session
from stress.fuzz.attack import MOST, Attacker
from stress.fuzz.cases import WAYS, Case, make_case
from zerotune.plan import DeepSpeedPlan

CASES = sorted(session.CORPUS.glob("*.json"))
PATIENT = 10.0
"""CPU seconds per operation; generous, as tests that run at the same time slow it down."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    client = session.builder_client(tmp_path / "root")
    found = Attacker(tmp_path / "root", client, longest=PATIENT)
    found(Case(text='{"train_batch_size": 1}', seed="warm-up"))
    return found


def test_the_corpus_is_not_empty():
    assert len(CASES) >= 5


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_no_case_of_the_corpus_fails_again(file, attack):
    kept = json.loads(file.read_text())
    assert attack(Case.from_json(kept), kept["operation"]) == []


def test_new_cases_find_no_failure(attack):
    for number in range(40):
        case = make_case(16, number)
        if len(case.text) < 10**6:
            assert attack(case) == [], number


def test_cases_are_reproducible_and_can_be_saved():
    for number in range(100):
        case = make_case(3, number)
        assert case == make_case(3, number)
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert len(WAYS) == 7


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


def test_time_limits_count_processor_time(attack, monkeypatch):
    monkeypatch.setattr(DeepSpeedPlan, "check", lambda *_, **__: time.sleep(0.5))
    monkeypatch.setattr(attack, "_longest", 0.4)
    checks = [each for each in attack(Case(text="{}", seed="x")) if each.operation == "check"]
    assert checks == []

    def busy(*_, **__):
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass

    monkeypatch.setattr(DeepSpeedPlan, "check", busy)
    (failure,) = [one for one in attack(Case(text="{}", seed="x")) if one.operation == "check"]
    assert failure.what.startswith("time: 0.")


@LINUX
def test_memory_beyond_the_limit_is_a_failure(attack, monkeypatch):
    monkeypatch.setattr(DeepSpeedPlan, "check", lambda *_, **__: bytearray(b"x" * (MOST + 2**22)))
    (failure,) = [one for one in attack(Case(text="{}", seed="x")) if one.operation == "check"]
    assert failure.what.startswith("memory: ")


def test_an_endless_operation_is_stopped(attack, monkeypatch):
    def endless(*_, **__):
        while True:
            pass

    monkeypatch.setattr(DeepSpeedPlan, "check", endless)
    monkeypatch.setattr("stress.fuzz.attack._HOPELESS", 0.2)
    monkeypatch.setattr("stress.fuzz.attack._operations", lambda *_: [("check", endless)])
    (failure,) = attack(Case(text="{}", seed="x"))
    assert failure.what.startswith("time: more than")
    assert Path.cwd().exists()
