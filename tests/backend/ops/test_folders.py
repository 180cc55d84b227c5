"""Where ops are compiled: one folder per Python environment, unless the user chose a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
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

needs_tools = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None,
    reason="needs a C++ compiler and ninja",
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


TINY = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from zerotune.backend.op_builds import build_folder, building, why_stale

folder = build_folder("tiny")
if folder.exists():
    print(why_stale(folder))
with building():
    cpp_extension.load(name="tiny", sources=[sys.argv[1]], is_python_module=False)
print(folder / "tiny.o")
"""


@needs_tools
@pytest.mark.slow
# Nightly: another test proves that each environment has a folder of its own.
@pytest.mark.nightly
@pytest.mark.parametrize("shared", [True, False])
def test_two_environments_recompile_in_turns_only_in_a_folder_that_the_user_set(
    shared: bool, tmp_path: Path
) -> None:
    source = tmp_path / "tiny.cpp"
    source.write_text("int tiny() { return 1; }\n")
    inherited = {name: value for name, value in os.environ.items() if name != FOLDER}
    inherited["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    if shared:
        inherited[FOLDER] = str(tmp_path / "set")

    def compiled(environment: str) -> tuple[Path, int, str]:
        # The same torch at another path, as in a second virtual environment.
        link = tmp_path / environment / "torch"
        if not link.exists():
            link.parent.mkdir()
            link.symlink_to(Path(torch.__file__).parent)
        path = f"{link.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [sys.executable, "-c", TINY, str(source)],
            env={**inherited, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *stale, place = done.stdout.splitlines()
        return Path(place), Path(place).stat().st_mtime_ns, "".join(stale)

    first, second, third = (compiled(environment) for environment in "aba")
    assert (first[0] == second[0]) is shared
    assert (first[:2] == third[:2]) is not shared
    other = f"the Python environment with {tmp_path / 'b'} compiled it last"
    assert third[2] == (other if shared else "None")
