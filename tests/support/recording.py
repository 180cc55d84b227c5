"""Record what each file of tests costs: ``nox -s durations``, on an idle machine.

The plugin writes ``tests/durations.json``: processor seconds of a file (with those of its ranks and
of processes that it waited for), seconds that passed, engines that it started, and ranks.
``tests/conftest.py`` begins with the files that take longest. A diff of the file shows which tests
became slow.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

RECORD: Final = Path(__file__).parents[1] / "durations.json"
VARIABLE: Final = "ZEROTUNE_RECORD"
"""Set in the processes of a recorded run."""
FIELDS: Final = ("seconds", "wall", "tests", "engines", "ranks")
spent: Counter[str] = Counter()
"""Costs of the running test outside this process, and of its engines."""
_files: dict[str, Counter[str]] = {}
_starting: Counter[str] = Counter()


def used() -> float:
    """Return the processor seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def count_engines() -> None:
    """Count the engines that this process starts."""
    from zerotune.backend.engine import Engine

    usual = Engine.__init__

    @functools.wraps(usual)
    def counted(self: Any, *args: Any, **options: Any) -> None:
        spent["engines"] += 1
        usual(self, *args, **options)

    Engine.__init__ = counted


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    # Set before the fork server starts, whose children count their engines then.
    os.environ[VARIABLE] = "1"
    count_engines()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    spent.clear()
    spent["seconds"], spent["wall"] = -used(), -time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        spent["seconds"] += used()
        spent["wall"] += time.monotonic()
        item.user_properties.append(("cost", dict(spent)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cost = dict(report.user_properties).get("cost")
    if report.when != "teardown" or not isinstance(cost, dict):
        return
    total = _files.setdefault(report.nodeid.partition("::")[0], Counter())
    total.update(cost, tests=1)
    _starting.update(tests=1, starting=cost.get("engines", 0) > 0, **cost)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known |= {
        file: {name: round(total[name]) for name in FIELDS if round(total[name])}
        for file, total in _files.items()
    }
    root = RECORD.parents[1]
    kept = {file: known[file] for file in sorted(known) if (root / file).exists()}
    lines = ",\n".join(f" {json.dumps(file)}: {json.dumps(cost)}" for file, cost in kept.items())
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = "{tests} tests took {seconds:.0f} s of processors; {starting} of them started {engines} "
    terminalreporter.write_line(f"{said}engines, in {{ranks}} ranks".format_map(_starting))
