"""Threads of the host in virtual time, and the narrow models that stand in for large ones."""

from __future__ import annotations

import pytest

from bench.on_card import COMPUTE, IN, NARROW, OUT, PLANS, build
from bench.stream import CLIPPED, LANES, lanes_of, rehearse
from bench.virtual import HostThreads, _Executor, _Future, _Virtual


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


@pytest.mark.nightly
@pytest.mark.simdev
@pytest.mark.deepspeed
def test_virtual_time_is_close_to_the_predicted_time_on_every_machine():
    card = {"model": "sd3-medium", "card": "RTX 4090", "batch": 4, "plan": CLIPPED}
    found = rehearse(card)
    assert found.seconds == pytest.approx(3.519, abs=0.01)
    assert found.seconds == pytest.approx(found.predicted.expected, rel=0.1)
    assert found.late == 0
    assert {lane for lane, *_ in found.spans} == set(found.lanes) == set(LANES)


UPDATED_THERE = [plan for plan, how in PLANS.items() if "update" in how]


@pytest.mark.nightly
@pytest.mark.simdev
@pytest.mark.deepspeed
@pytest.mark.parametrize("plan", UPDATED_THERE)
def test_virtual_time_of_an_update_on_the_device_is_close_to_the_predicted_time(plan):
    found = rehearse({"model": "sd3-medium", "card": "RTX 4090", "batch": 1, "plan": plan})
    assert found.seconds == pytest.approx(found.predicted.expected, rel=0.1)
    modelled = lanes_of(found)
    for lane in (COMPUTE, IN, OUT):
        assert found.lanes[lane] == pytest.approx(modelled[lane], rel=0.05), lane
