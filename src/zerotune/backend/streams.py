"""Detect data races between streams, copies and host threads.

A ``Recorder`` sees every torch operation inside its block. Each stream and each host thread has a
vector clock. These clocks are synchronised only by events and waits, and when a thread starts or is
joined. An access that is not ordered after an earlier conflicting access is recorded as a data
race. On a GPU the recorder uses real streams and events. Without a GPU, the same code runs with
simulated streams, on tensors that are declared to be on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zerotune.backend.accelerator import current_accelerator

Place = Literal["device", "locked", "pageable"]
Doing = Literal["read", "written"]
Clock = dict[str, int]

_READ_NUMBER = "aten::_local_scalar_dense"
_KEEPS = "aten::record_stream"
"""The schema says that this operation changes its tensor, but it accesses no memory."""
_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like")


@attrs.frozen
class _Access:
    """Bytes of a storage that a timeline has read or written, and when."""

    what: Doing
    low: int
    high: int
    who: str
    when: int

    def covers(self, other: _Access) -> bool:
        """Whether checks against this access make checks against an earlier access unnecessary."""
        inside = self.low <= other.low and other.high <= self.high
        return inside and (
            self.what == "written" or (self.what, self.who) == (other.what, other.who)
        )


@attrs.define
class _Memory:
    """A storage and its accesses."""

    weak: Any
    place: Place
    home: str
    """Timeline of the allocation; its later work may reuse the memory once it is freed."""
    accesses: list[_Access] = attrs.field(factory=list)
    kept_for: set[str] = attrs.field(factory=set)
    """Streams that the allocator waits for before it reuses the memory."""


class RecordedEvent:
    """Replacement for a device event; records how it is used."""

    def __init__(self, recorder: Recorder, **options: Any) -> None:
        self._recorder = recorder
        self._real = recorder.real.Event(**options) if recorder.real else None
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        """Record the event on a stream.

        Args:
            stream: The stream; default: the current one.
        """
        stream = stream or self._recorder.current_stream()
        self.clock = dict(self._recorder.clock(stream.name))
        if self._real is not None:
            self._real.record(stream.real)

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the event.

        Args:
            stream: The stream; default: the current one.
        """
        (stream or self._recorder.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self._recorder.host_waits("event.synchronize", self.clock)
        if self._real is not None:
            self._real.synchronize()


class RecordedStream:
    """Replacement for a device stream; records how it is used."""

    def __init__(self, recorder: Recorder, name: str, real: Any = None) -> None:
        self._recorder, self.name, self.real = recorder, name, real

    def wait_event(self, event: RecordedEvent) -> None:
        """Make later work on this stream wait for ``event``."""
        learn(self._recorder.clock(self.name), event.clock)
        if self.real is not None:
            self.real.wait_event(event._real)

    def wait_stream(self, other: RecordedStream) -> None:
        """Make later work on this stream wait for all work queued on ``other``."""
        learn(self._recorder.clock(self.name), self._recorder.clock(other.name))
        if self.real is not None:
            self.real.wait_stream(other.real)

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        """Record an event on this stream, and return it.

        Args:
            event: The event; default: a new one.
        """
        event = event or RecordedEvent(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all work queued on this stream."""
        self._recorder.host_waits("stream.synchronize", self._recorder.clock(self.name))
        if self.real is not None:
            self.real.synchronize()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replacement for a device's stream module; records every torch operation.

    Args:
        otherwise: Kind of memory assumed for tensors that were not declared with ``lie``; not used
            on a GPU.
        simulated: Whether to simulate streams even if there is a GPU.
    """

    def __init__(self, *, otherwise: Place = "device", simulated: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.real: Any = None if simulated else current_accelerator().streams
        self.faults: list[str] = []
        """Descriptions of the detected data races."""
        self.waits: list[str] = []
        """Operations in which the host waited for the device."""
        self.copies = 0
        """Number of non-blocking copies between host and device."""
        self._otherwise = otherwise
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._streams = 0
        real = self.real.current_stream() if self.real else None
        self._current: list[RecordedStream] = [RecordedStream(self, "computation", real)]

    # -- The interface of a device's torch module, or of DeepSpeed's accelerator.

    def Stream(self, *_: Any, **__: Any) -> RecordedStream:  # noqa: N802 - as torch has it
        """Create a stream."""
        self._streams += 1
        real = self.real.Stream() if self.real else None
        return RecordedStream(self, f"stream {self._streams}", real)

    def Event(self, **options: Any) -> RecordedEvent:  # noqa: N802 - as torch has it
        """Create an event.

        Args:
            options: Options of the real event.
        """
        return RecordedEvent(self, **options)

    def current_stream(self, _device: Any = None) -> RecordedStream:
        """Return the stream on which work is currently queued."""
        return self._current[-1]

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Inside the block, queue work on ``stream``."""
        self._current.append(stream)
        try:
            if self.real is None:
                yield
            else:
                with self.real.stream(stream.real):
                    yield
        finally:
            self._current.pop()

    # -- Declarations by tests.

    def lie(self, place: Place, *tensors: torch.Tensor) -> None:
        """Declare which kind of memory the tensors are in; not needed on a GPU.

        Args:
            place: Kind of memory (device, page-locked or pageable).
            tensors: The tensors.
        """
        for tensor in tensors:
            self._of(tensor).place = place

    @contextmanager
    def page_locking(self) -> Iterator[None]:
        """Inside the block, make ``is_pinned`` reflect the declared memory; not needed on a GPU."""

        def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
            return self._of(tensor).place == "locked"

        if self.real is not None:
            yield
            return
        with mock.patch.object(torch.Tensor, "is_pinned", is_pinned):
            yield

    # -- Clocks.

    def clock(self, name: str) -> Clock:
        """Return the vector clock of a stream or host thread.

        Args:
            name: Name of the stream or host thread.
        """
        return self._clocks.setdefault(name, {})

    def host_waits(self, what: str, clock: Clock) -> None:
        """Record that the calling host thread has waited for the device.

        Args:
            what: Name of the operation.
            clock: Vector clock that the thread has waited for.
        """
        self.waits.append(what)
        learn(self.clock(host_name()), clock)

    def _tick(self, name: str) -> int:
        clock = self.clock(name)
        clock[name] = clock.get(name, 0) + 1
        return clock[name]

    # -- Operations.

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        locked = bool(kwargs.get("pin_memory"))
        if locked and self.real is None:
            kwargs["pin_memory"] = False
        with self._lock:
            self._look_for_freed()
        out = func(*args, **kwargs)
        with self._lock:
            self._note(func, args, kwargs, out, locked=locked)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, *, locked: bool) -> None:
        read, written = _operands(func, args, kwargs)
        name = func._schema.name
        known = [self._of(tensor) for tensor in (*read, *written)]
        made = [each for each in _tensors_in(out) if self._key(each) not in self._memory]
        places = {memory.place for memory in known}
        for tensor in made:
            memory = self._of(tensor)
            if self.real is None and tensor.device.type == "cpu":
                memory.place = "locked" if locked else self._place_of_new(places)
            known.append(memory)
        if name.startswith(_ALLOCATES) or name == _KEEPS:
            return
        self._judge(name, args, kwargs, read, [*written, *made])

    def _place_of_new(self, places: set[Place]) -> Place:
        if not places or "device" in places:
            return self._otherwise
        return "pageable"

    def _judge(self, name: str, args: Any, kwargs: Any, read: Any, written: Any) -> None:
        # A scalar operand is a kernel argument, not memory that the kernel reads.
        copies = name in ("aten::copy_", "aten::_to_copy")
        read = [t for t in read if copies or t.dim() or name == _READ_NUMBER]
        places = {self._of(tensor).place for tensor in (*read, *written)}
        if not places:
            return
        on_device = "device" in places
        timeline = self.current_stream().name if on_device else host_name()
        if on_device:
            # The host queues work, so the work is ordered after everything the host knows.
            learn(self.clock(timeline), self.clock(host_name()))
        now = self._tick(timeline)
        touched: tuple[tuple[Doing, Any], ...] = (("read", read), ("written", written))
        for what, tensors in touched:
            for tensor in tensors:
                self._access(name, tensor, _Access(what, *_bytes(tensor), timeline, now))
        crossing = on_device and len(places) > 1 and copies
        if crossing and kwargs.get("non_blocking", len(args) > 2 and args[2]):
            self.copies += 1
            if "pageable" in places:
                self.faults.append(f"{name} of pageable memory is declared as non-blocking")
        elif crossing or (on_device and name == _READ_NUMBER):
            self.host_waits(name, self.clock(timeline))

    def _access(self, name: str, tensor: torch.Tensor, new: _Access) -> None:
        memory, known = self._of(tensor), self.clock(new.who)
        for old in memory.accesses:
            apart = old.high <= new.low or new.high <= old.low
            harmless = old.what == new.what == "read" or old.who == new.who
            if not apart and not harmless and known.get(old.who, 0) < old.when:
                doing = "writes" if new.what == "written" else "reads"
                self.faults.append(
                    f"{name} on {new.who} {doing} {memory.place} memory {old.what} on {old.who}"
                )
        memory.accesses = [old for old in memory.accesses if not new.covers(old)]
        memory.accesses.append(new)

    def _look_for_freed(self) -> None:
        """Record a fault if memory is freed that a different stream may still use."""
        for key in [key for key, memory in self._memory.items() if memory.weak.expired()]:
            memory = self._memory.pop(key)
            home = memory.home
            known = self.clock(home)
            for who, when in ((each.who, each.when) for each in memory.accesses):
                if memory.place != "device" or who in (home, *memory.kept_for):
                    continue
                if known.get(who, 0) < when:
                    self.faults.append(f"device memory of {home} is freed while {who} uses it")

    def _of(self, tensor: torch.Tensor) -> _Memory:
        key = self._key(tensor)
        if key not in self._memory:
            place: Place
            if tensor.device.type != "cpu":
                place = "device"
            elif self.real is None:
                place = self._otherwise
            else:
                place = "locked" if tensor.is_pinned() else "pageable"
            home = self.current_stream().name
            weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._memory[key] = _Memory(weak=weak, place=place, home=home)
        return self._memory[key]

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


def host_name() -> str:
    """Return the name under which the calling thread's vector clock is stored."""
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        # Autograd's thread of a device: the caller of ``backward`` waits for it.
        thread = threading.main_thread()
    return f"the host's {thread.name}"


def learn(clock: Clock, other: Clock) -> None:
    """Set each time in a vector clock to the corresponding time in another clock if that is later.

    Args:
        clock: The clock to update.
        other: The clock to compare with.
    """
    for name, time in other.items():
        clock[name] = max(time, clock.get(name, 0))


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and one past its last byte."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + int(last + 1) * tensor.itemsize


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Tensors that an operation reads and writes; none for views."""
    if func.is_view:
        return [], []
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        target = argument.alias_info is not None and argument.alias_info.is_write
        (written if target else read).extend(_tensors_in(value))
    return read, written


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return []
