"""Every public name has an entry of its own in the API reference."""

from __future__ import annotations

import ast
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
    """The module that writes the pages."""
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
    silent = []
    front_ends = [
        f"{m}.{name}" for m, names in api.FOR_FRONT_ENDS.items() for name in names.split()
    ]
    for path in (*api.homes(), *front_ends):
        if not inspect.isfunction(function := api._value(path)):
            continue
        text = inspect.getdoc(function) or ""
        named = {*re.findall(r"^ +\*{0,2}(\w+):", text, re.M), *re.findall(r"``(\w+)``", text)}
        left = {name for name in inspect.signature(function).parameters if name not in named}
        silent += [f"{path}: {name}" for name in sorted(left)]
    assert silent == []


def test_the_builder_imports_documented_names_only(api):
    """Apart from the text helpers of ``zerotune._util``, another front end can do the same."""
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


def test_front_ends_find_no_name_that_the_builder_does_not_use(api):
    """Otherwise the page would grow without anybody who tries its names."""
    text = "".join(file.read_text() for file in (PACKAGE / "builder").glob("*.py"))
    names = [name for names in api.FOR_FRONT_ENDS.values() for name in names.split()]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_link_of_a_page_leads_to_one(api, tmp_path):
    api.write(tmp_path / "api")
    names = {path.name for path in (tmp_path / "api").iterdir()}
    for path in (tmp_path / "api").iterdir():
        links = re.findall(r"\]\(([\w.]+\.md)\)", path.read_text())
        assert set(links) <= names, path.name
        assert "|  |" not in path.read_text(), f"{path.name}: a name without a summary"
    index = (tmp_path / "api" / "zerotune.plan.md").read_text()
    assert "| [Workload](zerotune.plan.Workload.md) |" in index
