"""The architecture page names existing files."""

from __future__ import annotations

import re
from pathlib import Path

import zerotune

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SOURCE = Path(zerotune.__file__).parent


def test_every_file_named_on_the_page_exists():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text))
    assert len(named) > 30
    roots = (SOURCE, PAGE.parents[1], SOURCE / "plan")
    assert not [name for name in named if not any((root / name).exists() for root in roots)]
