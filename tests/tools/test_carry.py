"""Packages for a machine without a network: selecting and unpacking them."""

from __future__ import annotations

import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tools import carry

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines))
        archive.writestr(f"{name}-{version}.data/purelib/{name}_beside.py", "")
    return path


def test_missing_packages_are_carried_with_their_requirements(tmp_path: Path) -> None:
    needs = {
        "first": ("torch>=2", "second (>1)", 'third; extra == "x"', 'old; python_version < "3.9"'),
        "second": ("fourth; sys_platform == 'linux'",),
        "fourth": (),
    }
    asked = []

    def fetch(requirement: str, into: Path) -> Path:
        asked.append(requirement)
        name = requirement.split(">", maxsplit=1)[0].split("=", maxsplit=1)[0]
        return wheel(into, name, "2.0", needs[name])

    have = {"Torch": "2.11.0+cu130"}
    carried = carry.gather(("first", "torch"), have, tmp_path, fetch, python="3.12")
    assert carried == {"first": "2.0", "second": "2.0", "fourth": "2.0"}
    assert asked == ["first", "second>1", "fourth"]
    assert carry.check_size(tmp_path) > 0


def test_outdated_packages_are_carried_except_torch(tmp_path: Path) -> None:
    needs = {"first": ("torch>=9", "old>2", "new>2", "unknown>2"), "old": ()}

    def fetch(requirement: str, into: Path) -> Path:
        name = requirement.split(">", maxsplit=1)[0]
        return wheel(into, name, "3.0", needs[name])

    have = {"torch": "2.11.0", "old": "1.0", "new": "2.5", "unknown": ""}
    carried = carry.gather(("first",), have, tmp_path, fetch, python="3.12")
    assert carried == {"first": "3.0", "old": "3.0"}


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "torch", "version": "2.11.0"}, {"name": "attrs", "version": "26.1"}]',
        "Package    Version\n---------- -------\ntorch      2.11.0\nattrs      26.1\n",
    ],
)
def test_both_forms_of_package_lists_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list"
    path.write_text(text)
    assert carry.read_list(path) == {"torch": "2.11.0", "attrs": "26.1"}


def test_carried_packages_and_the_checkout_are_on_the_path_unless_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "one", "1")
    monkeypatch.setattr(carry, "WHEELS", tmp_path)
    monkeypatch.setattr(carry, "SITE", tmp_path / "site")
    monkeypatch.setattr(carry, "find_spec", lambda _name: None)
    assert carry.paths() == [str(ROOT / "src"), str(tmp_path / "site")]
    folder = ModuleSpec("zerotune", None, is_package=True)
    monkeypatch.setattr(carry, "find_spec", {"zerotune": folder, "deepspeed": folder}.get)
    assert carry.paths() == [str(ROOT / "src")], "a folder of data beside an editable installation"
    monkeypatch.setattr(carry, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    assert carry.paths() == []
    # Carried packages are importable then, but must still be passed on to child processes.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert carry.paths() == [str(tmp_path / "site")]


def test_wheels_are_unpacked_once_and_without_pip(tmp_path: Path) -> None:
    wheel(tmp_path, "one", "1")
    site = carry.unpack(tmp_path, tmp_path / "site")
    assert (site / "one" / "__init__.py").exists()
    assert (site / "one_beside.py").exists()
    (site / "one" / "__init__.py").unlink()
    carry.unpack(tmp_path, site)
    assert not (site / "one" / "__init__.py").exists(), "what lies there already is left"
    wheel(tmp_path, "two", "1")
    carry.unpack(tmp_path, site)
    assert (site / "two" / "__init__.py").exists()
