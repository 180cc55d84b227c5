"""Threads of the host in virtual time, and the narrow models that stand in for large ones."""

from __future__ import annotations

import pytest

from bench.on_card import NARROW, build, joined
from bench.stream import CLIPPED, LANES, rehearse
from bench.virtual import HostThreads, _Executor, _Future, _Lock, _Queue, _Virtual


class Clock:
    """Virtual time by thread, as that of the simulated accelerator."""

    def __init__(self):
        import threading

        self._own = threading.local()

    def now(self):
        return getattr(self._own, "now", 0.0)

    def advance(self, seconds, _name):
        self._own.now = self.now() + seconds

    def join(self, until, _why):
        self._own.now = max(self.now(), until)


@pytest.fixture
def hosts():
    _Virtual.hosts = HostThreads(Clock())
    return _Virtual.hosts


def test_a_result_is_there_when_its_thread_has_got_so_far(hosts):
    executor = _Executor()
    slow = executor.submit(lambda: hosts.advance(2.0, "work"))
    hosts.advance(1.0, "own work")
    assert not slow.done()
    slow.result()
    assert hosts.now() == 2.0
    assert slow.done()
    executor.shutdown()


def test_an_idle_thread_begins_when_it_is_asked(hosts):
    executor = _Executor()
    hosts.advance(5.0, "own work")
    began = executor.submit(hosts.now)
    assert began.result() == 5.0
    executor.shutdown()


def test_a_queue_gives_the_time_at_which_something_was_put(hosts):
    queue, executor = _Queue(), _Executor()

    def produce():
        for seconds in (1.0, 2.0):
            hosts.advance(seconds, "work")
            queue.put(seconds)

    executor.submit(produce)
    assert [(queue.get(), hosts.now()) for _ in range(2)] == [(1.0, 1.0), (2.0, 3.0)]
    executor.shutdown()


def test_a_lock_is_waited_for_in_virtual_time(hosts):
    lock, executor = _Lock(), _Executor()

    def hold():
        with lock, lock:
            hosts.advance(3.0, "work")

    executor.submit(hold)
    hosts.advance(1.0, "own work")
    with lock:
        assert hosts.now() == 3.0
    executor.shutdown()


def test_a_callback_acts_at_the_time_of_the_result(hosts):
    executor, seen = _Executor(), []
    found = executor.submit(lambda: hosts.advance(2.0, "work"))
    found.add_done_callback(lambda _: seen.append(hosts.now()))
    found.result()
    assert seen == [2.0]
    executor.shutdown()


def test_threads_that_wait_for_each_other_are_an_error(hosts):
    with pytest.raises(RuntimeError, match="all threads of the host wait for each other"):
        _Future().result()


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_model_has_the_weights_of_the_large_one_with_other_sizes(name):
    large, narrow = (
        dict(build(name).named_parameters()),
        dict(build(name, narrow=True).named_parameters()),
    )
    assert list(large) == list(narrow)
    assert all(large[key].dim() == narrow[key].dim() for key in large)
    assert sum(p.numel() for p in narrow.values()) < 3e7


def test_spans_of_a_block_are_joined():
    spans = [("a", "x", 0.0, 1.0), ("b", "x", 0.5, 2.0), ("a", "x", 1.0, 1.5), ("a", "y", 1.5, 2.0)]
    assert joined(spans) == [
        ("a", "x", 0.0, 1.5), ("b", "x", 0.5, 2.0), ("a", "y", 1.5, 2.0),
    ]  # fmt: skip


@pytest.mark.simdev
@pytest.mark.deepspeed
def test_virtual_time_is_close_to_the_predicted_time_on_every_machine():
    card = {"model": "sd3-medium", "card": "RTX 4090", "batch": 4, "plan": CLIPPED}
    found = rehearse(card)
    assert found.seconds == pytest.approx(3.519, abs=0.01)
    assert found.seconds == pytest.approx(found.predicted.expected, rel=0.1)
    assert found.late == 0
    assert {lane for lane, *_ in found.spans} == set(found.lanes) == set(LANES)
