"""The common frame of the benchmarks: turns, statistics, results that resume, tables, workers."""

from __future__ import annotations

import itertools
import json
import os
import time
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.framework import (
    AnonPeak,
    Benchmark,
    Case,
    CaseRefused,
    Goal,
    Measured,
    TimeIsUp,
    Worker,
    WorkerError,
    alternate,
    run,
    timed,
)
from benchmarks.framework.hardware import hardware
from benchmarks.framework.plots import plot
from benchmarks.framework.results import median_interval, ratio, summary
from benchmarks.framework.tables import amount, markdown, span, title
from benchmarks.registry import CPU, available, load

COUNTS = {"calls": 0}


def two(settings, context):
    COUNTS["calls"] += 1
    (context.scratch / "left behind").write_text("gone afterwards")
    if settings.get("refuse"):
        raise CaseRefused("too small a machine")
    return Measured(
        samples={
            "slow": {"seconds": [2.0, 4.0, 8.0], "images_per_second": [5.0, 5.0, 5.0]},
            "fast": {"seconds": [1.0, 2.0, 6.0], "images_per_second": [6.0, 7.0, 8.0]},
        },
        baseline="slow",
        facts={"settings": settings},
    )


def benchmark(**second):
    return Benchmark(
        name="example",
        title="two ways",
        cases=lambda _quick: (
            Case(name="first", settings={"sizes": (1, 2)}, measure=two),
            Case(name="second", settings=second, measure=two),
        ),
        goals=(
            Goal(text="half", case="first", contestant="fast", against="slow",
                 quantity="seconds", limit=0.5),
            Goal(text="more", case="first", contestant="fast", against="slow",
                 quantity="images_per_second", limit=1.5),
            Goal(text="absolute", case="first", contestant="fast", quantity="seconds", limit=1.5),
            Goal(text="another's", case="elsewhere", contestant="x", quantity="seconds", limit=1),
        ),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def counted():
    COUNTS["calls"] = 0


def test_goals_are_judged_in_their_direction(tmp_path):
    result = run(benchmark(refuse=True), output=tmp_path)
    goals = {goal["text"]: (goal["reached"], goal["met"]) for goal in result["goals"]}
    assert goals == {"half": (0.5, True), "more": (1.4, False), "absolute": (2.0, False)}


def test_the_ratio_is_that_of_each_round_and_not_of_the_medians(tmp_path):
    result = run(benchmark(), output=tmp_path)
    seconds = result["cases"][0]["contestants"]["fast"]["seconds"]
    assert seconds["samples"] == [1.0, 2.0, 6.0]
    assert seconds["ratio"] == {"median": 0.5, "q1": 0.5, "q3": 0.625}
    assert seconds["median"] / 4.0 == 0.5
    assert "ratio" not in result["cases"][0]["contestants"]["slow"]["seconds"]


def test_what_was_measured_is_not_measured_again(tmp_path):
    run(benchmark(size=1), output=tmp_path)
    assert COUNTS["calls"] == 2
    run(benchmark(size=1), output=tmp_path)
    assert COUNTS["calls"] == 2
    run(benchmark(size=2), output=tmp_path)
    assert COUNTS["calls"] == 3, "other settings are another measurement"
    run(benchmark(size=2), output=tmp_path, fresh=True)
    assert COUNTS["calls"] == 5


def test_results_of_two_machines_lie_beside_each_other(tmp_path, monkeypatch):
    machine = hardware() | {"devices": [{"name": "NVIDIA H200", "gib": 140.0}]}
    monkeypatch.setattr("benchmarks.framework.results.hardware", lambda: machine)
    run(benchmark(), output=tmp_path)
    first = json.loads((tmp_path / "example.json").read_text())
    machine["devices"][0]["name"] = "NVIDIA H100 80GB HBM3"
    run(benchmark(), output=tmp_path)
    assert COUNTS["calls"] == 4, "what another machine measured is not taken for this one's"
    (other,) = tmp_path.glob("example@*.json")
    assert other.name.startswith("example@NVIDIA-H200-")
    assert json.loads(other.read_text()) == first
    machine["devices"][0]["name"] = "NVIDIA H200"
    run(benchmark(), output=tmp_path)
    assert COUNTS["calls"] == 4, "back on the first machine, its cases are there"
    assert json.loads((tmp_path / "example.json").read_text())["cases"] == first["cases"]
    assert {path.name[:19] for path in tmp_path.glob("example@*.json")} == {
        "example@NVIDIA-H100",
        "example@NVIDIA-H200",
    }


def test_the_end_of_one_benchmarks_time_is_no_error(tmp_path):
    def late(_settings, _context):
        raise TimeIsUp("run it again to go on")

    whole = benchmark()
    first, second = whole.cases(False)
    cut = attrs.evolve(
        whole, cases=lambda _quick: (first, Case(name="second", settings={}, measure=late))
    )
    assert [case["name"] for case in run(cut, output=tmp_path)["cases"]] == ["first"]
    assert len(run(whole, output=tmp_path)["cases"]) == 2
    assert COUNTS["calls"] == 2
    assert second.name == "second"


def test_an_interrupted_run_goes_on(tmp_path):
    def broken(_settings, _context):
        raise KeyboardInterrupt

    whole = benchmark()
    first, second = whole.cases(False)
    cut = Benchmark(
        name="example",
        title="two ways",
        cases=lambda _quick: (first, Case(name="second", settings={}, measure=broken)),
    )
    with pytest.raises(KeyboardInterrupt):
        run(cut, output=tmp_path)
    stored = json.loads((tmp_path / "example.json").read_text())
    assert [case["name"] for case in stored["cases"]] == ["first"]
    run(whole, output=tmp_path)
    assert COUNTS["calls"] == 2
    assert second.name in (tmp_path / "example.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "example.json", "example.md", "example.png",
    ]  # fmt: skip


def test_a_refused_case_says_why_and_is_not_tried_again(tmp_path):
    for _ in range(2):
        result = run(benchmark(refuse=True), output=tmp_path)
    assert COUNTS["calls"] == 2
    assert result["cases"][1]["refused"] == "too small a machine"
    assert "Did not run: too small a machine" in (tmp_path / "example.md").read_text()


def test_a_quick_run_does_not_replace_a_full_one(tmp_path):
    run(benchmark(), output=tmp_path)
    with pytest.raises(SystemExit, match="another --output"):
        run(benchmark(), output=tmp_path, quick=True)


def test_a_benchmark_for_a_gpu_says_so(tmp_path):
    pytest.importorskip("torch")
    if hardware()["devices"]:
        pytest.skip("there is a GPU")
    whole = benchmark()
    large = Benchmark(name="example", title="x", cases=whole.cases, device="gpu")
    with pytest.raises(SystemExit, match="needs a GPU"):
        run(large, output=tmp_path)
    assert run(large, output=tmp_path, quick=True)["quick"]


def test_contestants_take_turns():
    order = []
    contestants = {name: (lambda name=name: order.append(name) or {"n": 1}) for name in "abc"}
    samples = alternate(contestants, rounds=2, warm_up=1)
    assert "".join(order) == "abccbabca"
    assert samples == {name: {"n": [1.0, 1.0]} for name in "abc"}


def test_a_call_is_timed_over_all_its_repeats(monkeypatch):
    clock = iter([5.0, 5.75])
    now = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("benchmarks.framework.running.time", now)
    calls = []
    assert timed(lambda: calls.append(1), count=3)() == {"seconds": 0.25}
    assert len(calls) == 3


def test_what_is_nothing_or_less_is_drawn_too(tmp_path):
    result = run(benchmark(), output=tmp_path)
    for samples in ([0.0, 0.0], [-1.0, -0.5]):
        for contestant in ("slow", "fast"):
            found = summary(samples) | {"samples": samples}
            result["cases"][0]["contestants"][contestant]["seconds"] = found
        assert plot(result, tmp_path / "chart.png") == tmp_path / "chart.png"


def test_the_interval_of_a_median_is_that_of_order_statistics():
    expected = {1: (1, 1), 2: (1, 2), 5: (1, 5), 6: (1, 6), 9: (2, 8), 15: (4, 12), 40: (14, 27)}
    for count, interval in expected.items():
        assert median_interval(range(1, count + 1)) == interval


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_quartiles_lie_within_the_range(samples):
    found = summary(samples)
    ordered = [found[key] for key in ("min", "q1", "median", "q3", "max")]
    for low, high in itertools.pairwise(ordered):
        assert low <= high * (1 + 1e-5)


def test_ratios_with_nothing_to_divide_by():
    assert ratio([1.0], []) is None
    assert ratio([1.0, 2.0], [0.0, 1.0]) is None
    assert ratio([1.0, 2.0, 3.0], [4.0])["median"] == 0.5


@pytest.mark.parametrize(
    ("value", "quantity", "text"),
    [
        (0.0123, "seconds", "12.3 ms"),
        (2.5e-5, "save_seconds", "25 µs"),
        (12.0, "seconds", "12 s"),
        (3 * 2**30, "host_bytes", "3 GiB"),
        (1.5 * 2**20, "read_bytes_per_second", "1.5 MiB/s"),
        (81.25, "images_per_second", "81.25/s"),
        (512, "bytes", "512 B"),
        (0.5, "share", "0.5"),
    ],
)
def test_values_have_the_unit_their_name_tells(value, quantity, text):
    assert amount(value, quantity) == text


def test_names_and_ranges():
    assert title("save_to_disk_seconds") == "save to disk"
    assert title("write_bytes_per_second") == "write"
    assert title("seconds") == "time"
    assert span(0.001, 0.002, "seconds") == "1 to 2 ms"
    assert span(0.5, 2.0, "seconds") == "500 ms to 2 s"


def test_the_table_has_every_contestant(tmp_path):
    text = markdown(run(benchmark(), output=tmp_path))
    assert "| fast | time | 2 s | 1.5 to 4 s | 1 to 6 s | 0.500 (0.500 to 0.625) |" in text
    assert "| slow | time | 4 s | 3 to 6 s | 2 to 8 s |  |" in text


class Holder:
    """Lives in a worker."""

    def __init__(self, start):
        self.value = start + int(os.environ.get("ADDED", "0"))
        self.kept = None

    def add(self, much):
        self.value += much
        return self.value, os.getpid()

    def allocate(self, nbytes):
        self.kept = bytearray(os.urandom(1)) * nbytes
        time.sleep(0.5)  # Somebody looks every few milliseconds, but for what else runs.
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


def test_a_worker_tells_what_went_wrong():
    with Worker(Holder, 1) as worker, pytest.raises(WorkerError, match="on purpose"):
        worker.call("fail")
    with Worker(Holder, 1) as worker, pytest.raises(WorkerError, match="exit code 3"):
        worker.call("die")


def test_all_that_is_registered_is_there():
    assert set(CPU) <= set(available())
    for name in available():
        assert load(name).name == name
        names = [case.name for case in load(name).cases(True)]
        assert names
        assert len(set(names)) == len(names)
