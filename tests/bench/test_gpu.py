"""The GPU session, reduced to this machine, and how it ends when interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import Piece, goals, main, pieces, report
from tests.bench.noting import (
    HERE,
    MACHINE,
    fail,
    grow,
    last,
    leave,
    note_and_kill,
    piece,
    run,
)
from tests.support.waiting import wait_for
from zerotune.backend.proof import Combination, Outcome, Proof
from zerotune.training import proving

ROOT = Path(__file__).resolve().parents[2]


def names(output: Path) -> list[str]:
    path = output / "ran"
    return path.read_text().split() if path.exists() else []


def run_chain(output: Path, killing: int) -> int:
    """Run the chain in a process of its own, which a piece may kill."""
    code = (
        f"from pathlib import Path\nfrom {HERE} import *\n"
        f"run(Path({str(output)!r}), *chain({killing}))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


@pytest.mark.parametrize("killing", [1])
def test_a_session_killed_during_any_piece_resumes_with_that_piece(
    tmp_path: Path, killing: int
) -> None:
    assert run_chain(tmp_path, killing) == -signal.SIGKILL
    whole = [f"p{index}" for index in range(3)]
    stored = tmp_path / "machine.json"
    kept = list(json.loads(stored.read_text())["pieces"]) if stored.exists() else []
    assert kept == whole[:killing]
    assert run_chain(tmp_path, killing) == 0
    assert list(json.loads(stored.read_text())["pieces"]) == whole
    # Saved pieces are not measured again; the interrupted one is.
    assert names(tmp_path) == whole[: killing + 1] + whole[killing:]


def test_a_piece_ends_when_its_session_is_killed(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path\nfrom {HERE} import *\n"
        f"run(Path({str(tmp_path)!r}), piece('x', last))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_a_failed_piece_is_tried_twice_records_its_error_and_stops_no_other(tmp_path: Path) -> None:
    for _ in range(3):
        whole, entries = run(tmp_path, piece("bad", fail), piece("left", leave), piece("good"))
    assert whole
    assert names(tmp_path) == ["bad", "left", "good", "bad", "left"]
    assert entries["left"]["state"] == "failed with exit code 1", "SystemExit is no result"
    assert entries["bad"]["state"] == "failed with exit code 1"
    assert "ValueError: this is why" in entries["bad"]["output"]
    assert entries["good"]["state"] == "done"


def test_partial_results_of_a_failed_piece_are_kept(tmp_path: Path) -> None:
    for tries in (1, 2):
        _, entries = run(tmp_path, piece("measured", grow))
        entry = entries["measured"]
        assert entry["tries"] == tries
        assert entry["result"]["seconds"] == [1.0, 2.0, 3.0], "also by a later try that knew less"
    assert entry["state"] == "failed with exit code 3"
    assert "| measured | failed with exit code 3 |" in report(MACHINE, entries)


def test_a_failed_check_is_named_with_its_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {
        "rounding": Outcome(passed=True, detail="", evidence="", seconds=1.0),
        "training": Outcome(passed=False, detail="weights differ", evidence="w: 1", seconds=1.0),
    }
    proof = Proof(combination=Combination.here("cpu"), checks=checks)
    monkeypatch.setattr(proving, "prove", lambda **_: proof)
    stored = []
    monkeypatch.setattr("zerotune.backend.proof.store_proof", stored.append)
    found = gpu.prove({})
    assert next(found) == {"rounding": "passed", "training": "failed. weights differ"}
    with pytest.raises(RuntimeError, match="training failed"):
        next(found)
    assert "training\nw: 1" in capsys.readouterr().out
    assert stored == [proof], "later pieces read it"


def test_a_piece_beyond_its_own_time_limit_is_ended(tmp_path: Path) -> None:
    _, entries = run(tmp_path, piece("slow", last, limit_s=3.0))
    assert (entries["slow"]["state"], entries["slow"]["tries"]) == ("out of time", 1)


def test_a_piece_cut_short_by_the_end_of_the_session_is_not_a_failure(tmp_path: Path) -> None:
    whole, entries = run(tmp_path, piece("slow", last), piece("next", least_s=30.0), left=3.0)
    assert not whole
    assert (entries["slow"]["state"], entries["slow"]["tries"]) == ("cut short", 0)
    assert "next" not in entries, "too little time was left to begin it"


def test_the_report_shows_each_result_beside_its_estimate() -> None:
    result = {"device_bytes": 4 * 2**30, "host_bytes": 2**30, "seconds": [3.0, 1.0, 2.0],
              "estimate": {"device": 5 * 2**30, "host": 2**29}, "start_seconds": 1.5}  # fmt: skip
    entry = {"state": "done", "seconds": 12.0, "result": result}
    name = "sdxl 1024², batch 1: stage 2"
    text = report(MACHINE, {name: entry}, goals({name: entry}))
    assert f"| {name} | done | 12 | 2 | 4.00 | 5.00 (+25%) | 1.00 | 0.50 (-50%) |" in text
    assert "1024², batch 1 in 6.9 GiB, set-up included: met, 4.00 GiB" in text
    assert "1024², batch 8 in 8.5 GiB: not measured" in text
    assert "- start_seconds: 1.5" in text


def test_the_most_informative_pieces_come_first() -> None:
    found = list(pieces(MACHINE, quick=False))
    order = [one.name for one in found]
    assert order[:13] == [
        "ops",
        "proof",
        "rates",
        "streamed, sdxl 1024², batch 8: Streamed, clipping 1",
        "streamed, sdxl 1024², batch 8: ZeRO-3, clipping 1",
        "sdxl 1024², batch 8: Ours, 1",
        "sdxl 1024², batch 8: Reference, 1",
        "sdxl 1024², batch 1: stage 2",
        "sdxl 1024², batch 1: stage 3",
        "sdxl 128², batch 8: stage 3",
        "sdxl 128², batch 8: Reference",
        "tiny training at stage 2",
        "tiny training at stage 3",
    ]
    assert found[0].settings["ops"][0] == "cpu_adam"
    measured = {piece for _, piece, _ in gpu._GOALS}
    assert measured < set(order[:11]), "the goals are measured within the first ten minutes"
    turns = [name for name in order if name.startswith("sdxl 1024², batch 8")]
    assert [name.split(": ")[1] for name in turns] == ["Ours, 1", "Reference, 1", "Ours, 2",
                                                       "Reference, 2"]  # fmt: skip
    assert "flux, 6 + 12 blocks, 1024², batch 1: Reference" in order
    assert len(set(order)) == len(order)
    quick = list(pieces(MACHINE, quick=True))
    kinds = {(one.made, one.settings.get("made")) for one in found}
    # TrainStream compiles for a GPU only.
    kinds.remove(("bench.contestants:contestant", "TrainStreamed"))
    assert kinds == {(one.made, one.settings.get("made")) for one in quick}
    assert all(one.limit_s <= 240 for one in found), "the longest fits into ten minutes twice"


def test_one_piece_of_the_session_runs_on_this_machine(tmp_path: Path) -> None:
    main(["--quick", "--minutes", "9", "--output", str(tmp_path), "--piece", "rates"])
    (stored,) = tmp_path.glob("*-quick.json")
    (entry,) = json.loads(stored.read_text())["pieces"].values()
    assert entry["state"] == "done", entry
    assert entry["result"]["host_copy_bytes_per_second"] > 1e8
    assert "| rates |" in (tmp_path / f"{stored.stem}.md").read_text()


@pytest.mark.deepspeed
@pytest.mark.nightly
def test_the_whole_session_runs_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--minutes", "9", "--output", str(tmp_path)]
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
    # The second call only inspects the machine.
    before = stored.read_text()
    assert main(arguments) == 0
    assert stored.read_text() == before
    assert capsys.readouterr().err.strip().endswith("all has been run")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Pretend that this machine has a GPU; return the session's list of pieces to fill."""
    found: list[Piece] = []
    look_as(monkeypatch, MACHINE)
    monkeypatch.setattr(gpu, "pieces", lambda _about, **_quick: found)
    return found


