"""Tensors on their way between a device and page-locked host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch


@attrs.define(kw_only=True)
class Stored:
    """A tensor in host memory, or on its way there."""

    tensor: torch.Tensor
    """The host's copy."""
    device: torch.device
    """Where it came from."""
    buffer: torch.Tensor | None = None
    """The pool's block that ``tensor`` is a view of."""
    event: Any = None
    """Reached once the copy is complete; ``None`` where copies are not asynchronous."""
    is_copy: bool = True
    """Whether later changes of the device's tensor leave it alone."""


@attrs.define(kw_only=True)
class Loading:
    """A tensor on its way back to the device."""

    tensor: torch.Tensor
    """The device's copy; may not be read before ``Transfers.finish``."""
    event: Any = None
    waiting: Any = None
    """The stream that may use the tensor after ``event``."""


class Transfers(Protocol):
    """Copies that run beside the computation.

    "The computation" is whatever the caller queues on the device's current stream.
    """

    def store(self, tensor: torch.Tensor) -> Stored:
        """Begin to copy ``tensor`` to the host, once the computation so far has made it."""
        ...

    def settle(self, stored: Stored) -> None:
        """Let the computation from here on wait until the copy is complete.

        After it the device's tensor may be dropped: its memory can only be used again by what is
        queued later.
        """
        ...

    def load(self, stored: Stored) -> Loading:
        """Begin to copy back, once the computation so far no longer needs the memory."""
        ...

    def finish(self, loading: Loading) -> torch.Tensor:
        """Let the computation from here on wait for the copy, and return the device's tensor."""
        ...

    def release(self, stored: Stored) -> None:
        """Nobody will load it again."""
        ...


class KeptTransfers:
    """No copies at all: for devices whose memory is the host's."""

    def store(self, tensor: torch.Tensor) -> Stored:
        """The tensor itself."""
        return Stored(tensor=tensor, device=tensor.device, is_copy=False)

    def settle(self, stored: Stored) -> None:
        """Nothing is under way."""

    def load(self, stored: Stored) -> Loading:
        """The tensor itself."""
        return Loading(tensor=stored.tensor)

    def finish(self, loading: Loading) -> torch.Tensor:
        """The tensor itself."""
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Nothing was taken."""


class BlockPool:
    """Host blocks that are used again, by size.

    Never holds more than was in use at one time: with several resolutions in turns, blocks of the
    others make room.

    Args:
        allocate: Makes a block of so many bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._idle: deque[torch.Tensor] = deque()
        self.in_use = 0
        """Bytes handed out."""
        self.peak = 0
        """Most bytes handed out at a time."""

    @property
    def held(self) -> int:
        """Bytes of all blocks."""
        return self.in_use + sum(block.nbytes for block in self._idle)

    def take(self, nbytes: int) -> torch.Tensor:
        """A block of exactly so many bytes, its contents undefined."""
        block = next((one for one in self._idle if one.nbytes == nbytes), None)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        if block is not None:
            self._idle = deque(one for one in self._idle if one is not block)
            return block
        while self._idle and self.held > self.peak:
            self._idle.popleft()
        return self._allocate(nbytes)

    def give(self, block: torch.Tensor) -> None:
        """Take a block back."""
        self.in_use -= block.nbytes
        self._idle.append(block)


class StreamTransfers:
    """Copies on one side stream, between a GPU and page-locked memory.

    Both directions share the stream, so a host block is never written before what was read from it
    has left. Device tensors belong to the computation's stream throughout: instead of
    ``record_stream``, which would hold memory back for as long as the host runs ahead, the
    computation waits for each copy before the memory is used again, and peak memory does not
    depend on timing.

    Args:
        device: A device with streams, CUDA or XPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._side = self._streams.Stream(device)
        self.pool = BlockPool(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        )

    def store(self, tensor: torch.Tensor) -> Stored:
        """Copy to a page-locked block on the side stream."""
        block = self.pool.take(tensor.numel() * tensor.element_size())
        host = block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self._side.wait_stream(self._computation())
        with self._streams.stream(self._side):
            host.copy_(tensor.detach(), non_blocking=True)
        event = self._side.record_event()
        return Stored(tensor=host, device=tensor.device, buffer=block, event=event)

    def settle(self, stored: Stored) -> None:
        """The computation waits for the copy."""
        self._computation().wait_event(stored.event)

    def load(self, stored: Stored) -> Loading:
        """Copy to new memory of the computation on the side stream."""
        source = stored.tensor
        target = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device=stored.device
        )
        computation = self._computation()
        # What had this memory before may still be queued there.
        self._side.wait_stream(computation)
        with self._streams.stream(self._side):
            target.copy_(source, non_blocking=True)
        return Loading(tensor=target, event=self._side.record_event(), waiting=computation)

    def finish(self, loading: Loading) -> torch.Tensor:
        """The computation waits for the copy."""
        # The stream whose memory it is: a tensor that is dropped unused is waited for as well.
        loading.waiting.wait_event(loading.event)
        current = self._computation()
        if current != loading.waiting:
            current.wait_event(loading.event)
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """The block may be used again; the side stream keeps the order."""
        if stored.buffer is not None:
            self.pool.give(stored.buffer)

    def _computation(self) -> Any:
        return self._streams.current_stream(self._device)


def transfers_for(device: torch.device) -> Transfers:
    """What moves tensors of ``device``: a side stream where it has any."""
    return StreamTransfers(device) if device.type in ("cuda", "xpu") else KeptTransfers()
