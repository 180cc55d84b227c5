"""Activations in host memory: they wait there for the backward pass, and come back a block ahead.

``ActivationOffload`` decides which tensors leave and when they return; ``Transfers`` move them
between a device and page-locked memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.text import parse_size
from zerotune.backend.proof import why_unproven
from zerotune.decisions import Decision, announce
from zerotune.errors import InvalidValueError, TrainingError
from zerotune.platform.facts import Accelerator

if TYPE_CHECKING:
    from typing_extensions import Self


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
        """Do nothing: no memory was allocated."""


class WaitingTransfers:
    """Copies that the host waits for, in the computation's own order.

    Args:
        reason: Why they do not run beside it.
    """

    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def store(self, tensor: torch.Tensor) -> Stored:
        """Copy, and return once it is complete."""
        return Stored(tensor=tensor.detach().to("cpu", copy=True), device=tensor.device)

    def settle(self, stored: Stored) -> None:
        """Nothing is under way."""

    def load(self, stored: Stored) -> Loading:
        """Copy back, and return once it is complete."""
        return Loading(tensor=stored.tensor.to(stored.device, copy=True))

    def finish(self, loading: Loading) -> torch.Tensor:
        """The device's tensor."""
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Do nothing: these transfers use no pooled memory."""


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
        streams: Has its streams and events; torch's module of the device when not given.
    """

    def __init__(self, device: torch.device, *, streams: Any = None) -> None:
        self._device = device
        self._streams: Any = streams or torch.get_device_module(device)
        self._side = self._streams.Stream(device)
        self.pool = BlockPool(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        )

    def store(self, tensor: torch.Tensor) -> Stored:
        """Copy to a page-locked block on the side stream."""
        block = self.pool.take(tensor.numel() * tensor.element_size())
        host = block.view(tensor.dtype).as_strided(tensor.shape, stored_strides(tensor))
        self._side.wait_stream(self._computation())
        with self._streams.stream(self._side):
            for target, source in _dense_parts(host, tensor.detach()):
                target.copy_(source, non_blocking=True)
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
        # The device's tensor may be dropped with it, whose memory is used again from then on.
        self._computation().wait_event(stored.event)
        if stored.buffer is not None:
            self.pool.give(stored.buffer)

    def _computation(self) -> Any:
        return self._streams.current_stream(self._device)


def stored_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a copy of ``tensor`` without gaps: its own where it has none."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


_PART: Final = 2**18
"""Bytes from which on a piece of a tensor is worth a copy of its own."""