def look_as(monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    looked = {"state": "done", "result": machine}
    run_piece = gpu.run_piece
    monkeypatch.setattr(
        gpu,
        "run_piece",
        lambda one, *rest, **more: looked if one is gpu.MACHINE else run_piece(one, *rest, **more),
    )


def test_a_report_exists_whenever_the_session_is_killed(tmp_path: Path) -> None:
    code = (
        f"import time\nfrom pathlib import Path\nfrom {HERE} import *\nfrom bench import gpu\n"
        "look = gpu.run_piece\n"
        "gpu.run_piece = lambda one, folder, left: ({'state': 'done', 'result': MACHINE}\n"
        "    if one is gpu.MACHINE else look(one, folder, left=left))\n"
        "gpu.pieces = lambda about, quick: chain(1)\n"
        f"gpu.run_session(Path({str(tmp_path)!r}), until=time.monotonic() + 120, quick=False)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    for killed in (True, False):
        done = subprocess.run(command, check=False, env=environment, cwd=ROOT)
        assert done.returncode == (-signal.SIGKILL if killed else 0)
        (told,) = tmp_path.glob("*.md")
        assert "| p0 | done |" in told.read_text()
        assert ("| p2 |" in told.read_text()) is not killed
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == [], "what the killed one left was removed"


@pytest.mark.parametrize("missing", ["deepspeed", "diffusers"])
def test_a_missing_package_that_all_pieces_need_is_reported_at_once(
    missing: str, tmp_path: Path, on_a_gpu: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {name: one for name, one in MACHINE["versions"].items() if name != missing}
    look_as(monkeypatch, {**MACHINE, "versions": versions})
    on_a_gpu.append(piece("one", note_and_kill))
    with pytest.raises(SystemExit, match=rf"^{missing}: neither installed .* tools\.carry"):
        main(["--output", str(tmp_path)])


def test_a_checkout_runs_without_any_installed_package() -> None:
    # ``-S`` leaves only the standard library, as on a bare machine.
    command = [sys.executable, "-S", "-m", "bench.gpu", "--help"]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--minutes" in done.stdout


SOME_TESTS = """
    import time
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.gpu

    def test_passes():
        pass

    def test_fails():
        raise ValueError("this is why")

    @pytest.mark.skip(reason="no second device")
    def test_is_skipped():
        pass

    def test_lasts():
        Path({begun!r}).touch()
        time.sleep(600)
"""


def test_tests_that_outlast_their_time_are_interrupted_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, file = tmp_path / "begun", tmp_path / "test_some.py"
    file.write_text(textwrap.dedent(SOME_TESTS.format(begun=str(begun))))

    class Impatient(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            wait_for(begun.exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    # SIGINT is ignored, as in a process that a shell starts in the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = gpu.tests({"files": [str(file)], "limit_s": 100.0})
    finally:
        signal.signal(signal.SIGINT, before)
    (failure,), (skip,) = found.pop("failures"), found.pop("skips")
    assert "test_fails" in failure
    assert "ValueError: this is why" in failure
    assert "no second device" in skip
    assert found == {"passed": 1, "skipped": 1, "failed": 1, "whole": False}


def test_only_files_with_device_tests_are_selected() -> None:
    found = gpu.marked(["tests", "tests/builder/test_page.py"])
    assert {"tests/backend/test_cuda.py", "tests/backend/test_proof.py"} < set(found)
    assert "tests/builder/test_page.py" not in found
    assert len(found) < 20


def test_full_sizes_are_refused_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_as(monkeypatch, {**MACHINE, "hardware": {**MACHINE["hardware"], "devices": []}})
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["--output", str(tmp_path)])
