"""Progress on a terminal and in a log file."""

from __future__ import annotations

import io

from rich.console import Console

from tests.training.fakes import drive
from zerotune.training import ProgressBar


def shown(*, terminal: bool, steps: range, is_main: bool = True, every: int = 10, **changes):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=150, soft_wrap=True)
    drive(ProgressBar(every=every, console=console), steps=steps, is_main=is_main, **changes)
    return text.getvalue()


def test_a_log_gets_the_first_the_last_and_every_tenth_step():
    lines = shown(terminal=False, steps=range(1, 26)).splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert "loss 0.5000" in lines[0]
    assert "lr 1.00e-03" in lines[0]
    assert "peak 3.00 GiB" in lines[0]
    assert "it/s" in lines[0]
    assert lines[-1].endswith("ETA 0:00")


def test_the_log_of_a_resumed_run_continues_the_step_count():
    lines = shown(terminal=False, steps=range(11, 21)).splitlines()
    assert [line.split()[1] for line in lines] == ["20/20"]


def test_a_terminal_shows_a_bar():
    text = shown(terminal=True, steps=range(1, 26), device_peak=2**20)
    assert "25/25" in text
    assert "loss 0.5000" in text
    assert "peak 1.00 MiB" in text, "GPU memory where there is a GPU"
    assert "━" in text


def test_other_ranks_print_nothing():
    assert shown(terminal=False, steps=range(1, 26), is_main=False) == ""
    assert shown(terminal=True, steps=range(1, 26), is_main=False) == ""


def test_a_run_without_steps_left_prints_nothing():
    assert shown(terminal=True, steps=range(5, 5)) == ""
