from __future__ import annotations

import attrs
import pytest

from zerotune._util.text import (
    as_number,
    finite,
    is_integer,
    is_number,
    positive,
    probability,
    validated,
    whole,
)
from zerotune.errors import InvalidValueError


@pytest.mark.parametrize("value", [True, "1", None, 1.0])
def test_bools_and_floats_are_not_integers(value):
    assert not is_integer(value)


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400])
def test_non_finite_values_are_not_numbers(value):
    assert not is_number(value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), (" 1_000 ", 1000), ("2e8", 2e8), ("-0.5", -0.5), ("nan", None), ("", None)],
)
def test_numbers_are_parsed_from_text(text, number):
    found = as_number(text)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize(
    ("check", "bad", "reason"),
    [
        (whole, 0, "must be a whole number, 1 or more"),
        (whole, True, "must be a whole number, 1 or more"),
        (finite, "1", "must be a finite number"),
        (positive, 0.0, "must be a number above 0"),
        (positive, float("nan"), "must be a number above 0"),
        (probability, 1.5, "must be a probability"),
    ],
)
def test_the_error_has_the_key_and_the_reason(check, bad, reason):
    with pytest.raises(InvalidValueError) as caught:
        check(bad, key="sizes.first")
    assert caught.value.key == "sizes.first"
    assert caught.value.reason == reason


def test_whole_numbers_outside_their_bounds_are_refused():
    assert whole(3, key="n", least=0, most=3) == 3
    with pytest.raises(InvalidValueError, match="0 to 3"):
        whole(4, key="n", least=0, most=3)


def test_a_validation_error_names_class_and_field():
    @attrs.frozen(kw_only=True)
    class Sizes:
        count: int = attrs.field(default=1, validator=validated(whole, least=1))

    with pytest.raises(InvalidValueError, match=r"Sizes\.count = 0"):
        Sizes(count=0)
