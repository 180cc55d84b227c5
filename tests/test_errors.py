"""All errors are ZeroTuneErrors, with messages in one form and their parts as attributes."""

from __future__ import annotations

import ast
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

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


def test_a_value_of_none_is_shown_and_a_missing_value_is_not() -> None:
    assert str(PlanError("r", key="k", value=None)) == "k = None: r."
    assert str(PlanError("r", key="k")) == "k: r."
    assert str(PlanError("r")) == "r."


def test_a_long_value_is_truncated() -> None:
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


def test_the_docstring_lists_every_error_class() -> None:
    for cls in CLASSES:
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
def test_errors_also_derive_from_matching_builtin_exceptions(cls: type, builtin: type) -> None:
    assert issubclass(cls, builtin)


SOURCE = Path(errors.__file__).parent
SYSTEM = {"OSError", "FileNotFoundError", "PermissionError"}


def trees() -> dict[Path, ast.Module]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    about = {path: text for path, text in texts.items() if any(name in text for name in SYSTEM)}
    return {path: ast.parse(text) for path, text in about.items()}


def wrapped(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what handlers of system errors raise."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
            continue
        if SYSTEM & {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}:
            for node in ast.walk(handler):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    yield node.exc


def is_whole(call: ast.AST) -> bool:
    if not isinstance(call, ast.Call):
        return False
    first = zip(("reason", "fix", "key", "value"), call.args, strict=False)
    named = {name for name, _ in first} if made_by(call).endswith("Error") else set()
    return {"key", "fix"} <= named | {word.arg for word in call.keywords}


def made_by(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def test_every_refused_system_call_is_reported_with_its_path_and_a_fix() -> None:
    parsed = trees()
    found = [(path, raised) for path, tree in parsed.items() for raised in wrapped(tree)]
    makers = {
        node.name
        for tree in parsed.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(is_whole, ast.walk(node)))
    }
    poor = [
        f"{path.relative_to(SOURCE)}:{raised.lineno} {ast.unparse(raised)}"
        for path, raised in found
        for call in (raised.values if isinstance(raised, ast.BoolOp) else [raised])
        # OSError names the file, and the caller turns it into a zerotune error.
        if not is_whole(call) and made_by(call) not in {*makers, "OSError"}
    ]
    assert len(found) > 40, "they are found at all"
    assert not poor
