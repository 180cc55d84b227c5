"""The memory this process has in use, without what its allocator keeps for later.

Resident memory also holds freed blocks, and how many depends on what else keeps the machine busy.
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
    """Bytes that are allocated and not freed, in all arenas and in blocks of their own."""
    found = _LIBRARY.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    """Bytes of pages that were touched; what is allocated and empty does not count.

    Only for differences much larger than what an allocator keeps: see ``exact_heap``.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def exact_heap() -> None:
    """Give freed blocks back; else glibc keeps those of up to 32 MiB, and they stay resident."""
    m_mmap_threshold = -3
    _LIBRARY.mallopt(m_mmap_threshold, 65536)


class Peak:
    """Most bytes at a time inside a ``with`` block."""

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
        """MiB more than before the block."""
        return (self.nbytes - self.before) / MIB
