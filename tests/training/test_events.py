"""The metrics file: one line per step, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.training.fakes import METRICS, drive
from zerotune.errors import DataError, InvalidValueError
from zerotune.training import MetricsFile
from zerotune.training.events import read_metrics


def test_written_metrics_are_read_back(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    drive(MetricsFile(path), steps=range(1, 4))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    read = read_metrics(path)
    assert read[0] == METRICS
    assert [metrics.step for metrics in read] == [1, 2, 3]


def test_steps_repeated_after_a_resume_are_in_the_file_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 6), loss=1.0)
    drive(file, steps=range(4, 8), loss=2.0)
    read = read_metrics(file.path)
    assert [metrics.step for metrics in read] == [1, 2, 3, 4, 5, 6, 7]
    assert [metrics.loss for metrics in read] == [1.0] * 3 + [2.0] * 4


def test_a_line_truncated_by_a_killed_run_is_dropped(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 4))
    file.path.write_text(file.path.read_text() + '{"step": 4, "lo')
    drive(file, steps=range(4, 5))
    assert [metrics.step for metrics in read_metrics(file.path)] == [1, 2, 3, 4]


def test_only_rank_0_writes(tmp_path):
    drive(MetricsFile(tmp_path / "metrics.jsonl"), steps=range(1, 3), is_main=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "notes",
    [
        pytest.param("my notes\n", id="a line"),
        pytest.param("my notes", id="no line's end"),
        pytest.param('{"step": 1, "loss": 2}\nmy notes', id="metrics and then notes"),
        pytest.param('{"step": 1e999}\n', id="infinite"),
        pytest.param("[" * 99999 + "\n", id="deep"),
    ],
)
@pytest.mark.parametrize("first", [1, 5])
def test_a_foreign_file_is_not_touched(notes, first, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(notes)
    with pytest.raises(InvalidValueError, match="not overwritten"):
        drive(MetricsFile(path), steps=range(first, 6))
    assert path.read_text() == notes


def test_nul_bytes_left_by_a_power_failure_are_dropped(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 3))
    file.path.write_text(file.path.read_text() + '{"ste' + "\0" * 20)
    drive(file, steps=range(3, 4))
    assert [metrics.step for metrics in read_metrics(file.path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{", '{"step": 1}', "[]", '{"stap": 1}'])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    drive(MetricsFile(path), steps=range(1, 2))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert caught.value.key == f"{path}:2"


class FullDisk:
    """Opens files to append to on a device that is always full."""

    def __init__(self, monkeypatch):
        usual = Path.open

        def opened(path, mode="r", *args, **options):
            return usual(Path("/dev/full") if mode == "a" else path, mode, *args, **options)

        monkeypatch.setattr(Path, "open", opened)


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 3))
    with monkeypatch.context() as patch:
        FullDisk(patch)
        drive(file, steps=range(3, 8))
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert str(file.path) in said
    assert "No space left on device" in said
    drive(file, steps=range(8, 10))
    assert [metrics.step for metrics in read_metrics(file.path)] == [1, 2, 8, 9]


def test_a_new_run_keeps_the_files_of_earlier_runs(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    for loss in (1.0, 2.0, 3.0):
        drive(MetricsFile(path), steps=range(1, 4), loss=loss)
    kept = [tmp_path / "metrics.jsonl.1", tmp_path / "metrics.jsonl.2", path]
    assert [{metrics.loss for metrics in read_metrics(one)} for one in kept] == [
        {1.0},
        {2.0},
        {3.0},
    ]
    assert "metrics.jsonl.1" in caplog.text
    assert "begins at step 0" in caplog.text


def test_a_file_that_cannot_be_renamed_is_not_written(tmp_path, monkeypatch, caplog):
    def refused(path, _):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    file = MetricsFile(tmp_path / "metrics.jsonl")
    drive(file, steps=range(1, 4), loss=1.0)
    before = file.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        drive(MetricsFile(file.path), steps=range(1, 3), loss=2.0)
    assert file.path.read_bytes() == before
    assert "Permission denied" in caplog.text


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_refused_by_name(tmp_path, encoding):
    path = tmp_path / "metrics.jsonl"
    path.write_text("m\u00e9tr\u00ecques\n", encoding=encoding)
    before = path.read_bytes()
    for first in (1, 5):
        with pytest.raises(
            InvalidValueError, match=r"metrics\.jsonl.*Fix: choose a different file name"
        ):
            drive(MetricsFile(path), steps=range(first, 6))
    with pytest.raises(DataError, match=r"metrics\.jsonl.*not UTF-8"):
        read_metrics(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["null\0", "half \ud800"])
def test_an_impossible_path_is_refused(name, tmp_path):
    with pytest.raises(InvalidValueError, match="cannot be used as a metrics file"):
        drive(MetricsFile(tmp_path / name), steps=range(1, 2))
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is not a regular file"):
        read_metrics(tmp_path / "pipe")


def test_a_path_that_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="is not a metrics file"):
        drive(MetricsFile(tmp_path), steps=range(1, 2))
