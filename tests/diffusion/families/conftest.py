"""Complete tiny pipelines in folders, each created once, on first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import declared_pipelines, pipelines

MAKERS = pipelines.MAKERS | declared_pipelines.MAKERS | declared_pipelines.EXPERTS


class _Folders(dict[str, Path]):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        self[name] = MAKERS[name](self._root / name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return the folder of each family's pipeline by name, created on first use."""
    return _Folders(tmp_path_factory.mktemp("pipelines"))
