"""The error tree: one message form, parts kept, everything catchable as ZeroTuneError."""

from __future__ import annotations

import inspect
import pickle

import pytest

from zerotune import errors
from zerotune.errors import (
    CheckpointError,
    EngineError,
    InvalidValueError,
    MissingDependencyError,
    PlanError,
    PlanSyntaxError,
    VerificationError,
    ZeroTuneError,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ZeroTuneError)
]


def test_the_message_names_key_value_reason_and_fix() -> None:
    error = InvalidValueError("must be 0 to 3", key="zero.stage", value=7, fix="write 2")
    assert str(error) == "zero.stage = 7: must be 0 to 3. Fix: write 2."
    assert (error.key, error.value, error.reason, error.fix) == (
        "zero.stage",
        7,
        "must be 0 to 3",
        "write 2",
    )


def test_none_is_a_value_and_absence_is_not() -> None:
    assert str(PlanError("r", key="k", value=None)) == "k = None: r."
    assert str(PlanError("r", key="k")) == "k: r."
    assert str(PlanError("r")) == "r."


def test_a_long_value_is_cut() -> None:
    assert len(str(PlanError("r", key="k", value="x" * 5000))) < 200


def test_a_syntax_error_gives_line_and_column() -> None:
    error = PlanSyntaxError("expected a comma", source="ds.json", line=3, column=9)
    assert str(error) == "ds.json: expected a comma (line 3, column 9)."
    assert (error.line, error.column) == (3, 9)


def test_a_syntax_error_survives_pickling() -> None:
    error = pickle.loads(
        pickle.dumps(PlanSyntaxError("bad", source="ds.json", line=3, column=9, fix="quote it"))
    )
    assert str(error) == "ds.json: bad (line 3, column 9). Fix: quote it."
    assert (error.source, error.line, error.fix) == ("ds.json", 3, "quote it")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_in_the_tree_drawn_in_the_docstring(cls: type[ZeroTuneError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (PlanError, ValueError),
        (EngineError, RuntimeError),
        (VerificationError, EngineError),
        (CheckpointError, RuntimeError),
        (MissingDependencyError, ImportError),
    ],
)
def test_errors_are_also_what_python_programs_expect(cls: type, builtin: type) -> None:
    assert issubclass(cls, builtin)
