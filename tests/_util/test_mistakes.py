"""Mistakes one by one, all at once, and beside what is left."""

from __future__ import annotations

import pickle

import pytest

from zerotune._util.mistakes import all_at_once, as_far_as_possible, noted, raise_all, together
from zerotune.errors import InvalidValueError, PlanFileError, UnknownKeyError


def read(*wrong):
    """Read the numbers that are not negative."""
    left = []
    for each in wrong:
        with noted():
            if each < 0:
                raise InvalidValueError("is negative", key=f"k{each}", value=each)
            left.append(each)
    return left


def test_the_first_is_raised_where_nobody_gathers():
    with pytest.raises(InvalidValueError) as caught:
        read(1, -2, -3)
    assert (caught.value.key, caught.value.others) == ("k-2", ())


def test_together_they_are_one_error_that_says_all():
    def reader():
        read(1, -2, -3)
        raise UnknownKeyError("nobody knows it", key="x")

    with pytest.raises(InvalidValueError) as caught:
        all_at_once(reader)()
    assert [each.key for each in caught.value.each()] == ["k-2", "k-3", "x"]
    assert str(caught.value).splitlines() == [
        "k-2 = -2: is negative.", "k-3 = -3: is negative.", "x: nobody knows it.",
    ]  # fmt: skip
    assert [str(each) for each in caught.value.each()] == str(caught.value).splitlines()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_one_inside_another_is_told_once():
    def reader():
        with noted(), together():
            read(-1, -2)
        read(-3)

    with pytest.raises(InvalidValueError) as caught:
        all_at_once(reader)()
    assert [each.key for each in caught.value.each()] == ["k-1", "k-2", "k-3"]


def test_what_is_left_is_handed_over_with_the_mistakes():
    left, mistakes = as_far_as_possible(lambda: all_at_once(read)(1, -2, 3, -4))
    assert left == [1, 3]
    assert [error.key for error in mistakes] == ["k-2", "k-4"]
    assert as_far_as_possible(lambda: read(1)) == ([1], ())


def test_nothing_is_left_behind_an_error_that_nobody_noted():
    def broken():
        read(-1)
        raise PlanFileError("is missing", key="file")

    left, mistakes = as_far_as_possible(broken)
    assert left is None
    assert [error.key for error in mistakes] == ["k-1", "file"]


def test_a_reader_raises_them_together_unless_it_is_read_by_another():
    with pytest.raises(InvalidValueError) as caught:
        all_at_once(lambda: [all_at_once(read)(-1), all_at_once(read)(-2)])()
    assert len(caught.value.each()) == 2


def test_twenty_are_enough():
    asked = []

    def read_on():
        for each in range(1000):
            asked.append(each)
            read(-each - 1)

    with pytest.raises(InvalidValueError) as caught, together():
        read_on()
    assert len(caught.value.each()) == len(asked) == 20


def test_none_is_no_error():
    raise_all([])
    with together():
        read(1)
