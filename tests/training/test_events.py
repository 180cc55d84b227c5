"""The metrics file: one line per step, whatever happens in between."""

from __future__ import annotations

import json

import pytest

from tests.training.fakes import METRICS, drive
from zerotune.errors import DataError, InvalidValueError
from zerotune.training import MetricsFile, read_metrics


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    drive(MetricsFile(path), steps=range(1, 4))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    read = read_metrics(path)
    assert read[0] == METRICS
    assert [metrics.step for metrics in read] == [1, 2, 3]


def test_a_second_fit_appends(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 3))
    drive(file, steps=range(3, 5))
    assert [metrics.step for metrics in read_metrics(file.path)] == [1, 2, 3, 4]


def test_steps_taken_again_after_a_resume_are_in_the_file_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 6), loss=1.0)
    drive(file, steps=range(4, 8), loss=2.0)
    read = read_metrics(file.path)
    assert [metrics.step for metrics in read] == [1, 2, 3, 4, 5, 6, 7]
    assert [metrics.loss for metrics in read] == [1.0] * 3 + [2.0] * 4


def test_a_line_cut_short_by_a_killed_run_is_dropped(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 4))
    file.path.write_text(file.path.read_text() + '{"step": 4, "lo')
    drive(file, steps=range(4, 5))
    assert [metrics.step for metrics in read_metrics(file.path)] == [1, 2, 3, 4]


def test_only_rank_0_writes(tmp_path):
    drive(MetricsFile(tmp_path / "metrics.jsonl"), steps=range(1, 3), is_main=False)
    assert list(tmp_path.iterdir()) == []


def test_somebody_elses_file_is_not_touched(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(InvalidValueError, match="not written to"):
        drive(MetricsFile(path), steps=range(1, 2))
    assert path.read_text() == "my notes\n"


@pytest.mark.parametrize("line", ["{", '{"step": 1}', "[]", '{"stap": 1}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    drive(MetricsFile(path), steps=range(1, 2))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert caught.value.key == f"{path}:2"
