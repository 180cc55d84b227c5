"""What a missing module means: a skip for a developer, a failure in CI."""

from __future__ import annotations

import json

import pytest

from tests.support.needs import needs


def test_a_module_that_is_there_is_returned(monkeypatch):
    for ci in ("", "true"):
        monkeypatch.setenv("CI", ci)
        assert needs("json.decoder") is json.decoder


def test_a_developer_may_lack_it(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        needs("no_such_module")


def test_ci_may_not(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="install no_such_module"):
        needs("no_such_module.part")


def test_ci_may_lack_what_says_why(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.skip.Exception, match="its wheels need CUDA"):
        needs("no_such_module", may_lack="its wheels need CUDA")
