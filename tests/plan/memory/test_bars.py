from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerotune.plan.text import component_letters, fits, memory_bars
from zerotune.platform import GIB


def bars(text):
    return dict(re.findall(r"^(\w+) +\[(.+)\]", text, re.MULTILINE))


def test_without_a_budget_the_largest_need_fills_its_bar(estimate):
    drawn = bars(memory_bars(estimate, width=100))

    assert set(drawn) == {"device", "host"}
    columns = len(drawn["host"])
    assert drawn["host"].count("O") == pytest.approx(columns * 16 / 24, abs=0.51)
    assert drawn["host"].count("M") == pytest.approx(columns * 8 / 24, abs=0.51)
    assert "." not in drawn["host"]
    # 4 of weights and 3.5 of the copy are held at the peak; activations and buckets are not.
    assert drawn["device"].count("W") == pytest.approx(columns * 4 / 24, abs=0.51)
    assert set(drawn["device"]) == {"W", "F", "."}


def test_a_budget_is_a_full_bar(estimate):
    text = memory_bars(estimate, budget={"device": 15 * GIB, "host": 32 * GIB})

    drawn = bars(text)
    assert drawn["device"].count(".") == pytest.approx(len(drawn["device"]) / 2, abs=0.51)
    assert "7.50 of 15.00 GiB, 7.50 free" in text
    assert "24.00 of 32.00 GiB, 8.00 free" in text
    assert "|" not in text


def test_what_is_over_the_budget_shows_where_it_ends(estimate):
    text = memory_bars(estimate, budget={"device": 5 * GIB, "nvme": GIB})

    drawn = bars(text)
    assert drawn["device"].index("|") == pytest.approx(len(drawn["device"]) * 5 / 7.5, abs=1)
    assert "7.50 of 5.00 GiB, over by 2.50" in text
    assert "|" not in drawn["host"]
    assert set(drawn["nvme"]) == {"."}


def test_no_memory_at_a_place_shows_as_all_over(make_estimate, make_item):
    text = memory_bars(make_estimate(make_item("swap", "nvme", 2)), budget={"nvme": 0})

    assert bars(text)["nvme"].startswith("|S")
    assert "2.00 of 0.00 GiB, over by 2.00" in text


def test_nothing_needed_draws_nothing(make_estimate):
    assert memory_bars(make_estimate()) == ""


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_have_the_width_asked_for(estimate, width):
    lines = memory_bars(estimate, budget={"device": GIB}, width=width).splitlines()

    assert max(map(len, lines)) == width


def test_small_models_are_shown_in_smaller_units(make_estimate, make_item):
    small = make_estimate(make_item("weights", "device", 3 / 1024))

    assert "3.00 MiB" in memory_bars(small)


def test_letters_are_initials_while_there_are_any(make_estimate, make_item):
    names = ("weights", "master weights", "frozen parts", "fp32 copies", "é", "É")
    made = make_estimate(*(make_item(name, "host", 9 - i) for i, name in enumerate(names)))

    assert component_letters(made) == {
        "weights": "W",
        "master weights": "M",
        "frozen parts": "F",
        "fp32 copies": "C",
        "é": "0",
        "É": "1",
    }


def test_the_same_component_twice_is_one_stretch(make_estimate, make_item):
    made = make_estimate(
        make_item("buckets", "device", 1), make_item("weights", "device", 1.5),
        make_item("buckets", "device", 1),
    )  # fmt: skip

    assert re.fullmatch(r"B+W+", bars(memory_bars(made))["device"])


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.sampled_from(["device", "host", "nvme"]), st.integers(0, 10**12))),
    st.dictionaries(st.sampled_from(["device", "host", "nvme"]), st.integers(0, 10**12)),
)
def test_bars_are_never_longer_than_their_frame(make_estimate, make_item, sizes, budget):
    made = make_estimate(
        *(make_item(f"c{i}", place, n / GIB) for i, (place, n) in enumerate(sizes))
    )

    drawn = bars(memory_bars(made, budget=budget))
    assert set(drawn) == {fit.place for fit in fits(made, budget)}
    assert len({len(bar) for bar in drawn.values()}) <= 1
    for fit in fits(made, budget):
        assert ("|" in drawn[fit.place]) == (not fit.fits)
