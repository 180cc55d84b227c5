"""In a notebook: bars and tables, a second fit, a stopped cell, a second run in one process.

No Jupyter kernel is needed: cells run in one namespace of one process, which emulates what rich
asks of a kernel.
"""

from __future__ import annotations

import warnings

import pytest

from tests.support.needs import needs
from tests.support.ranks import ranks, run_ranks
from tests.training import notebook
from tests.training.fakes import drive
from zerotune.training import ProgressBar


def test_a_notebook_with_widgets_gets_a_bar_that_moves():
    with notebook.kernel(widgets=True):
        drive(ProgressBar(every=5), steps=range(1, 26))
        assert isinstance(notebook.displayed[0], notebook.Output)
        text = notebook.page()
    assert "25/25" in text
    assert "loss 0.5000" in text
    assert "━" in text


def test_a_notebook_without_widgets_gets_lines_and_no_warning(capsys):
    with notebook.kernel(widgets=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(ProgressBar(every=10), steps=range(1, 26))
        assert notebook.displayed == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]


@pytest.mark.deepspeed
def test_cells_can_be_interrupted_resumed_and_run_again():
    (cells,) = run_ranks(notebook.run_cells)
    (whole,) = run_ranks(notebook.whole_run)
    made, two, stopped, hit_twice, rest, twice, closed, again, end = cells
    assert made["html"].startswith("<pre>")
    assert two["losses"] == whole[:2]
    assert "step 1/2" in two["said"]
    assert two["html"].startswith("<pre>")
    assert stopped["stopped"] == "signal SIGINT"
    assert stopped["losses"] == whole[:3], "the step under way is finished"
    assert hit_twice["error"].startswith("KeyboardInterrupt")
    assert rest["losses"] == whole, "a second fit goes on, as if nothing had happened"
    assert rest["stopped"] is None
    assert "already trains" in twice["error"], "one clear error while the first is open"
    assert closed["error"] == ""
    assert len(again["losses"]) == 2
    assert end["error"] == ""


@ranks(1)
def test_charts_leave_the_notebooks_matplotlib_settings_unchanged(tmp_path):
    needs("matplotlib")
    import sys

    from zerotune import DeepSpeedPlan
    from zerotune.plan.charts import plot_memory

    plot_memory(DeepSpeedPlan.build(stage=2).estimate("sdxl"), f"{tmp_path}/memory.png")
    assert [name for name in ("matplotlib.pyplot", "IPython") if name in sys.modules] == []
