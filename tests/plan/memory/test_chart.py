from __future__ import annotations

import sys

import pytest

from zerotune._util.palette import ALARM, INK
from zerotune.errors import InvalidValueError, MissingDependencyError, PlanFileError
from zerotune.plan.charts import draw_panels, memory_panels, plot_memory
from zerotune.plan.text.memory import estimate_data
from zerotune.platform.facts import GIB


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def panels(estimate, budget=None):
    return memory_panels(estimate_data(estimate, budget))


class TestPanels:
    def test_each_place_has_a_bar_and_a_legend_of_its_components(self, estimate):
        figure = draw_panels("", panels(estimate))

        device, host = figure.axes
        assert labels(device) == ["weights 4.00", "flat copy 3.50"]
        assert labels(host) == ["optimizer states 16.00", "master weights 8.00"]
        assert device.get_title(loc="left") == ("device: 7.50 GiB at the peak, during set-up")

    def test_repeated_components_are_one_segment(self, make_estimate, make_item):
        made = make_estimate(
            make_item("buckets", "device", 1), make_item("weights", "device", 1.5),
            make_item("buckets", "device", 1),
        )  # fmt: skip
        (panel,) = panels(made)

        assert [part[:2] for part in panel.parts] == [("buckets", 2), ("weights", 1.5)]

    def test_a_budget_shows_what_is_left_or_missing(self, estimate):
        roomy, short = panels(estimate, {"device": 15 * GIB, "host": 8 * GIB})

        assert (roomy.limit, roomy.note) == (15, "budget 15.00 GiB, 7.50 free")
        assert (short.limit, short.note) == (8, "budget 8.00 GiB, over by 16.00")
        assert (roomy.colour, short.colour) == (INK, ALARM)

    @pytest.mark.parametrize("count", [1, 4, 5, 13])
    def test_no_legend_covers_another_panel(self, count, make_estimate, make_item):
        items = [
            make_item(f"part {i}", place, 20 - i)
            for place in ("device", "host", "nvme")
            for i in range(count)
        ]
        figure = draw_panels("a\nb", panels(make_estimate(*items)))
        figure.draw_without_rendering()

        legends = [axes.get_legend().get_window_extent() for axes in figure.axes]
        assert all(one.ymin >= 0 for one in legends)
        for legend, axes in zip(legends, figure.axes[1:], strict=False):
            assert legend.ymin >= axes.title.get_window_extent().ymax - 1


class TestPicture:
    def test_the_chart_is_a_png(self, estimate, tmp_path):
        path = plot_memory(estimate, tmp_path / "deep" / "memory.png", budget={"device": GIB})

        assert path == tmp_path / "deep" / "memory.png"
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [file.name for file in path.parent.iterdir()] == ["memory.png"]

    @pytest.mark.parametrize(
        ("name", "begins"), [("m.pdf", b"%PDF-"), ("m.svg", b"<?xml"), ("m", b"\x89PNG")]
    )
    def test_the_suffix_selects_the_format(self, name, begins, estimate, tmp_path):
        path = plot_memory(estimate, tmp_path / name)
        assert path.read_bytes().startswith(begins)

    def test_an_unknown_suffix_is_refused(self, estimate, tmp_path):
        with pytest.raises(InvalidValueError, match=r"m\.docx.*\.png, \.pdf, \.svg"):
            plot_memory(estimate, tmp_path / "m.docx")
        assert list(tmp_path.iterdir()) == []

    def test_an_estimate_without_items_can_be_drawn(self, make_estimate, tmp_path):
        assert plot_memory(make_estimate(), tmp_path / "empty.png").exists()

    def test_names_are_not_parsed_as_formulas(self, make_estimate, make_item, tmp_path):
        # matplotlib warns of a formula it cannot read, and warnings are errors here.
        made = make_estimate(make_item("$\\x$ and $$", "device", 1))
        assert plot_memory(made, tmp_path / "names.png").exists()

    def test_an_unwritable_path_is_refused(self, estimate, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(PlanFileError, match="cannot be written"):
            plot_memory(estimate, tmp_path / "file" / "memory.png")

    def test_without_matplotlib_the_error_names_the_package_to_install(
        self, estimate, tmp_path, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingDependencyError, match=r"zerotune\[plot\]"):
            plot_memory(estimate, tmp_path / "memory.png")
