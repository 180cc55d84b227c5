"""Every public name has a separate entry in the API reference."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import zerotune
from tests.docs.pages import DOCS

PACKAGE = Path(zerotune.__file__).parent


@pytest.fixture(scope="module")
def api():
    """Return the module that writes the pages."""
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_one_entry(api, tmp_path):
    api.write(tmp_path / "api")
    text = "\n".join(path.read_text() for path in (tmp_path / "api").iterdir())
    entries = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)(?:\(\))?$", text, re.MULTILINE)
    errors = [
        f"zerotune.errors.{name}" for name in vars(importlib.import_module("zerotune.errors"))
    ]
    assert api.missing({*entries, *errors}) == []
    assert sorted(set(entries)) == sorted(entries)
    assert "zerotune.Trainer" in entries


def test_every_function_describes_its_parameters(api):
    functions = {path: api._value(path) for path in api.documented() if api._resolves(path)}
    silent = [
        f"{path}: {name}"
        for path, function in functions.items()
        if inspect.isfunction(function)
        for name in api.undescribed(function, inspect.getdoc(function) or "")
    ]
    assert silent == []


def test_every_method_or_the_method_it_overrides_describes_its_parameters(api):
    """The test covers methods of protocols and abstract classes too."""
    owners, silent = api.classes(), []
    assert {"NonFinitePolicy", "Callback", "Family", "Trainer"} <= {one.__name__ for one in owners}
    for owner in owners:
        for method in api.methods(owner):
            text = inspect.getdoc(getattr(owner, method.__name__)) or ""
            left = api.undescribed(method, api.with_arguments(owner, method, text))
            silent += [f"{owner.__module__}.{owner.__name__}.{method.__name__}: {n}" for n in left]
    assert silent == []


def test_inherited_argument_descriptions_precede_the_return_value(api):
    class Base:
        def work(self, size):
            """Work.

            Args:
                size: Its size.
            """

    class Derived(Base):
        def work(self, size):
            """Work harder.

            Returns:
                Nothing.
            """

    found = api.with_arguments(Derived, Derived.work, inspect.getdoc(Derived.work))
    assert found == "Work harder.\n\nArgs:\n    size: Its size.\n\nReturns:\n    Nothing."
    assert api.with_arguments(Base, Base.work, inspect.getdoc(Base.work)).count("Args:") == 1


def test_no_first_line_of_a_property_reads_as_its_type(api):
    """Sphinx takes words before a colon on the first line for a type."""
    found = [
        f"{owner.__name__}.{name}"
        for owner in api.classes()
        for name, value in vars(owner).items()
        if isinstance(value, property | functools.cached_property) and not name.startswith("_")
        if re.match(r"[^`\n]*: ", inspect.getdoc(value) or "")
    ]
    assert found == []


def test_the_builder_imports_only_documented_names(api):
    """Other front ends can then do the same; text helpers of ``zerotune._util`` are exempt."""
    shared, documented = ("zerotune._util", "zerotune.errors", "zerotune.builder"), api.documented()
    imported = {
        f"{node.module}.{alias.name}"
        for file in (PACKAGE / "builder").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerotune")
        for alias in node.names
    }
    assert "zerotune.plan.read.read_whole" in imported
    assert sorted(each for each in imported - documented if not each.startswith(shared)) == []


def test_the_page_for_front_ends_lists_only_names_that_the_builder_uses(api):
    """The page would otherwise list names that nothing uses."""
    text = "".join(file.read_text() for file in (PACKAGE / "builder").glob("*.py"))
    names = [name for names in api.FOR_FRONT_ENDS.values() for name in names.split()]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_link_on_a_page_has_a_target(api, tmp_path):
    api.write(tmp_path / "api")
    names = {path.name for path in (tmp_path / "api").iterdir()}
    for path in (tmp_path / "api").iterdir():
        links = re.findall(r"\]\(([\w.]+\.md)\)", path.read_text())
        assert set(links) <= names, path.name
        assert "|  |" not in path.read_text(), f"{path.name}: a name without a summary"
    index = (tmp_path / "api" / "zerotune.plan.md").read_text()
    assert "| [Workload](zerotune.plan.Workload.md) |" in index
