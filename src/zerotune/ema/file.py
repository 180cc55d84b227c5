"""``FileTensors``: an EMA in a file, of which only a few chunks are in memory at a time.

The kernel would load a memory-mapped file page by page while the update waits. A thread instead
transfers whole chunks past the page cache. While one chunk is updated, the thread writes the
previous chunk and reads the next ones. Updates visit the chunks in the same order at every step, so
the next chunks are known from the second update on.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from typing_extensions import override

from zerotune._util.files import of_system
from zerotune._util.text import format_size
from zerotune.backend.ema_update import EMATensors
from zerotune.errors import EMAError
from zerotune.plan.memory.costing import EMA_CHUNK, EMA_CHUNKS

_BYTES: Final = 4
_SECTOR: Final = 4096
"""Alignment of transfers past the page cache."""
_CUT: Final = 1024
"""Elements; kernels and torch round alike on both sides of a multiple of this number."""


@attrs.define(eq=False)
class _Page:
    """Memory for one chunk."""

    memory: mmap.mmap
    elements: torch.Tensor
    """The memory as fp32."""
    transfer: Future[None] | None = None
    """Running read, or running write if ``dirty``."""
    dirty: bool = False
    """Whether the memory is newer than the file."""
    failed: bool = False
    """Whether the latest write failed; the next one waits until the memory is needed."""
    used: int = 0
    """Number of the latest use."""

    @classmethod
    def new(cls) -> _Page:
        memory = mmap.mmap(-1, EMA_CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork during a direct read would give the data to only one of the two processes.
        memory.madvise(mmap.MADV_DONTFORK)
        return cls(memory, torch.frombuffer(memory, dtype=torch.float32))


class FileTensors(EMATensors):
    """An EMA in an unlinked file; see ``FileStore``.

    A failed write loses nothing: the chunk stays in memory, and is written again when its memory is
    needed.

    Args:
        sizes: Number of elements of each fragment, by ``FragmentAddress.key``.
        folder: An existing folder.

    Raises:
        EMAError: The file cannot be created, or the disk is full.
    """

    def __init__(self, sizes: Mapping[str, int], *, folder: Path) -> None:
        self._folder = folder
        self._edges: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[tuple[int, int]]] = {}
        """For each range of a fragment: its chunk, and its first element in the chunk."""
        lengths = self._divide(sizes)
        self._nbytes = [-(-length * _BYTES // _SECTOR) * _SECTOR for length in lengths]
        self._offsets = list(accumulate(self._nbytes, initial=0))
        self._pages: dict[int, _Page] = {}
        """Chunks in memory, by index."""
        self._uses = 0
        self._latest = -1, -1
        """The two chunks that were used last."""
        self._after: dict[tuple[int, int], int] = {}
        """The chunk that the latest update used after each two chunks."""
        # One thread in the order of submission: after an interrupt, a chunk may be written twice.
        self._transfers = ThreadPoolExecutor(1, "zerotune-ema")
        self._descriptor = self._create(self._offsets[-1]) if lengths else -1
        if lengths:
            # Not at exit, when a transfer could use the descriptor of another file.
            weakref.finalize(self, os.close, self._descriptor).atexit = False

    @property
    @override
    def device(self) -> torch.device:
        return torch.device("cpu")

    @override
    def edges(self, key: str) -> Sequence[int]:
        return self._edges[key]

    @override
    def open(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self._range(key, start, stop, writes=True)

    @override
    def __getitem__(self, key: str) -> torch.Tensor:
        """Read a whole fragment into memory."""
        edges = self._edges[key]
        into = torch.empty(edges[-1], dtype=torch.float32)
        for start, stop in pairwise(edges):
            into[start:stop] = self._range(key, start, stop, writes=False)
        return into

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._edges)

    @override
    def __len__(self) -> int:
        return len(self._edges)

    def _divide(self, sizes: Mapping[str, int]) -> list[int]:
        """Put ranges of the fragments into chunks; return the chunks' numbers of elements.

        Ranges of a fragment have about the same size. A short one could divide the elements that a
        kernel updates without vectors.
        """
        most = EMA_CHUNK // _BYTES
        lengths: list[int] = []
        for key, numel in sizes.items():
            count = -(-numel // (most - _CUT))
            starts = (numel * index // count // _CUT * _CUT for index in range(count))
            self._edges[key] = (*starts, numel)
            self._places[key] = []
            for start, stop in pairwise(self._edges[key]):
                length = stop - start
                if not lengths or lengths[-1] + length > most:
                    lengths.append(0)
                self._places[key].append((len(lengths) - 1, lengths[-1]))
                lengths[-1] += length
        return lengths

    def _create(self, nbytes: int) -> int:
        try:
            descriptor, path = tempfile.mkstemp(prefix="ema-", suffix=".shadow", dir=self._folder)
            try:
                # Reserve the space, so that a full disk is found now.
                os.posix_fallocate(descriptor, 0, nbytes)
            except BaseException:
                os.close(descriptor)
                raise
            finally:
                Path(path).unlink()
        except (OSError, ValueError) as error:
            raise EMAError(
                f"{format_size(nbytes)} for the shadow cannot be allocated: "
                f"{getattr(error, 'strerror', None) or error}",
                "use an existing writable folder on a disk with enough space",
                "FileStore.folder",
                str(self._folder),
            ) from error
        # Some file systems, such as tmpfs, only offer transfers through the page cache.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        return descriptor

    def _range(self, key: str, start: int, stop: int, *, writes: bool) -> torch.Tensor:
        index = bisect_right(self._edges[key], start) - 1
        chunk, first = self._places[key][index]
        first += start - self._edges[key][index]
        return self._chunk(chunk, writes=writes)[first : first + stop - start]

    def _chunk(self, index: int, *, writes: bool) -> torch.Tensor:
        """Return a chunk's elements; the previous chunk is written, and the next ones are read."""
        if index != self._latest[1]:
            self._write(self._latest[1])
            if writes:
                self._after[self._latest] = index
            self._latest = self._latest[1], index
        # Neighbouring fragments may share a chunk, which an update then uses twice.
        coming = list(self._latest)
        while len(coming) <= EMA_CHUNKS:
            coming.append(self._after.get((coming[-2], coming[-1]), coming[-1] + 1))
        coming = coming[1:]
        if index not in self._pages:
            page = self._room(coming, waits=True) or _Page.new()
            self._submit(os.preadv, index, page)
            self._pages[index] = page
        for later in coming[1:]:
            if later < len(self._nbytes) and later not in self._pages:
                room = self._room(coming, waits=False)
                if room is None:
                    break
                self._submit(os.preadv, later, room)
                self._pages[later] = room
        page = self._finish(index)
        self._uses += 1
        page.used, page.dirty = self._uses, page.dirty or writes
        return page.elements

    def _room(self, wanted: Collection[int], *, waits: bool) -> _Page | None:
        """Return memory for a chunk; ``None`` if there is none without waiting."""
        if len(self._pages) < EMA_CHUNKS:
            return _Page.new()
        # A chunk that could not be written is tried last.
        order = sorted(self._pages.items(), key=lambda item: (item[1].failed, item[1].used))
        for index, page in order:
            busy = page.failed or (page.transfer is not None and not page.transfer.done())
            if index not in wanted and (waits or not busy):
                page.failed = False
                self._write(index)
                self._finish(index)
                return self._pages.pop(index)
        return None

    def _write(self, index: int) -> None:
        page = self._pages.get(index)
        if page is not None and page.dirty and page.transfer is None and not page.failed:
            self._submit(os.pwritev, index, page)

    def _submit(self, call: Callable[..., int], index: int, page: _Page) -> None:
        page.transfer = self._transfers.submit(self._transfer, call, index, page.memory)

    def _finish(self, index: int) -> _Page:
        """Wait for the transfer of a chunk."""
        page = self._pages[index]
        if page.transfer is None:
            return page
        try:
            page.transfer.result()
        except OSError as error:
            what = "written to" if page.dirty else "read from"
            if page.dirty:
                page.failed, page.transfer = True, None
            else:
                del self._pages[index]
            purpose = f"a part of the EMA cannot be {what} its file"
            raise of_system(EMAError, error, self._folder, purpose) from error
        page.transfer, page.dirty = None, False
        return page

    def _transfer(self, call: Callable[..., int], index: int, memory: Any) -> None:
        rest, offset = memoryview(memory)[: self._nbytes[index]], self._offsets[index]
        while rest:
            count = call(self._descriptor, [rest], offset)
            if not count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rest, offset = rest[count:], offset + count
        # Without direct transfers: the page cache must not grow to the size of the file.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
