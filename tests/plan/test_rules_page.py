"""The docs' table of rules is generated from the rules, and is current."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from zerotune.plan.rules.table import all_rules

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generated():
    return runpy.run_path(str(DOCS / "generate_rules.py"))["page"]()


def test_the_rules_page_is_current(generated):
    committed = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert committed == generated, "run python docs/generate_rules.py"


def test_every_rule_has_a_row_with_a_reason(generated):
    rows = [line.split(" | ") for line in generated.splitlines() if line.startswith("| `")]
    assert sorted(row[0] for row in rows) == sorted(f"| `{rule.id}`" for rule in all_rules())
    assert all(len(row) == 3 and all(len(cell) > 5 for cell in row) for row in rows)
