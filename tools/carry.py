"""Collect wheels for a machine without a network: ``python -m tools.carry --have LIST``.

``LIST`` is the output of ``pip list`` or ``pip list --format=json`` on that machine, or names
alone. The machine keeps its own torch; zerotune's other missing dependencies are put as wheels into
``.wheels``, which may not exceed 64 MiB. The machine unpacks them without pip.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
WHEELS: Final = ROOT / ".wheels"
SITE: Final = WHEELS / "site"
"""Folder where the wheels are unpacked."""
NEEDED: Final = ("attrs", "deepspeed", "diffusers", "accelerate", "safetensors", "psutil",
                 "typing-extensions", "packaging", "pyyaml", "rich", "numpy", "pillow",
                 "scikit-learn", "pytest", "pytest-timeout", "hypothesis", "peft",
                 "matplotlib")  # fmt: skip
"""Packages that zerotune, its GPU tests and its benchmarks import directly."""
LIMIT: Final = 64 * 2**20
SOURCE_ONLY: Final = frozenset({"deepspeed"})
"""Packages published without wheels; built here, without any op."""
_STAYS: Final = frozenset({"torch"})
"""Packages that are too large to carry and depend on the machine's driver."""
_PLATFORMS: Final = tuple(
    f"manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
)

Fetch = Callable[[str, Path], Path]
"""Downloads the wheel of a requirement into a folder and returns its path."""


def gather(
    needed: Sequence[str], have: Mapping[str, str], into: Path, fetch: Fetch, *, python: str
) -> dict[str, str]:
    """Fetch the packages missing from ``have``, and their missing dependencies, recursively.

    Returns:
        Names and versions of the fetched packages.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename

    present = {canonicalize_name(name): version for name, version in have.items()}
    environment = {"python_version": python, "extra": "", "sys_platform": "linux",
                   "platform_system": "Linux", "platform_machine": "x86_64",
                   "python_full_version": f"{python}.0"}  # fmt: skip
    carried: dict[str, str] = {}
    queue = [Requirement(name) for name in needed]
    while queue:
        wanted = queue.pop(0)
        name = canonicalize_name(wanted.name)
        version = present.get(name)
        # Present and, if its version is known, new enough.
        serves = not version or name in _STAYS or wanted.specifier.contains(version, True)
        if name in carried or (version is not None and serves):
            continue
        wheel = fetch(_pinned(wanted), into)
        carried[name] = str(parse_wheel_filename(wheel.name)[1])
        with zipfile.ZipFile(wheel) as archive:
            (path,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
            text = archive.read(path).decode("utf-8", errors="replace")
        for line in Parser().parsestr(text).get_all("Requires-Dist") or ():
            found = Requirement(line)
            if found.marker is None or found.marker.evaluate(environment):
                queue.append(found)
    return carried


def _pinned(wanted: Any) -> str:
    """Return the requirement with the version of ``constraints.txt``, if it names one."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if "==" in line and not line.startswith("#"):
            known = Requirement(line)
            if canonicalize_name(known.name) == canonicalize_name(wanted.name):
                return f"{known.name}{known.specifier}"
    return f"{wanted.name}{wanted.specifier}"


def check_size(folder: Path) -> int:
    """Return the size of all wheels in bytes; exit, naming the largest, if it exceeds the limit."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total > LIMIT:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:4]
        names = ", ".join(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
        raise SystemExit(f"the wheels take {total / 2**20:.1f} of 64 MiB; the largest: {names}")
    return total


def read_list(path: Path) -> dict[str, str]:
    """Read names and versions from ``pip list`` in either format; bare names get no version."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        found = {one["name"]: one["version"] for one in json.loads(text)}
    else:
        found = dict(re.findall(r"^([A-Za-z0-9][\w.-]*)\s+(\d\S*)", text, flags=re.MULTILINE))
        found = found or dict.fromkeys(re.findall(r"[A-Za-z0-9][\w.-]*[A-Za-z0-9]", text), "")
    if "torch" not in {name.lower() for name in found}:
        raise SystemExit(f"{path} names no torch, which is too large to be carried")
    return found


def unpack(wheels: Path, site: Path) -> Path:
    """Make wheels importable without pip: a wheel is an archive to extract into one folder."""
    found = sorted(wheels.glob("*.whl"))
    stamp, wanted = site / ".unpacked", "\n".join(path.name for path in found)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return site
    site.mkdir(parents=True, exist_ok=True)
    for path in found:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    for data in site.glob("*.data/*lib"):
        # Files that pip would move into site-packages.
        for one in data.iterdir():
            one.replace(site / one.name)
    stamp.write_text(wanted, encoding="utf-8")
    return site


def paths() -> list[str]:
    """Return the paths to import zerotune and carried packages from, unless they are installed."""
    found, spec = [], find_spec("zerotune")
    # An editable installation leaves a data folder named zerotune without the package.
    if spec is None or spec.origin is None:
        found.append(str(ROOT / "src"))
    lacking = find_spec("deepspeed") is None or str(SITE) in sys.path
    if lacking and any(WHEELS.glob("*.whl")):
        found.append(str(unpack(WHEELS, SITE)))
    return found


def fetcher(python: str) -> Fetch:
    """Return a ``Fetch`` that uses this machine's pip."""
    from packaging.requirements import Requirement

    def fetch(requirement: str, into: Path) -> Path:
        with tempfile.TemporaryDirectory(dir=into) as folder:
            if Requirement(requirement).name in SOURCE_ONLY:
                command = ["wheel", "--no-deps", "--no-build-isolation", "-w", folder, requirement]
            else:
                command = ["download", "--no-deps", "--only-binary=:all:", "-d", folder]
                command += ["--python-version", python, "--implementation", "cp", requirement]
                for platform in _PLATFORMS:
                    command += ["--platform", platform]
            subprocess.run([sys.executable, "-m", "pip", "-q", *command], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            return wheel.replace(into / wheel.name)

    return fetch


def main() -> int:
    """Fill ``.wheels``."""
    parser = argparse.ArgumentParser(prog="python -m tools.carry", description=__doc__)
    parser.add_argument("--have", type=Path, required=True, help="what that machine has: pip list")
    parser.add_argument("--python", default="3.12", help="its version of Python")
    options = parser.parse_args()
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    have = read_list(options.have)
    carried = gather(NEEDED, have, WHEELS, fetcher(options.python), python=options.python)
    total = check_size(WHEELS)
    for name, version in carried.items():
        sys.stdout.write(f"{name} {version}\n")
    sys.stdout.write(f"{len(carried)} wheels, {total / 2**20:.1f} MiB, in {WHEELS}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
