"""A missing module skips a test for a developer and fails it in CI."""

from __future__ import annotations

import json

import pytest

from tests.support.needs import needs


def test_an_installed_module_is_returned(monkeypatch):
    for ci in ("", "true"):
        monkeypatch.setenv("CI", ci)
        assert needs("json.decoder") is json.decoder


def test_a_developers_machine_may_lack_a_module(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        needs("no_such_module")


def test_ci_may_not_lack_a_module(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="install no_such_module"):
        needs("no_such_module.part")


def test_ci_may_lack_a_module_with_a_reason(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.skip.Exception, match="its wheels need CUDA"):
        needs("no_such_module", may_lack="its wheels need CUDA")
