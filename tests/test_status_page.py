"""The status page is generated from recorded runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zerotune.platform.detect import OLDEST_DEEPSPEED

ROOT = Path(__file__).resolve().parents[1]
REPORT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure>no</failure></testcase></testsuite></testsuites>"""


@pytest.fixture
def status() -> Any:
    path = ROOT / "docs" / "generate_status.py"
    if not path.exists():
        pytest.skip("the documentation is not here")
    spec = importlib.util.spec_from_file_location("generate_status", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_matches_the_stored_records(status: Any) -> None:
    text = status.TARGET.read_text()
    assert status.page(text, status.stored()) == text, "run python docs/generate_status.py"
    for name in status.WANTED:
        assert f"| {name} |" in text


def test_a_run_is_recorded_with_its_outcome(status: Any, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    found = status.outcome(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    text = status.table({"engine, torch 2.11.0": found | {"date": "2026-01-02"}})
    assert re.search(r"\| engine, torch 2.11.0 \| python .* \| 1 \| 1 \| 1 \| 2026-01-02 \|", text)
    assert "| pure, Python 3.13 | not run yet |" in text


def test_a_run_with_failures_is_recorded_and_the_command_fails(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, page = tmp_path / "tests.xml", tmp_path / "status.md"
    report.write_text(REPORT)
    page.write_text(f"before\n{status.BEGIN}\nold\n{status.END}\nafter\n")
    monkeypatch.setattr(status, "TARGET", page)
    monkeypatch.setattr(status, "RECORDS", tmp_path / "versions.json")
    assert status.main(["engine, torch 2.11.0", str(report)]) == 1
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert status.page(text, status.stored()) == text


def test_the_oldest_supported_deepspeed_is_the_same_everywhere() -> None:
    written = {
        "pyproject.toml": rf'"deepspeed>={re.escape(OLDEST_DEEPSPEED)}; ',
        "README.md": rf"DeepSpeed {re.escape(OLDEST_DEEPSPEED)} or later",
        "docs/status.md": rf"engine, deepspeed {re.escape(OLDEST_DEEPSPEED)} ",
    }
    for name, pattern in written.items():
        if (ROOT / name).exists():
            assert re.search(pattern, (ROOT / name).read_text(encoding="utf-8")), name


def test_the_oldest_and_newest_release_of_each_package_are_wanted(status: Any) -> None:
    for written, relation in (("pyproject.toml", ">="), ("constraints.txt", "==")):
        if not (ROOT / written).exists():
            pytest.skip(f"{written} is not here")
        text = (ROOT / written).read_text(encoding="utf-8")
        for package in ("torch", "deepspeed"):
            (one,) = re.findall(rf'^ *"?{package}{relation}([\d.]+)', text, re.MULTILINE)
            assert f"engine, {package} {one}" in status.WANTED, (written, package, one)


def test_the_engines_table_contains_only_cases_of_the_tests(status: Any) -> None:
    pytest.importorskip("torch", reason="the cases need torch")
    from tests.device.cases import CASES

    found = json.loads(status.DEVICE.read_text(encoding="utf-8"))["cases"]
    assert {case["case"] for case in found} <= {case.name for case in CASES}
