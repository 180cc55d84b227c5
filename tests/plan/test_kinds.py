from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError
from zerotune.plan.values import Boolean, Choice, Folder, Free, Integer, Number, Text, check_json


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (5, 5),
        (2e8, 200_000_000),
        (100000000.0, 100_000_000),
        ("500000000", 500_000_000),
        ("5e8", 500_000_000),
        (" 1_000 ", 1000),
        ("AUTO", "auto"),
    ],
)
def test_common_spellings_of_integers_are_read(written, read):
    value, reason = Integer().read(written, "key")
    assert value == read
    assert type(value) is type(read)
    assert (reason is None) == (written == read and type(written) is type(read))


@pytest.mark.parametrize(
    "written", [0.5, "0.5", True, None, [], "many", math.inf, math.nan, -1, 2**63, "9" * 5000]
)
def test_fractions_booleans_and_out_of_range_values_are_refused_as_integers(written):
    with pytest.raises(InvalidValueError) as caught:
        Integer().read(written, "train_batch_size")
    assert caught.value.key == "train_batch_size"
    assert "integer of at least 0" in caught.value.fix


def test_integer_check_refuses_integral_floats_but_read_converts_them():
    assert Integer().read(2.0, "key") == (2, "DeepSpeed wants a whole number here")
    with pytest.raises(InvalidValueError):
        Integer().check(2.0, "key")


@pytest.mark.parametrize(
    ("written", "read"), [(1, 1), (0.5, 0.5), ("1e-4", 1e-4), ("auto", "auto")]
)
def test_common_spellings_of_numbers_are_read(written, read):
    assert Number().read(written, "key")[0] == read


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        (Integer(auto=False), "auto", None),
        *((Number(), bad, None) for bad in (math.nan, math.inf, -0.1, True, "x", {}, 10**400)),
        (Number(maximum=1.0), 1.5, "at most 1"),
        *((Boolean(), bad, "true or false") for bad in ("maybe", 2, 1.0, [], {})),
        *((Choice(choices=("none", "cpu")), bad, "'none', 'cpu'") for bad in ("tpu", 3, [], True)),
        (Folder(), 3, None),
        (Text(), "  ", "is empty"),
    ],
)
def test_invalid_values_are_refused_with_the_reason(kind, written, message):
    with pytest.raises(InvalidValueError, match=message):
        kind.read(written, "key")


@pytest.mark.parametrize(
    ("written", "read"),
    [(True, True), (0, False), (1, True), ("yes", True), ("False", False), ("Auto", "auto")],
)
def test_common_spellings_of_booleans_are_read(written, read):
    assert Boolean().read(written, "key")[0] == read


def test_choices_accept_any_case_synonyms_and_yamls_reading_of_no():
    kind = Choice(choices=("none", "cpu"), synonyms={"no": "none"}, null="none")
    assert kind.read("CPU", "device") == ("cpu", "a different spelling")
    assert kind.read(False, "device")[0] == "none"
    assert kind.read(None, "device")[0] == "none"
    assert kind.read("cpu", "device") == ("cpu", None)


@pytest.mark.parametrize("written", ["", "none", " None "])
def test_a_blank_folder_counts_as_unset(written):
    assert Folder().read(written, "nvme_path")[0] is None


def test_folders_accept_paths_and_text_is_stripped():
    assert Folder().read(Path("/mnt/nvme"), "nvme_path") == ("/mnt/nvme", None)
    assert Text().read(" AdamW ", "type") == ("AdamW", "surrounding blanks are removed")


def test_values_of_free_objects_must_be_json():
    assert Free().read({"lr": 1e-4, "betas": [0.9, 0.999]}, "params")[0]["lr"] == 1e-4
    with pytest.raises(InvalidValueError) as caught:
        Free().read({"lr": {1, 2}}, "optimizer.params")
    assert caught.value.key == "optimizer.params.lr"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": {1: 2}}, "extra.a"),
        ({"a": [0, math.nan]}, "extra.a[1]"),
        (object(), "extra"),
        ({"a": b"x"}, "extra.a"),
    ],
)
def test_a_value_that_json_cannot_hold_is_named(value, key):
    with pytest.raises(InvalidValueError) as caught:
        check_json(value, "extra")
    assert caught.value.key == key


def test_an_object_that_contains_itself_is_refused():
    loop: dict[str, object] = {}
    loop["loop"] = loop
    with pytest.raises(InvalidValueError, match="nested too deeply"):
        check_json(loop, "extra")


@settings(deadline=None)
@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()))
def test_reading_is_idempotent(written):
    for kind in (Integer(), Number(), Boolean(), Folder(), Text(empty=True)):
        try:
            value, _ = kind.read(written, "key")
        except InvalidValueError:
            continue
        if value is not None:
            kind.check(value, "key")
            assert kind.read(value, "key") == (value, None)
