from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune._util.text import (
    counted,
    did_you_mean,
    format_seconds,
    format_size,
    json_of,
    listing,
    parse_memory,
    parse_size,
)
from zerotune.errors import InvalidValueError

LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (7, 7),
        (2e9, 2_000_000_000),
        ("0", 0),
        ("512 B", 512),
        ("1byte", 1),
        ("3 bytes", 3),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("10 MB", 10_000_000),
        ("12GiB", 12 * 1024**3),
        (" 12 gib ", 12 * 1024**3),
        ("24 GB", 24 * 10**9),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.1 kB", 100),
        ("2TB", 2 * 10**12),
        ("1TiB", 1024**4),
        ("1PiB", 1024**5),
        ("1.9 B", 1),
        (f"{LARGEST} B", LARGEST),
    ],
)
def test_common_spellings_of_sizes_are_parsed(written, nbytes):
    assert parse_size(written, key="vram") == nbytes


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("12", "has no unit"),
        ("12G", "may mean GB or GiB"),
        ("12 GBit", "has an unknown unit"),
        ("twelve", "is not a size"),
        ("", "is not a size"),
        ("-1 GB", "is not a size"),
        ("1e999999999 GB", "is not a size"),
        ("1,5 GB", "is not a size"),
        ("٣ GB", "is not a size"),
        ("9" * 20 + "GiB", "is not between 0 and"),
        (-1, "is not between 0 and"),
        (2**63, "is not between 0 and"),
        (1.5, "is not a whole number of bytes"),
        (float("nan"), "is not a whole number of bytes"),
        (float("inf"), "is not a whole number of bytes"),
        (True, "is not a size"),
        (None, "is not a size"),
    ],
)
def test_malformed_sizes_are_refused(written, reason):
    with pytest.raises(InvalidValueError) as caught:
        parse_size(written, key="vram")

    assert reason in caught.value.reason
    assert caught.value.key == "vram"
    assert '"12GiB"' in caught.value.fix
    assert '"24 GB"' in caught.value.fix


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1018, "1018 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (12 * 1024**3, "12.00 GiB"),
        (5 * 1024**4, "5120.00 GiB"),
        (-3 * 1024**3, "-3.00 GiB"),
    ],
)
def test_sizes_are_formatted_in_a_suitable_unit(nbytes, text):
    assert format_size(nbytes) == text


@given(st.integers(min_value=0, max_value=LARGEST // 2))
def test_formatted_sizes_can_be_parsed_back(nbytes):
    read = parse_size(format_size(nbytes), key="size")

    # Formatting rounds to three digits, and parsing truncates to a whole byte.
    assert abs(read - nbytes) <= nbytes * 0.0051 + 1


@given(
    st.integers(min_value=0, max_value=10**6),
    st.sampled_from(["B", "kB", "KiB", "mb", "MiB", "GB", "gib", "TB"]),
    st.sampled_from(["", " ", "  "]),
)
def test_each_unit_is_its_exact_number_of_bytes(number, unit, blank):
    sizes = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    sizes |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}

    assert parse_size(f"{number}{blank}{unit}", key="size") == number * sizes[unit.lower()]


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans()))
def test_parsing_any_value_returns_a_size_or_raises_invalid_value_error(written):
    try:
        nbytes = parse_size(written, key="size")
    except InvalidValueError:
        return
    assert isinstance(nbytes, int)
    assert 0 <= nbytes <= LARGEST


def test_the_closest_names_are_suggested_ignoring_case():
    assert did_you_mean("adam w", ["AdamW", "Lion"]) == ["AdamW"]
    assert did_you_mean("stge", ["stage", "overlap_comm"], by=str.lower) == ["stage"]
    assert did_you_mean("zzz", ["AdamW"]) == []
    assert did_you_mean("qwen", ["chroma", "qwen-image", "queen"]) == ["qwen-image", "queen"]


def test_a_shortened_listing_says_how_many_more_there_are():
    assert listing([]) == "nothing"
    assert listing(["a", "b", "c"]) == "a, b, c"
    assert listing(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_counts_have_the_right_plural():
    assert counted(1, "key") == "1 key"
    assert counted(2, "entry", "entries") == "2 entries"


def test_durations_are_formatted_as_on_a_clock():
    assert format_seconds(59.6) == "1:00"
    assert format_seconds(3723) == "1:02:03"


@pytest.mark.parametrize(("written", "gib"), [("12", 12), (" 1.5 ", 1.5), (24, 24), ("8 GiB", 8)])
def test_a_bare_number_for_machine_memory_means_gib(written, gib):
    assert parse_memory(written, key="vram") == gib * 2**30


@pytest.mark.parametrize("text", ["[" * 100_000, b"[" * 100_000, "{", "1" * 5000])
def test_unparsable_json_always_raises_value_error(text):
    with pytest.raises(ValueError, match=r"deeply|Expecting|digits"):
        json_of(text)
    assert json_of('{"a": 1}', object_pairs_hook=list) == [("a", 1)]
