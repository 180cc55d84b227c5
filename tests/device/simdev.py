"""The module ``torch.simdev``: what torch and its users ask the module of a device."""

# ruff: noqa: ARG002 - the interface is torch's

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tests.device.build import load_device

_C = load_device()
_PRIVATE_USE_1 = 20  # in c10::DeviceType

seed_order = _C.seed_order
counts = _C.counts
reset_counts = _C.reset_counts
limit = _C.limit
pin = _C.pin
unpin = _C.unpin

HOST_WAITS = (
    "item",
    "blocking_upload",
    "blocking_download",
    "synchronize_stream",
    "synchronize_event",
    "synchronize_device",
    "shape_depends_on_data",
    "out_of_memory",
)


def host_waits():
    """Return how often the training thread has waited for the device, by cause.

    ``counts()`` has the waits of other threads, with ``beside`` after the cause.
    """
    return {cause: n for cause, n in counts().items() if cause in HOST_WAITS}


@contextlib.contextmanager
def places_of_waits(package="zerotune"):
    """Inside the block, count host waits by cause and by the innermost line of a package.

    Args:
        package: Name of the package; lines outside it count under their caller in it.
    """
    places = Counter()

    def note(cause):
        frame = sys._getframe(1)
        while frame and not frame.f_globals["__name__"].startswith(f"{package}."):
            frame = frame.f_back
        place = f"{frame.f_globals['__name__']}:{frame.f_lineno}" if frame else "elsewhere"
        places[cause, place] += 1

    _C.watch_waits(note)
    try:
        yield places
    finally:
        _C.watch_waits(None)


class Span(NamedTuple):
    """A task, or work or a wait of the host, in virtual time."""

    lane: str
    """``"compute"``, ``"upload"``, ``"download"``, ``"network"`` or ``"host"``."""
    name: str
    stream: int
    """Number of the stream; -1 for the host."""
    start: float
    end: float
    bytes: float
    """Bytes read and written."""
    operations: float
    """Floating point operations of products."""
    label: str
    """Label of the thread that queued it."""


class Clock:
    """Virtual time, in seconds since ``reset``.

    A task starts when the task before it in its stream, the events that the stream waits for, and
    the host's call that queued it are over, and its engine (compute, upload, download, network) is
    free. Each host thread has its own time; backward shares that of the main thread.
    """

    rates = staticmethod(_C.clock_rates)
    """``rates({"memory": bytes_per_second, …})``; also ``upload``, ``download``, ``network``,
    ``half`` and ``single`` (operations per second), ``latency`` (seconds of each task) and
    ``launch`` (seconds of the host for each task)."""
    now = staticmethod(_C.clock_now)
    """Time of the calling host thread."""
    end = staticmethod(_C.clock_end)
    """When all work queued so far will be over."""
    reset = staticmethod(_C.clock_reset)
    """Wait for the device, and begin anew."""
    record = staticmethod(_C.clock_record)
    """``record(True)`` keeps what ``spans`` returns."""

    @staticmethod
    def spans(first: int = 0) -> list[Span]:
        """Return what has been recorded, with host waits (named by cause) and ``advance``.

        Args:
            first: How many of the oldest to leave out.
        """
        return [Span(*span) for span in _C.clock_spans(first)]

    @staticmethod
    def scale(work: float = 1.0, copies: float = 1.0, label: str = "") -> None:
        """Let later tasks of the calling thread take longer than their sizes say.

        So a small model's schedule has the durations of a large one.

        Args:
            work: Factor of the time of computation.
            copies: Factor of the time of uploads, downloads and collectives.
            label: Label of the tasks.
        """
        _C.clock_scale(work, copies, label)

    @staticmethod
    def advance(seconds: float, name: str = "host") -> None:
        """Let the calling thread work on the host for some time."""
        _C.clock_advance(seconds, name)

    @staticmethod
    def join(until: float, why: str = "wait") -> None:
        """Let the calling thread wait for a time, such as that of another thread."""
        _C.clock_join(until, why)


clock = Clock()


# -- Streams and events.


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device=None, priority=0, **options):
        return super().__new__(cls, device=device or "simdev:0", priority=priority, **options)


def Event(enable_timing=False, blocking=False, interprocess=False):
    """Create an event of the device; torch cannot compare times of subclasses of its own."""
    return torch.Event(
        "simdev:0", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
    )


def current_stream(device=None):
    return torch.accelerator.current_stream()


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=0, device_type=_PRIVATE_USE_1)


def set_stream(stream):
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream):
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(before)


StreamContext = stream


def synchronize(device=None):
    torch.accelerator.synchronize()


# -- The device.


class device:
    """The only device; entering it changes nothing."""

    def __init__(self, device=None):
        self.idx = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


_initialized = True
device_of = device


def is_available():
    return True


def is_initialized():
    return True


def init():
    pass


_lazy_init = init


def _lazy_call(callback):
    callback()


def device_count():
    return 1


def current_device():
    return 0


def set_device(device):
    pass


def _is_in_bad_fork():
    return False


def get_device_name(device=None):
    return "simdev"


def get_device_capability(device=None):
    return (9, 0)


def get_device_properties(device=None):
    return SimpleNamespace(
        name="simdev",
        total_memory=mem_get_info()[1],
        major=9,
        minor=0,
        multi_processor_count=1,
    )


def is_bf16_supported(including_emulation=True):
    return True


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16, torch.float32]


# -- Memory.


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated()


def max_memory_allocated(device=None):
    return torch.accelerator.max_memory_allocated()


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved()


def max_memory_reserved(device=None):
    return torch.accelerator.max_memory_reserved()


def memory_stats(device=None):
    return torch.accelerator.memory_stats()


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats()


def reset_accumulated_memory_stats(device=None):
    torch.accelerator.reset_accumulated_memory_stats()


def mem_get_info(device=None):
    return torch.accelerator.get_memory_info()


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_reserved = reset_peak_memory_stats


def empty_cache():
    pass


def ipc_collect():
    pass


def host_memory_stats():
    """Return figures of page-locked memory that torch allocated."""
    figures = ("current", "peak", "allocated", "freed")
    return {
        f"allocated_bytes.{name}": n for name, n in zip(figures, _C.pinned_memory(), strict=True)
    }


def cudart():
    """Return the driver's functions that page-lock memory of others, by CUDA's names."""

    def register(address, size, flags):
        pin(address, size)
        return 0

    def unregister(address):
        unpin(address)
        return 0

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


def check_error(code):
    if code:
        raise RuntimeError(f"simdev: error {code}")


# -- Random numbers.

default_generators = (_C.default_generator(),)


def get_rng_state(device=None):
    return default_generators[0].get_state()


def set_rng_state(state, device=None):
    default_generators[0].set_state(state)


def get_rng_state_all():
    return [get_rng_state()]


def set_rng_state_all(states):
    set_rng_state(states[0])


def manual_seed(seed):
    default_generators[0].manual_seed(int(seed))


manual_seed_all = manual_seed


def seed():
    default_generators[0].seed()


seed_all = seed


def initial_seed():
    return default_generators[0].initial_seed()
