"""Whole tiny pipelines in folders, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipelines import MAKERS


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folder of each family's pipeline."""
    root = tmp_path_factory.mktemp("pipelines")
    return {name: make(root / name) for name, make in MAKERS.items()}
