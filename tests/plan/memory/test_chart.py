from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, MissingDependencyError, PlanFileError
from zerotune.plan.charts import arrange, plot_memory
from zerotune.platform import GIB


def lay_out(held, *, full=100, across=8.0):
    return arrange(
        held, full=full, across=across, amount=str,
        measure=lambda text: 0.08 * max(map(len, text.split("\n"))),
    )  # fmt: skip


class TestLabelling:
    def test_a_label_goes_inside_on_one_line_on_two_or_above(self):
        bar = lay_out([("weights", 50), ("master weights", 16), ("buckets", 5)])

        assert [one.label for one in bar.segments] == [
            "weights 50", "master weights\n16", "buckets 5",
        ]  # fmt: skip
        assert [one.row for one in bar.segments] == [None, None, 0]
        assert not bar.leftwards
        assert bar.rows == 1

    def test_segments_follow_each_other_to_scale(self):
        bar = lay_out([("a", 50), ("b", 30), ("c", 10)])

        assert [one.left for one in bar.segments] == pytest.approx([0, 4, 6.4])
        assert [one.width for one in bar.segments] == pytest.approx([4, 2.4, 0.8])

    def test_labels_at_the_right_edge_point_leftwards(self):
        bar = lay_out([("weights", 90), ("temporaries", 5), ("context", 4)])

        assert bar.leftwards
        assert [one.row for one in bar.segments] == [None, 0, 1]

    def test_slivers_are_put_together(self):
        bar = lay_out([("weights", 900), ("a", 3), ("b", 2), ("c", 0)], full=1000)

        assert [(one.component, one.nbytes) for one in bar.segments] == [
            ("weights", 900), ("2 smaller ones", 5),
        ]  # fmt: skip

    def test_a_single_sliver_keeps_its_name(self):
        assert [one.component for one in lay_out([("w", 99), ("a", 0.1)]).segments] == ["w", "a"]

    @given(st.lists(st.integers(1, 50), max_size=12))
    def test_no_label_covers_another_or_a_line(self, sizes):
        held = [(f"part {i}", size) for i, size in enumerate(sorted(sizes, reverse=True))]
        bar = lay_out(held, full=max(sum(sizes), 1) * 1.5)

        above = [one for one in bar.segments if one.row is not None]
        for one in above:
            reach = 0.08 * len(one.label)
            start = one.middle - reach if bar.leftwards else one.middle
            for other in above:
                # Its own line goes up to its row, through all the rows below.
                if other is not one and other.row >= one.row:
                    assert not start < other.middle < start + reach


class TestPicture:
    def test_it_is_a_png(self, estimate, tmp_path):
        path = plot_memory(estimate, tmp_path / "deep" / "memory.png", budget={"device": GIB})

        assert path == tmp_path / "deep" / "memory.png"
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [file.name for file in path.parent.iterdir()] == ["memory.png"]

    @pytest.mark.parametrize(
        ("name", "begins"), [("m.pdf", b"%PDF-"), ("m.svg", b"<?xml"), ("m", b"\x89PNG")]
    )
    def test_the_ending_says_the_format(self, name, begins, estimate, tmp_path):
        path = plot_memory(estimate, tmp_path / name)
        assert path.read_bytes().startswith(begins)

    def test_another_ending_is_refused(self, estimate, tmp_path):
        with pytest.raises(InvalidValueError, match=r"m\.docx.*\.png, \.pdf, \.svg"):
            plot_memory(estimate, tmp_path / "m.docx")
        assert list(tmp_path.iterdir()) == []

    def test_more_places_make_it_taller(self, estimate, tmp_path):
        def height(path):
            return int.from_bytes(path.read_bytes()[20:24], "big")

        two = plot_memory(estimate, tmp_path / "two.png")
        three = plot_memory(estimate, tmp_path / "three.png", budget={"nvme": GIB})
        assert height(three) > height(two)

    def test_nothing_to_show_is_no_crash(self, make_estimate, tmp_path):
        assert plot_memory(make_estimate(), tmp_path / "empty.png").exists()

    def test_names_are_not_formulas(self, make_estimate, make_item, tmp_path):
        # Warnings are errors here: matplotlib warns of a formula it cannot read.
        made = make_estimate(make_item("$\\x$ and $$", "device", 1))
        assert plot_memory(made, tmp_path / "names.png").exists()

    def test_a_path_that_cannot_be_written(self, estimate, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(PlanFileError, match="cannot be written"):
            plot_memory(estimate, tmp_path / "file" / "memory.png")

    def test_without_matplotlib_the_error_says_what_to_install(
        self, estimate, tmp_path, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingDependencyError, match=r"zerotune\[plot\]"):
            plot_memory(estimate, tmp_path / "memory.png")

    def test_the_module_loads_matplotlib_only_to_draw(self):
        script = (
            "import sys, zerotune.plan.charts\n"
            "assert not {'matplotlib', 'numpy', 'torch'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)
