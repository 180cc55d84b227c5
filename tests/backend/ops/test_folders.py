"""Where ops are compiled: one folder per Python environment, unless the user chose a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerotune.backend import op_builds
from zerotune.backend.op_builds import (
    FOLDER,
    build_folder,
    building,
    extensions_folder,
    folder_decisions,
)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let zerotune choose the folder, below a temporary cache."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    op_builds._environments_folder.cache_clear()
    yield
    op_builds._environments_folder.cache_clear()


def folder_with(monkeypatch: pytest.MonkeyPatch, change: str) -> Path:
    """Return the folder of an environment that differs in one fact."""
    with monkeypatch.context() as patch:
        if change == "torch version":
            patch.setattr(torch, "__version__", "2.99.0+cpu")
        elif change == "torch build":
            patch.setattr(torch.version, "cuda", "99.9")
        elif change == "torch path":
            patch.setattr(torch, "__file__", "/other/site-packages/torch/__init__.py")
        elif change == "deepspeed version":
            patch.setattr(op_builds, "installed_version", lambda _name: "0.99.0")
        elif change == "virtual environment":
            patch.setattr(sys, "prefix", "/other")
        op_builds._environments_folder.cache_clear()
        return extensions_folder()


CHANGES = (
    "torch version",
    "torch build",
    "torch path",
    "deepspeed version",
    "virtual environment",
)


def test_each_environment_has_its_own_folder(
    unset: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [folder_with(monkeypatch, change) for change in ("none", *CHANGES)]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {tmp_path / "torch_extensions"}
    assert f"torch-{torch.__version__}" in folders[0].name
    assert folder_with(monkeypatch, "none") == folders[0]


def test_the_chosen_folder_is_a_decision(unset: None) -> None:
    (decision,) = folder_decisions()
    assert (decision.key, decision.before) == (FOLDER, None)
    assert decision.after == str(extensions_folder())
    with building():
        assert folder_decisions() == (decision,), "another engine is starting"


def test_a_library_that_another_environment_compiled_last_is_stale(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text("cflags = -isystem /other/torch/include\n")
    found = op_builds.why_stale(tmp_path)
    assert found == "the Python environment with /other compiled it last"


def test_a_folder_that_the_user_set_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert build_folder("cpu_adam") == tmp_path / "cpu_adam"
    assert folder_decisions() == ()
    with building():
        assert os.environ[FOLDER] == str(tmp_path)
    assert os.environ[FOLDER] == str(tmp_path)


def test_torch_compiles_into_the_chosen_folder_only_inside_the_block(unset: None) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    with building():
        with building():
            pass
        assert Path(_get_build_directory("tiny", False)) == build_folder("tiny")
    assert FOLDER not in os.environ
