"""Write the tables of versions and engines in docs/status.md from the recorded test runs alone.

``python docs/generate_status.py`` writes the page. ``generate_status.py NAME... REPORT`` first
records a run from pytest's JUnit file REPORT, and fails if a test of the run failed.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from zerotune.platform.detect import OLDEST_DEEPSPEED

ROOT: Final = Path(__file__).resolve().parents[1]
TARGET: Final = ROOT / "docs" / "status.md"
RECORDS: Final = ROOT / "docs" / "results" / "versions.json"
DEVICE: Final = ROOT / "docs" / "results" / "device.json"
BEGIN, END = "<!-- versions: written by docs/generate_status.py -->", "<!-- end of versions -->"
BEGIN_DEVICE: Final = "<!-- engines: written by docs/generate_status.py -->"
END_DEVICE: Final = "<!-- end of engines -->"
WANTED: Final[Mapping[str, str]] = {
    "engine, torch 2.11.0": "nox -s torch_versions",
    "engine, torch 2.13.0": "nox -s torch_versions",
    f"engine, deepspeed {OLDEST_DEEPSPEED}": "nox -s deepspeed_versions",
    "engine, deepspeed 0.19.8": "nox -s deepspeed_versions",
    **{f"pure, Python 3.{minor}": "nox -s pure" for minor in range(10, 14)},
}
"""Parts to test before a release, and the command for each."""


def outcome(report: Path) -> dict[str, Any]:
    """Return the outcome and the versions of a pytest run."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))

    def count(*kinds: str) -> int:
        return sum(any(case.find(kind) is not None for kind in kinds) for case in cases)

    failed, skipped = count("failure", "error"), count("skipped")
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "passed": len(cases) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "versions": found,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of parts that were tested, and of parts that were not."""
    lines = ["| part | on | passed | failed | skipped | when | command |"]
    lines.append("|---|---|--:|--:|--:|---|---|")
    for name in dict.fromkeys((*WANTED, *records)):
        command = f"`{WANTED[name]}`" if name in WANTED else ""
        found = records.get(name)
        if found is None:
            lines.append(f"| {name} | not run yet | | | | | {command} |")
            continue
        where = ", ".join(f"{package} {one}" for package, one in found["versions"].items())
        cells = [name, where, found["passed"], found["failed"], found["skipped"], found["date"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {command} |")
    return "\n".join(lines)


def engines(found: Mapping[str, Any]) -> str:
    """Return the table of engines that ran on the simulated device, from ``device.json``."""
    lines = ["| engine | cases | runs | equal to the bit | processor time |"]
    lines.append("|---|--:|--:|--:|--:|")
    cases = [case for case in found["cases"] if "error" not in case]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        kinds.setdefault(case["case"].partition(",")[0], []).append(case)
    for kind, members in (*kinds.items(), ("all", cases)):
        runs, equal = (sum(case[key] for case in members) for key in ("runs", "equal"))
        seconds = sum(case["seconds"] for case in members)
        lines.append(f"| {kind} | {len(members)} | {runs} | {equal} | {seconds:.0f} s |")
    versions = f"torch {found['torch']}, DeepSpeed {found['deepspeed']}, {found['date']}"
    missing = [case["case"] for case in found["cases"] if "error" in case]
    lines += ["", f"These runs used {versions}."]
    for case in cases:
        if case["equal"] < case["runs"]:
            lines.append(f"Not equal in every order: {case['case']}, {case['equal']} of "
                         f"{case['runs']} ({'; '.join(case['different'])}).")  # fmt: skip
    if missing:
        lines.append(f"These cases did not start: {'; '.join(missing)}.")
    return "\n".join(lines)


def page(text: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with a table of ``records``, and one of engines on the device."""
    text = _between(BEGIN, table(records), END, text)
    if BEGIN_DEVICE in text and DEVICE.exists():
        found = json.loads(DEVICE.read_text(encoding="utf-8"))
        text = _between(BEGIN_DEVICE, engines(found), END_DEVICE, text)
    return text


def _between(begin: str, content: str, end: str, text: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def stored() -> dict[str, Any]:
    """Return the recorded runs."""
    if not RECORDS.exists():
        return {}
    found: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> int:
    """Record a run, if one is given, and write the page."""
    records, failed = stored(), 0
    if arguments:
        *names, report = arguments
        ran = outcome(Path(report))
        records |= dict.fromkeys(names, ran)
        failed = ran["failed"]
        RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8"), records), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
