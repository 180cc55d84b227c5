"""The session on a GPU, reduced and on whatever there is; and what it does when it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import carry
from benchmarks.__main__ import main
from benchmarks.gpu import LOOK, goals, pieces
from benchmarks.session import Piece, Session, report
from tests.benchmarks.noting import HERE, MACHINE, fail, last, piece, session

ROOT = Path(__file__).resolve().parents[2]


def names(output: Path) -> list[str]:
    path = output / "ran"
    return path.read_text().split() if path.exists() else []


def run_chain(output: Path, killing: int) -> int:
    """In a process of its own, which a piece may kill."""
    code = (
        f"from pathlib import Path\nfrom {HERE} import *\n"
        f"made, file = session(Path({str(output)!r}))\n"
        f"made.run(chain({killing}), file)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


@pytest.mark.parametrize("killing", range(3))
def test_a_session_killed_during_any_piece_goes_on_with_it(tmp_path: Path, killing: int) -> None:
    assert run_chain(tmp_path, killing) == -signal.SIGKILL
    whole = [f"p{index}" for index in range(3)]
    stored = tmp_path / "machine.json"
    kept = list(json.loads(stored.read_text())["pieces"]) if stored.exists() else []
    assert kept == whole[:killing]
    assert run_chain(tmp_path, killing) == 0
    assert list(json.loads(stored.read_text())["pieces"]) == whole
    # What was saved is not measured again; what was under way is.
    assert names(tmp_path) == whole[: killing + 1] + whole[killing:]


def test_a_piece_dies_with_its_session(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path\nfrom {HERE} import *\n"
        f"made, file = session(Path({str(tmp_path)!r}))\nmade.run([piece('x', last)], file)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    try:
        _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    _until(lambda: not Path(f"/proc/{pid}").exists())


def _until(condition: Any) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_what_fails_says_why_is_tried_twice_and_stops_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        made, file = session(tmp_path)
        whole = made.run([piece("bad", fail), piece("good")], file)
    assert whole
    assert names(tmp_path) == ["bad", "good", "bad"]
    assert file.entries["bad"]["state"] == "failed with exit code 1"
    assert "ValueError: this is why" in file.entries["bad"]["output"]
    assert file.entries["good"]["state"] == "done"


def test_a_piece_beyond_its_own_limit_is_ended(tmp_path: Path) -> None:
    made, file = session(tmp_path)
    made.run([piece("slow", last, limit_s=3.0)], file)
    assert (file.entries["slow"]["state"], file.entries["slow"]["tries"]) == ("out of time", 1)


def test_what_the_end_of_the_time_cut_short_is_no_failure(tmp_path: Path) -> None:
    began = time.monotonic() - 60 + 8
    made, file = session(tmp_path, minutes=1.0, began=began)
    assert not made.run([piece("slow", last), piece("next", least_s=30.0)], file)
    assert (file.entries["slow"]["state"], file.entries["slow"]["tries"]) == ("cut short", 0)
    assert "next" not in file.entries, "too little time was left to begin it"


def test_other_settings_are_another_measurement(tmp_path: Path) -> None:
    made, file = session(tmp_path)
    once = piece("one")
    made.run([once], file)
    assert not file.needs(once)
    assert file.needs(Piece(name="one", made=once.made, settings={"name": "two"}))


def test_the_report_lays_each_result_beside_what_was_expected() -> None:
    result = {"device_bytes": 4 * 2**30, "host_bytes": 2**30, "seconds": [3.0, 1.0, 2.0],
              "estimate": {"device": 5 * 2**30, "host": 2**29}, "start_seconds": 1.5}  # fmt: skip
    entry = {"state": "done", "seconds": 12.0, "result": result}
    name = "sdxl 1024², batch 1: stage 2"
    text = report(MACHINE, {name: entry}, goals({name: entry}))
    assert f"| {name} | done | 12 | 2 | 4.00 | 5.00 (+25%) | 1.00 | 0.50 (-50%) |" in text
    assert "1024², batch 1 in 6.9 GiB, set-up included: met, 4.00 GiB" in text
    assert "1024², batch 8 in 8.5 GiB: not measured" in text
    assert "- start_seconds: 1.5" in text


def test_time_is_compared_over_all_turns() -> None:
    def ran(*seconds: float) -> dict[str, Any]:
        return {"state": "done", "result": {"seconds": list(seconds)}}

    entries = {
        "sdxl 1024², batch 8: Ours, 1": ran(2.0, 2.0),
        "sdxl 1024², batch 8: Ours, 2": ran(2.0),
        "sdxl 1024², batch 8: Reference, 1": ran(4.0),
    }
    assert goals(entries)[-1] == "- 1024², batch 8 in 0.7 of the reference's time: met, 0.50"


def test_pieces_come_in_the_order_of_what_they_teach() -> None:
    found = list(pieces(MACHINE, quick=False))
    order = [one.name for one in found]
    assert order[:5] == ["ops", "rates", "tiny training at stage 2", "tiny training at stage 3",
                         "tests"]  # fmt: skip
    assert found[0].settings["ops"][0] == "cpu_adam"
    turns = [name for name in order if name.startswith("sdxl 1024², batch 8")]
    assert [name.split(": ")[1] for name in turns] == ["Ours, 1", "Reference, 1", "Ours, 2",
                                                       "Reference, 2"]  # fmt: skip
    assert order[-1] == "flux, 6 + 12 blocks, 1024², batch 1: Reference"
    assert len(set(order)) == len(order)
    quick = list(pieces(MACHINE, quick=True))
    kinds = {(one.made, one.settings.get("made")) for one in found}
    assert kinds == {(one.made, one.settings.get("made")) for one in quick}
    assert all(one.limit_s <= 240 for one in found), "the longest fits into ten minutes twice"


@pytest.mark.deepspeed
def test_the_whole_of_it_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpu", "--quick", "--minutes", "9", "--output", str(tmp_path)]
    assert main(arguments) == 0
    (stored,) = tmp_path.glob("*-quick.json")
    data = json.loads(stored.read_text())
    about = data["machine"]
    entries = data["pieces"]
    wanted = [one.name for one in pieces(about, quick=True)]
    assert {name: entries[name]["state"] for name in wanted} == dict.fromkeys(wanted, "done"), [
        entry.get("output") for entry in entries.values()
    ]
    assert entries["rates"]["result"]["host_copy_bytes_per_second"] > 1e8
    trained = entries["tiny training at stage 2"]["result"]
    assert trained["estimate"]["host"] > 0 < trained["host_bytes"]
    raw = entries["tiny: Reference"]["result"]["host_waits"]["numbers_read"]
    assert trained["host_waits"]["numbers_read"] < 20 < raw, "DeepSpeed asks per parameter"
    assert (tmp_path / trained["trace"]).stat().st_size > 1000
    assert entries["tests"]["result"]["failed"] == 0
    assert "passed" in (tmp_path / f"{stored.stem}.md").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(list(tmp_path.iterdir())) <= 8
    capsys.readouterr()
    # The second call only looks at the machine.
    before = stored.read_text()
    assert main(arguments) == 0
    assert stored.read_text() == before
    assert "all is there" in capsys.readouterr().err


def test_without_a_gpu_the_full_sizes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {**MACHINE, "hardware": {**MACHINE["hardware"], "devices": []}}
    monkeypatch.setattr(Session, "look", lambda _self, piece: bare if piece is LOOK else None)
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["gpu", "--output", str(tmp_path)])


# -- Wheels for a machine without a network.


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines))
        archive.writestr(f"{name}-{version}.data/purelib/{name}_beside.py", "")
    return path


def test_what_the_other_machine_lacks_is_carried_and_what_it_needs(tmp_path: Path) -> None:
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


def test_too_many_wheels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path, "large", "1")
    monkeypatch.setattr(carry, "LIMIT", 10)
    with pytest.raises(SystemExit, match=rf"the largest: {path.name}"):
        carry.check_size(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "torch", "version": "2.11.0"}, {"name": "attrs", "version": "26.1"}]',
        "Package    Version\n---------- -------\ntorch      2.11.0\nattrs      26.1\n",
    ],
)
def test_what_a_machine_has_is_read_in_either_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list"
    path.write_text(text)
    assert carry.read_list(path) == {"torch": "2.11.0", "attrs": "26.1"}


def test_wheels_are_unpacked_without_pip_and_once(tmp_path: Path) -> None:
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
