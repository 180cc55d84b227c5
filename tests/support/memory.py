"""Memory that this process has in use, without blocks that its allocator keeps for reuse.

Resident memory also includes freed blocks, whose number depends on other load on the machine.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

MIB = 2**20


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


_LIBRARY = ctypes.CDLL(None)
needs_mallinfo = pytest.mark.skipif(
    not hasattr(_LIBRARY, "mallinfo2"), reason="asks glibc 2.33 or newer what is allocated"
)
if hasattr(_LIBRARY, "mallinfo2"):
    _LIBRARY.mallinfo2.restype = _Mallinfo2


def in_use() -> int:
    """Return allocated bytes, in all arenas and in separately mapped blocks."""
    found = _LIBRARY.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    """Return the bytes of touched pages; untouched allocations do not count.

    Use it only for differences much larger than the allocator's free blocks; see ``exact_heap``.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def exact_heap() -> None:
    """Have freed blocks returned; otherwise glibc keeps those of up to 32 MiB resident."""
    m_mmap_threshold = -3
    _LIBRARY.mallopt(m_mmap_threshold, 65536)


class Peak:
    """Peak bytes inside a ``with`` block."""

    def __init__(self, of: Callable[[], int] = in_use) -> None:
        self._of = of

    def __enter__(self) -> Peak:
        self.before = self.nbytes = self._of()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.nbytes = max(self.nbytes, self._of())

    @property
    def growth(self) -> float:
        """Growth during the block, in MiB."""
        return (self.nbytes - self.before) / MIB
