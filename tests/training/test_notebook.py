"""Bars and charts in a notebook, whose kernel is emulated as far as rich asks of it."""

from __future__ import annotations

import warnings

from tests.support.needs import needs
from tests.support.ranks import ranks
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


@ranks(1)
def test_charts_leave_the_notebooks_matplotlib_settings_unchanged(tmp_path):
    needs("matplotlib")
    import sys

    from zerotune import DeepSpeedPlan
    from zerotune.plan.charts import plot_memory

    plot_memory(DeepSpeedPlan.build(stage=2).estimate("sdxl"), f"{tmp_path}/memory.png")
    assert [name for name in ("matplotlib.pyplot", "IPython") if name in sys.modules] == []
