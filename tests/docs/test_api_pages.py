"""Every public name has an entry of its own in the API reference."""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest

from tests.docs.pages import DOCS


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
    for path in api.homes():
        if not inspect.isfunction(function := api._value(path)):
            continue
        text = inspect.getdoc(function) or ""
        named = {*re.findall(r"^ +\*{0,2}(\w+):", text, re.M), *re.findall(r"``(\w+)``", text)}
        left = {name for name in inspect.signature(function).parameters if name not in named}
        silent += [f"{path}: {name}" for name in sorted(left)]
    assert silent == []


def test_every_link_of_a_page_leads_to_one(api, tmp_path):
    api.write(tmp_path / "api")
    names = {path.name for path in (tmp_path / "api").iterdir()}
    for path in (tmp_path / "api").iterdir():
        links = re.findall(r"\]\(([\w.]+\.md)\)", path.read_text())
        assert set(links) <= names, path.name
        assert "|  |" not in path.read_text(), f"{path.name}: a name without a summary"
    index = (tmp_path / "api" / "zerotune.plan.md").read_text()
    assert "| [Workload](zerotune.plan.Workload.md) |" in index
