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
def test_a_bool_and_a_float_are_no_integers(value):
    assert not is_integer(value)


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400])
def test_what_is_not_finite_is_no_number(value):
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
def test_the_error_names_the_key_and_the_value(check, bad, reason):
    with pytest.raises(InvalidValueError) as caught:
        check(bad, key="sizes.first")
    assert caught.value.key == "sizes.first"
    assert caught.value.reason == reason


def test_a_whole_number_has_bounds():
    assert whole(3, key="n", least=0, most=3) == 3
    with pytest.raises(InvalidValueError, match="0 to 3"):
        whole(4, key="n", least=0, most=3)


def test_a_validator_names_class_and_field():
    @attrs.frozen(kw_only=True)
    class Sizes:
        count: int = attrs.field(default=1, validator=validated(whole, least=1))

    with pytest.raises(InvalidValueError, match=r"Sizes\.count = 0"):
        Sizes(count=0)