def _dense_parts(
    target: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces that lie in one block each, so that no copy needs memory of the device."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
    if dense or source.dim() < 2 or source.nbytes < _PART * len(source):
        yield target, source
        return
    for to, part in zip(target, source, strict=True):
        yield from _dense_parts(to, part)


def transfers_for(device: torch.device) -> Transfers:
    """What moves tensors of ``device``: a side stream where it has any, and that is proven."""
    if device.type not in ("cuda", "xpu"):
        return KeptTransfers()
    unproven = why_unproven("activation offload", accelerator=cast(Accelerator, device.type))
    return StreamTransfers(device) if unproven is None else WaitingTransfers(reason=unproven)


# -- Which tensors leave, and when they return.


KEY: Final = "activations"
_FLAG, _HOOK = "gradient_checkpointing", "_gradient_checkpointing_func"


@attrs.define(kw_only=True)
class OffloadCounts:
    """What an ``ActivationOffload`` has moved."""

    stored: int = 0
    """Tensors copied to the host."""
    stored_bytes: int = 0
    """Bytes of them."""
    fetched_ahead: int = 0
    """Tensors that were on their way back when the backward pass asked for them."""
    fetched_late: int = 0
    """Tensors that were not."""
    kept: int = 0
    """Tensors the backward pass found on the device still."""


class ActivationOffload(Closable):
    """Keeps what a diffusers model's checkpointed blocks leave behind in host memory.

    Gradient checkpointing keeps the input of each block until the backward pass recomputes the
    block, and all that is computed between blocks. Here all but the newest of both is copied to
    page-locked host memory while the next block runs, and copied back while the block after it is
    recomputed. Results are exact: the same bytes come back. On the CPU nothing is copied. ::

        with ActivationOffload().attach(unet):
            loss = objective(unet, batch, generator)
            loss.backward()

    Works beside autocast and ZeRO-3. What is saved may not be changed in place afterwards, as
    under autograd itself.

    Args:
        smallest: Bytes, or text such as ``"1MiB"``; smaller tensors stay where they are, and so
            do those that need no gradient, which all blocks share.
        ahead: Blocks fetched before their turn.
        transfers: Makes the copies; chosen by the device when not given.

    Raises:
        InvalidValueError: No size, or less than one block ahead.
    """

    def __init__(
        self,
        *,
        smallest: int | str = "1MiB",
        ahead: int = 1,
        transfers: Transfers | None = None,
    ) -> None:
        if ahead < 1:
            raise InvalidValueError(
                "the next block must be fetched at least", key="ahead", value=ahead, fix="write 1"
            )
        self._smallest = parse_size(smallest, key="smallest")
        self._ahead = ahead
        self._transfers = transfers
        self._before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._hooks: tuple[Any, ...] = ()
        self._between: list[saved_tensors_hooks] = []
        self._newest: _Call | None = None
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.counts = OffloadCounts()
        """What was moved since this object was made."""

    @property
    def attached(self) -> bool:
        """Whether a model uses it."""
        return bool(self._before)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Where the activations go; empty before the first of them."""
        if self._transfers is None:
            return ()
        if isinstance(self._transfers, KeptTransfers):
            why = "this device's memory is the host's, so there is nothing to copy"
            return (Decision(key=KEY, before="device", after="device", reason=why),)
        why, where = "inputs of checkpointed blocks wait there for the backward pass", "host"
        if isinstance(self._transfers, WaitingTransfers):
            where = "host, each copy waited for"
            why += f"; {self._transfers.reason}"
        return (Decision(key=KEY, before="device", after=where, reason=why),)

    def attach(self, model: torch.nn.Module) -> Self:
        """Switch gradient checkpointing of ``model`` on, with offload.

        Args:
            model: A diffusers model with ``enable_gradient_checkpointing``; an engine's
                ``module``, not the engine.

        Raises:
            InvalidValueError: It has no gradient checkpointing, or this object is in use.
        """
        if self.attached:
            raise InvalidValueError(
                "serves another model already",
                key="ActivationOffload",
                value=type(model).__name__,
                fix="call detach() first, or make one object for each model",
            )
        switch: Any = getattr(model, "enable_gradient_checkpointing", None)
        if switch is None or not getattr(model, "_supports_gradient_checkpointing", False):
            raise InvalidValueError(
                "has no gradient checkpointing",
                key="model",
                value=type(model).__name__,
                fix="train a diffusers model that supports enable_gradient_checkpointing()",
            )
        before = [
            (module, {name: vars(module)[name] for name in (_FLAG, _HOOK) if name in vars(module)})
            for module in model.modules()
            if hasattr(module, _FLAG)
        ]
        switch(gradient_checkpointing_func=self.checkpoint)
        self._before = before
        self._hooks = (
            model.register_forward_pre_hook(self._enter_model),
            model.register_forward_hook(self._leave_model, always_call=True),
        )
        return self

    def detach(self) -> None:
        """Put the model's gradient checkpointing back as it was. May be repeated."""
        for module, values in self._before:
            for name in (_FLAG, _HOOK):
                vars(module).pop(name, None)
            vars(module).update(values)
        for hook in self._hooks:
            hook.remove()
        self._before, self._hooks = [], ()
        self._newest = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)`` without keeping what is in it, its inputs in host memory.

        What ``attach`` gives to diffusers; usable for blocks of any other model.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        call = self._begin()
        # Inside, the hooks of `checkpoint` itself are the innermost: these see its inputs only.
        with saved_tensors_hooks(call.pack, self._unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def _enter_model(self, _model: torch.nn.Module, _arguments: Any) -> None:
        # What is computed between blocks goes with the block before it.
        between = saved_tensors_hooks(self._pack_between, self._unpack)
        between.__enter__()
        self._between.append(between)

    def _leave_model(self, _model: torch.nn.Module, _arguments: Any, _output: Any) -> None:
        if self._between:
            self._between.pop().__exit__()

    def _pack_between(self, tensor: torch.Tensor) -> _Ticket | torch.Tensor:
        call = self._newest if self._newest is not None else self._begin()
        return call.pack(tensor)

    def _begin(self) -> _Call:
        newest = self._newest
        while newest is not None and not newest.alive:
            newest = newest.previous
        if newest is not None:
            self._store(newest)
            if newest.previous is not None:
                self._settle(newest.previous)
        call = _Call(owner=self, previous=newest)
        self._newest = call
        return call

    def _save(self, tensor: torch.Tensor, call: _Call) -> _Saved | torch.Tensor:
        if not self._worth_it(tensor):
            return tensor
        if self._transfers is None:
            self._transfers = transfers_for(tensor.device)
            announce(self.decisions)
        # Blocks share some inputs, and the graph may still hold this one.
        known = self._known.get(tensor)  # type: ignore[no-untyped-call]
        saved: _Saved | None = None if known is None else known()
        if saved is None or saved.version != tensor._version:
            saved = _Saved(tensor=tensor, call=call, transfers=self._transfers)
            self._known[tensor] = weakref.ref(saved)
        else:
            saved.stay(tensor, call)
        return saved

    def _worth_it(self, tensor: torch.Tensor) -> bool:
        weight = tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        # What is expanded takes less memory than its copy would.
        expanded = any(size > 1 and stride == 0 for size, stride in dimensions)
        return tensor.requires_grad and not weight and not expanded

    def _store(self, call: _Call) -> None:
        for saved in call.saved():
            # Smaller ones are followed all the same: what took them is a block to fetch ahead.
            leaves = saved.call is call and saved.nbytes >= self._smallest
            if leaves and saved.stored is None and saved.tensor is not None:
                saved.check_unchanged(saved.tensor)
                saved.stored = saved.transfers.store(saved.tensor)
                self.counts.stored += 1
                self.counts.stored_bytes += saved.nbytes

    def _settle(self, call: _Call) -> None:
        for saved in call.saved():
            if saved.call is call and saved.stored is not None and saved.tensor is not None:
                saved.check_unchanged(saved.tensor)
                saved.transfers.settle(saved.stored)
                saved.tensor = None

    def _unpack(self, packed: _Ticket | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = self._fetched(packed.saved)
        earlier, left = packed.call.previous, self._ahead
        while earlier is not None and left:
            for saved in earlier.saved():
                saved.prefetch()
            left -= earlier.alive
            earlier = earlier.previous
        return tensor

    def _fetched(self, saved: _Saved) -> torch.Tensor:
        here = saved.here()
        if here is not None:
            self.counts.kept += 1
            return here
        if saved.loading is None:
            self.counts.fetched_late += 1
        else:
            self.counts.fetched_ahead += 1
        return saved.fetch()

    @override
    def close(self) -> None:
        """The same as ``detach``."""
        self.detach()


class _Saved:
    """One tensor, wherever it is; ends with the last part of the graph that needs it."""

    def __init__(self, *, tensor: torch.Tensor, call: _Call, transfers: Transfers) -> None:
        # Without its history: the graph it belongs to holds this object.
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.nbytes = tensor.numel() * tensor.element_size()
        self.transfers = transfers
        self.stored: Stored | None = None
        self.loading: Loading | None = None
        self.call = call
        """The newest block that takes it; with that one it leaves."""

    def stay(self, tensor: torch.Tensor, call: _Call) -> None:
        """One more block takes it, so it is here anyway."""
        self.tensor, self.call = tensor.detach(), call

    def check_unchanged(self, tensor: torch.Tensor) -> None:
        """Refuse to give back what was changed after it was saved."""
        if tensor._version != self.version:
            raise TrainingError(
                "the input of a checkpointed block was changed in place after the block had run",
                key="activations",
                value=tuple(tensor.shape),
                fix="use the out-of-place operation, or train without ActivationOffload",
            )

    def here(self) -> torch.Tensor | None:
        """The device's own tensor, if it has not been given up."""
        if self.tensor is not None:
            self.check_unchanged(self.tensor)
        return self.tensor

    def prefetch(self) -> None:
        """Begin to bring it back, unless it is here or on its way."""
        if self.stored is not None and self.tensor is None and self.loading is None:
            self.loading = self.transfers.load(self.stored)

    def fetch(self) -> torch.Tensor:
        """Bring it back."""
        self.prefetch()
        if self.loading is None:
            raise TrainingError(
                "an offloaded activation was lost",
                key="activations",
                fix="run the backward pass before detach(), or report it",
            )
        loading, self.loading = self.loading, None
        tensor = self.transfers.finish(loading)
        if self.stored is not None and not self.stored.is_copy:
            self.check_unchanged(tensor)
        return tensor

    def __del__(self) -> None:
        # A copy under way would write into memory that is used again.
        if self.loading is not None:
            self.transfers.finish(self.loading)
        if self.stored is not None:
            self.transfers.release(self.stored)


class _Call:
    """One checkpointed block of a forward pass."""

    def __init__(self, *, owner: ActivationOffload, previous: _Call | None) -> None:
        self.previous = previous
        self._owner = owner
        self._saved: list[weakref.ref[_Saved]] = []

    def pack(self, tensor: torch.Tensor) -> _Ticket | torch.Tensor:
        """What the graph keeps instead of ``tensor``."""
        saved = self._owner._save(tensor, self)
        if isinstance(saved, torch.Tensor):
            return saved
        self._saved.append(weakref.ref(saved))
        return _Ticket(call=self, saved=saved)

    def saved(self) -> Iterator[_Saved]:
        """Its inputs that some graph still needs."""
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                yield saved

    @property
    def alive(self) -> bool:
        """Whether any of its inputs is still needed."""
        return any(True for _ in self.saved())


class _Ticket:
    """What the graph keeps: which tensor, and of which block."""

    def __init__(self, *, call: _Call, saved: _Saved) -> None:
        self.call, self.saved = call, saved
