"""Who may touch which memory when: streams, events, copies and threads, written down and judged.

A ``Recorder`` sees every operation of torch inside its block. It keeps a clock for each stream and
each thread of the host, lets them learn of each other only where the code says so (events, waits,
starting and joining a thread), and notes as a fault each access that nothing orders after the one
it depends on. On a GPU its streams and events are the real ones; without one the same code runs
with streams that only the recorder knows, on tensors that it is told lie on a device.
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

Place = Literal["device", "locked", "pageable"]
Doing = Literal["read", "written"]
Clock = dict[str, int]

_READ_NUMBER = "aten::_local_scalar_dense"
_KEEPS = "aten::record_stream"
"""Said to change its tensor, of which it touches nothing."""
_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like")


@attrs.frozen
class _Access:
    """Bytes of a storage that were read or written, by whom and when."""

    what: Doing
    low: int
    high: int
    who: str
    when: int

    def covers(self, other: _Access) -> bool:
        """Whether nothing needs to be known of the other any more."""
        inside = self.low <= other.low and other.high <= self.high
        return inside and (
            self.what == "written" or (self.what, self.who) == (other.what, other.who)
        )


@attrs.define
class _Memory:
    """One storage, and who has touched it."""

    weak: Any
    place: Place
    home: str
    """The timeline it was allocated on, whose later work may have its memory once it is freed."""
    accesses: list[_Access] = attrs.field(factory=list)
    kept_for: set[str] = attrs.field(factory=set)
    """Streams that the allocator itself waits for before it gives the memory away."""


class RecordedEvent:
    """A moment of a stream."""

    def __init__(self, recorder: Recorder, **options: Any) -> None:
        self._recorder = recorder
        self._real = recorder.real.Event(**options) if recorder.real else None
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        """Of the stream, or of the current one."""
        stream = stream or self._recorder.current_stream()
        self.clock = dict(self._recorder.clock(stream.name))
        if self._real is not None:
            self._real.record(stream.real)

    def wait(self, stream: Any = None) -> None:
        """Have a stream wait for it."""
        (stream or self._recorder.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Have the host wait for it."""
        self._recorder.host_waits("event.synchronize", self.clock)
        if self._real is not None:
            self._real.synchronize()


class RecordedStream:
    """An order of work on the device."""

    def __init__(self, recorder: Recorder, name: str, real: Any = None) -> None:
        self._recorder, self.name, self.real = recorder, name, real

    def wait_event(self, event: RecordedEvent) -> None:
        """What comes after on this stream waits."""
        learn(self._recorder.clock(self.name), event.clock)
        if self.real is not None:
            self.real.wait_event(event._real)

    def wait_stream(self, other: RecordedStream) -> None:
        """What comes after on this stream waits for all that is queued on the other."""
        learn(self._recorder.clock(self.name), self._recorder.clock(other.name))
        if self.real is not None:
            self.real.wait_stream(other.real)

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        """This moment."""
        event = event or RecordedEvent(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait for all that is queued."""
        self._recorder.host_waits("stream.synchronize", self._recorder.clock(self.name))
        if self.real is not None:
            self.real.synchronize()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for the streams of a device, and watches all that torch does.

    Without a GPU, or ``simulated``, tensors lie ``otherwise`` unless somebody says where.
    """

    def __init__(self, *, otherwise: Place = "device", simulated: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        there = torch.cuda.is_available() and not simulated
        self.real: Any = torch.cuda if there else None
        self.faults: list[str] = []
        """What is not in order, in words."""
        self.waits: list[str] = []
        """Each time the host waited for the device."""
        self.copies = 0
        """Copies between host and device that do not wait."""
        self._otherwise = otherwise
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._streams = 0
        real = self.real.current_stream() if self.real else None
        self._current: list[RecordedStream] = [RecordedStream(self, "computation", real)]

    # -- What code asks of a device's module, or of DeepSpeed's accelerator.

    def Stream(self, *_: Any, **__: Any) -> RecordedStream:  # noqa: N802 - as torch has it
        """A new one."""
        self._streams += 1
        real = self.real.Stream() if self.real else None
        return RecordedStream(self, f"stream {self._streams}", real)

    def Event(self, **options: Any) -> RecordedEvent:  # noqa: N802 - as torch has it
        """A new one."""
        return RecordedEvent(self, **options)

    def current_stream(self, _device: Any = None) -> RecordedStream:
        """Where work is queued now."""
        return self._current[-1]

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Queue work there inside the block."""
        self._current.append(stream)
        try:
            if self.real is None:
                yield
            else:
                with self.real.stream(stream.real):
                    yield
        finally:
            self._current.pop()

    # -- What tests say.

    def lie(self, place: Place, *tensors: torch.Tensor) -> None:
        """Say where tensors lie; a GPU knows it itself."""
        for tensor in tensors:
            self._of(tensor).place = place

    @contextmanager
    def page_locking(self) -> Iterator[None]:
        """Have ``is_pinned`` tell what the recorder knows; a GPU knows it itself."""

        def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
            return self._of(tensor).place == "locked"

        if self.real is not None:
            yield
            return
        with mock.patch.object(torch.Tensor, "is_pinned", is_pinned):
            yield

    # -- Clocks.

    def clock(self, name: str) -> Clock:
        """What a timeline knows of all."""
        return self._clocks.setdefault(name, {})

    def host_waits(self, what: str, clock: Clock) -> None:
        """The host knows from now on what the device has done."""
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
        # A number beside a tensor is an argument of the kernel, not memory that it reads.
        copies = name in ("aten::copy_", "aten::_to_copy")
        read = [t for t in read if copies or t.dim() or name == _READ_NUMBER]
        places = {self._of(tensor).place for tensor in (*read, *written)}
        if not places:
            return
        on_device = "device" in places
        timeline = self.current_stream().name if on_device else host_name()
        if on_device:
            # Work is queued by the host, after all that it knows.
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
                self.faults.append(f"{name} of pageable memory is declared not to wait")
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
        """Memory that is freed belongs at once to what is queued next where it came from."""
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
    """The timeline of the thread that asks."""
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        # Autograd's own, for a device: whoever has called ``backward`` waits for it.
        thread = threading.main_thread()
    return f"the host's {thread.name}"


def learn(clock: Clock, other: Clock) -> None:
    """Have one timeline know what another one knows."""
    for name, time in other.items():
        clock[name] = max(time, clock.get(name, 0))


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that a tensor covers, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + int(last + 1) * tensor.itemsize


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Tensors that are read and that are written; of views neither."""
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
