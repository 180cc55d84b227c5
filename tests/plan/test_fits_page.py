"""The documentation's table of what fits is what ``advise`` says today."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current():
    written = runpy.run_path(str(DOCS / "generate_memory.py"))["page"]()
    assert written == (DOCS / "fits.md").read_text(encoding="utf-8"), (
        "run python docs/generate_memory.py"
    )
