"""A log of decisions and mistakes: raised together, or returned with the valid part."""

from __future__ import annotations

import pickle

import pytest

from zerotune.decisions import Log, raise_all
from zerotune.errors import InvalidValueError, PlanFileError, UnknownKeyError


def read(log, *wrong):
    """Read the numbers that are not negative."""
    left = []
    for each in wrong:
        if each < 0:
            log.refuse(InvalidValueError("is negative", key=f"k{each}", value=each))
        else:
            left.append(each)
    return left


def refuse():
    raise UnknownKeyError("nobody knows it", key="x")


def test_all_mistakes_are_reported_in_one_error():
    log = Log()

    def reader():
        read(log, 1, -2, -3)
        refuse()

    with pytest.raises(InvalidValueError) as caught:
        log.whole(reader)
    assert [each.key for each in caught.value.each()] == ["k-2", "k-3", "x"]
    assert str(caught.value).splitlines() == [
        "k-2 = -2: is negative.", "k-3 = -3: is negative.", "x: nobody knows it.",
    ]  # fmt: skip
    assert [str(each) for each in caught.value.each()] == str(caught.value).splitlines()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_attempt_continues_after_a_mistake():
    log = Log()
    assert log.attempt(refuse) is None
    assert log.attempt(int, "3") == 3
    assert [error.key for error in log.mistakes] == ["x"]


def test_mistakes_of_a_nested_log_are_recorded_once():
    log = Log()

    def reader():
        inner = Log()
        log.attempt(inner.whole, lambda: read(inner, -1, -2))
        return read(log, -3)

    with pytest.raises(InvalidValueError) as caught:
        log.whole(reader)
    assert [each.key for each in caught.value.each()] == ["k-1", "k-2", "k-3"]


def test_the_remaining_result_is_returned_beside_the_mistakes():
    log = Log()
    assert log.outcome(read, log, 1, -2, 3, -4) == [1, 3]
    assert [error.key for error in log.mistakes] == ["k-2", "k-4"]


def test_a_raised_error_leaves_no_result():
    log = Log()

    def broken():
        read(log, -1)
        raise PlanFileError("is missing", key="file")

    assert log.outcome(broken) is None
    assert [error.key for error in log.mistakes] == ["k-1", "file"]


def test_reading_stops_after_twenty_mistakes():
    log, asked = Log(), []

    def read_on():
        for each in range(1000):
            asked.append(each)
            log.attempt(read, log, -each - 1)

    with pytest.raises(InvalidValueError) as caught:
        log.whole(read_on)
    assert len(caught.value.each()) == len(asked) == 20


def test_a_log_without_mistakes_raises_nothing():
    raise_all([])
    assert Log().whole(read, Log(), 1) == [1]


def test_records_use_the_key_names_of_the_file():
    log = Log(names={"zero.stage": "zero_stage", "offload": "block.offload"})
    log.decide("zero.stage", "2", 2, "a number written as text")
    log.decide("other", None, 1, "the default")
    log.refuse(InvalidValueError("is negative", key="offload.device", value=-1))
    assert [one.written for one in log.decisions] == ["zero_stage", None]
    assert str(log.decisions[0]).startswith("zero_stage (zero.stage): '2' -> 2")
    # A mistake shows only the file's name of its key.
    assert str(log.mistakes[0]) == "block.offload.device = -1: is negative."
