"""The benchmark runner: turns, statistics, resumable results, tables, workers."""

from __future__ import annotations

import json
import os
import time

import attrs
import pytest

from bench.__main__ import NAMES, main
from bench.runner import (
    Benchmark,
    Case,
    Goal,
    LeftOutError,
    Measured,
    alternate,
    compact,
    judged,
    load,
    median_interval,
    run,
    summarised,
)
from bench.show import markdown
from bench.workers import AnonPeak, Worker, WorkerError

COUNTS = {"calls": 0}


SAMPLES = {
    "slow": {"seconds": [2.0, 4.0, 8.0], "images_per_second": [5.0, 5.0, 5.0]},
    "fast": {"seconds": [1.0, 2.0, 6.0], "images_per_second": [6.0, 7.0, 8.0]},
}


def two(settings, scratch):
    COUNTS["calls"] += 1
    (scratch / "left behind").write_text("gone afterwards")
    return Measured(samples=SAMPLES, baseline="slow", facts={"settings": settings})


def benchmark(**second):
    return Benchmark(
        name="example",
        title="two ways",
        cases=lambda _quick: (Case("first", two, {"sizes": (1, 2)}), Case("second", two, second)),
        ours=("fast",),
        goals=(
            Goal("half", "first", "fast", "seconds", 0.5, "slow"),
            Goal("more", "first", "fast", "images_per_second", 1.5, "slow"),
            Goal("absolute", "first", "fast", "seconds", 1.5),
            Goal("another's", "elsewhere", "x", "seconds", 1),
        ),
    )


@pytest.fixture(autouse=True)
def counted():
    COUNTS["calls"] = 0


def test_goals_record_the_value_reached(tmp_path):
    goals = {goal["text"]: goal["reached"] for goal in run(benchmark(), output=tmp_path)["goals"]}
    assert goals == {"half": 0.5, "more": 1.4, "absolute": 2.0}
    assert judged(benchmark().goals[0], SAMPLES)["interval"] == [0.5, 0.75]


def test_the_ratio_is_computed_per_round_and_not_from_the_medians(tmp_path):
    result = run(benchmark(), output=tmp_path)
    seconds = result["cases"][0]["contestants"]["fast"]["seconds"]
    assert seconds == {"q1": 1.5, "median": 2.0, "q3": 4.0, "ratio": [0.5, 0.5, 0.625]}
    assert "ratio" not in result["cases"][0]["contestants"]["slow"]["seconds"]


def test_a_stored_measurement_is_not_repeated(tmp_path):
    first = run(benchmark(size=1), output=tmp_path)
    assert COUNTS["calls"] == 2
    assert run(benchmark(size=1), output=tmp_path) == json.loads(compact(first))
    assert COUNTS["calls"] == 2
    run(benchmark(size=2), output=tmp_path)
    assert COUNTS["calls"] == 3, "other settings are another measurement"
    run(benchmark(size=2), output=tmp_path, fresh=True)
    assert COUNTS["calls"] == 5


