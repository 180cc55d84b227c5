"""What a device's streams wait for, on fake streams that log every call."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from zerotune.backend.host.lanes import Lane

DEVICE = torch.device("cpu")


class Event:
    def __init__(self, log: list[tuple[str, ...]], name: str) -> None:
        self.log, self.name = log, name

    def synchronize(self) -> None:
        self.log.append(("host", "waits for", self.name))


class Stream:
    def __init__(self, log: list[tuple[str, ...]], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> Event:
        self.log.append((self.name, "records"))
        return Event(self.log, self.name)

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.name))


class Streams:
    """Stands in for ``torch.cuda``; logs each copy with its stream."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self._computation = Stream(self.log, "computation")
        self._current = threading.local()

    def Stream(self, _device: torch.device) -> Stream:
        return Stream(self.log, "side")

    def current_stream(self, _device: torch.device) -> Stream:
        return getattr(self._current, "stream", self._computation)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        self._current.stream = stream
        yield
        del self._current.stream

    def copy(self) -> None:
        self.log.append((self.current_stream(DEVICE).name, "copies"))


@pytest.fixture
def streams():
    return Streams()


@pytest.fixture
def lane(streams):
    lane = Lane("test", device=DEVICE, streams=streams)
    yield lane
    lane.close()


def test_a_copy_waits_for_earlier_computation_and_later_computation_waits_for_the_copy(
    streams, lane
):
    lane.submit(streams.copy).receive()
    assert streams.log == [
        ("computation", "records"),
        ("side", "waits for", "computation"),
        ("side", "copies"),
        ("side", "records"),
        ("computation", "waits for", "side"),
    ]


def test_the_host_waits_only_in_the_lanes_thread(streams, lane):
    done = threading.Event()
    copy = lane.submit(streams.copy, then=done.set)
    assert done.wait(10)
    assert streams.log[-1] == ("host", "waits for", "side")
    count = len(streams.log)
    copy.receive()
    assert streams.log[count:] == [("computation", "waits for", "side")]


def test_copies_run_in_the_order_of_submission(streams, lane):
    made: list[int] = []
    gate = threading.Event()
    first = lane.submit(lambda: made.append(1), wait=lambda: gate.wait(10))
    second = lane.submit(lambda: made.append(2))
    assert not first.is_done
    gate.set()
    second.finish()
    assert made == [1, 2]


def test_an_error_before_a_copy_is_raised_to_its_receiver(lane):
    def fail() -> None:
        raise OSError("gone")

    copy = lane.submit(lambda: None, wait=fail)
    with pytest.raises(OSError, match="gone"):
        copy.receive()
    with pytest.raises(OSError, match="gone"):
        copy.finish()


def test_without_a_device_a_copy_runs_before_the_call_returns_and_raises_its_error_there():
    lane = Lane("out", device=DEVICE, in_caller=True)
    ran: list[Any] = []
    copy = lane.submit(lambda: ran.append(threading.current_thread()), then=lambda: ran.append(1))
    assert ran == [threading.current_thread(), 1]
    assert copy.is_done
    copy.finish()
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0)
    lane.close()