def test_an_interrupted_run_resumes(tmp_path):
    def broken(_settings, _scratch):
        raise KeyboardInterrupt

    whole = benchmark()
    first, _ = whole.cases(False)
    cut = attrs.evolve(whole, cases=lambda _quick: (first, Case("second", broken, {})))
    with pytest.raises(KeyboardInterrupt):
        run(cut, output=tmp_path)
    stored = json.loads((tmp_path / "example.json").read_text())
    assert [case["name"] for case in stored["cases"]] == ["first"]
    assert len(stored["goals"]) == 3
    assert len(run(whole, output=tmp_path)["goals"]) == 3
    assert COUNTS["calls"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["example.json"]


def test_a_case_that_is_left_out_is_not_stored(tmp_path, capsys):
    def too_large(_settings, _scratch):
        raise LeftOutError("no room")

    first, second = benchmark().cases(False)
    cut = attrs.evolve(first, measure=too_large)
    whole = attrs.evolve(benchmark(), cases=lambda _quick: (cut, second))
    assert [case["name"] for case in run(whole, output=tmp_path)["cases"]] == ["second"]
    assert "example: left out: no room" in capsys.readouterr().err


def test_a_quick_run_does_not_replace_a_full_one(tmp_path):
    run(benchmark(), output=tmp_path)
    with pytest.raises(SystemExit, match="another --output"):
        run(benchmark(), output=tmp_path, quick=True)


def test_contestants_take_turns():
    order = []
    contestants = {name: (lambda name=name: order.append(name) or {"n": 1}) for name in "abc"}
    samples = alternate(contestants, rounds=2, warm_up=1)
    assert "".join(order) == "abccbabca"
    assert samples == {name: {"n": [1.0, 1.0]} for name in "abc"}


def test_the_interval_of_a_median_comes_from_order_statistics():
    expected = {1: (1, 1), 2: (1, 2), 5: (1, 5), 6: (1, 6), 9: (2, 8), 15: (4, 12), 40: (14, 27)}
    for count, interval in expected.items():
        assert median_interval(range(1, count + 1)) == interval


@pytest.mark.parametrize(
    ("ours", "theirs", "reached"),
    [([1.0], [], None), ([1.0, 2.0], [0.0, 1.0], None), ([1.0, 2.0, 3.0], [4.0], 0.5)],
)
def test_a_ratio_without_a_divisor_is_omitted(ours, theirs, reached):
    samples = {"ours": {"seconds": ours}, "theirs": {"seconds": theirs}}
    goal = Goal("less", "case", "ours", "seconds", 1.0, "theirs")
    assert judged(goal, samples)["reached"] == reached
    found = summarised(Measured(samples={"ours": samples["ours"], "theirs": {}}, baseline="theirs"))
    assert "ratio" not in found["contestants"]["ours"]["seconds"]


def test_the_table_has_every_contestant(tmp_path):
    text = markdown(run(benchmark(), output=tmp_path))
    assert "| fast | time | 2 s | 1.5 to 4 s | 0.500 (0.500 to 0.625) |" in text
    assert "| slow | time | 4 s | 3 to 6 s |  |" in text


class Holder:
    """State kept in a worker."""

    def __init__(self, start):
        self.value = start + int(os.environ.get("ADDED", "0"))
        self.kept = None

    def add(self, much):
        self.value += much
        return self.value, os.getpid()

    def allocate(self, nbytes):
        self.kept = bytearray(os.urandom(1)) * nbytes
        time.sleep(0.5)  # Memory is sampled every few milliseconds, less often on a busy machine.
        self.kept = None

    def fail(self):
        raise ValueError("on purpose")

    def die(self):
        os._exit(3)


def test_a_worker_keeps_its_state_in_another_process():
    with Worker(Holder, 40, environment={"ADDED": "1"}) as worker:
        assert worker.call("add", 1) == (42, worker.pid)
        assert worker.pid != os.getpid()
        _, peak = worker.peak("allocate", 2**26)
        with AnonPeak(worker.pid) as after:
            worker.call("add", 0)
    assert peak - after.before > 0.9 * 2**26


def test_a_worker_reports_its_errors():
    with Worker(Holder, 1) as worker, pytest.raises(WorkerError, match="on purpose"):
        worker.call("fail")
    with Worker(Holder, 1) as worker, pytest.raises(WorkerError, match="exit code 3"):
        worker.call("die")


@pytest.mark.parametrize("name", NAMES)
def test_every_goal_refers_to_an_existing_case(name):
    found = load(name)
    assert found.name == name
    for quick in (True, False):
        names = [case.name for case in found.cases(quick)]
        assert names
        assert len(set(names)) == len(names)
        json.dumps([case.settings for case in found.cases(quick)])
    assert {goal.case for goal in found.goals} <= set(names)


def test_a_part_of_a_name_that_no_case_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["large", "--quick", "--case", "SD 9"])
    message = capsys.readouterr().err
    assert "no case has 'SD 9' in its name" in message
    assert "SD 1.5, streamed, bf16 moments" in message
