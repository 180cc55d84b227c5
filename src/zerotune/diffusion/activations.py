"""Activation offload: store activations in host memory and prefetch them before they are needed.

``ActivationOffload`` decides which tensors are offloaded and when they are prefetched.
Implementations of ``Transfers`` copy tensors between device and host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.text import parse_size
from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.proof import why_unproven
from zerotune.decisions import Decision, announce
from zerotune.errors import InvalidValueError, TrainingError

if TYPE_CHECKING:
    from typing_extensions import Self


@attrs.define(kw_only=True)
class Stored:
    """A tensor that is in host memory, or is being copied to host memory."""

    tensor: torch.Tensor
    """The copy in host memory."""
    device: torch.device
    """Device of the original tensor."""
    buffer: torch.Tensor | None = None
    """Block of the pool in which ``tensor`` is stored; ``None`` without a pool."""
    event: Any = None
    """Event recorded after the copy; ``None`` if copies are synchronous."""
    is_copy: bool = True
    """Whether ``tensor`` is a copy, which later changes to the device tensor do not affect."""


@attrs.define(kw_only=True)
class Loading:
    """A tensor that is being copied back to the device."""

    tensor: torch.Tensor
    """The copy on the device; do not read it before ``Transfers.finish``."""
    event: Any = None
    waiting: Any = None
    """Stream that must wait for ``event`` before it uses the tensor."""


class Transfers(Protocol):
    """Interface for copies between device and host, which may overlap with the computation.

    Here, "the computation" is the work queued on the device's current stream.
    """

    def store(self, tensor: torch.Tensor) -> Stored:
        """Start copying a device tensor to the host, after the computation queued so far."""
        ...

    def settle(self, stored: Stored) -> None:
        """Make later computation wait until the copy to the host is complete.

        After ``settle``, the caller may free the device tensor, because only later computation can
        reuse its memory.

        Args:
            stored: Value returned by ``store``.
        """
        ...

    def load(self, stored: Stored) -> Loading:
        """Start copying a tensor back to the device, after the computation queued so far.

        Args:
            stored: Value returned by ``store``.
        """
        ...

    def finish(self, loading: Loading) -> torch.Tensor:
        """Make later computation wait for the copy to the device, and return the device tensor.

        Args:
            loading: Value returned by ``load``.
        """
        ...

    def release(self, stored: Stored) -> None:
        """Release the host memory of a tensor that will not be loaded again.

        Args:
            stored: Value returned by ``store``.
        """
        ...


class KeptTransfers:
    """Transfers without copies, for devices that share the host's memory."""

    def store(self, tensor: torch.Tensor) -> Stored:
        """Store the original tensor, not a copy."""
        return Stored(tensor=tensor, device=tensor.device, is_copy=False)

    def settle(self, stored: Stored) -> None:
        """Do nothing, because no copy is pending."""

    def load(self, stored: Stored) -> Loading:
        """Load the original tensor, not a copy."""
        return Loading(tensor=stored.tensor)

    def finish(self, loading: Loading) -> torch.Tensor:
        """Return the original tensor."""
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Do nothing, because no memory was allocated."""


class WaitingTransfers:
    """Synchronous copies, which do not overlap with the computation.

    Args:
        reason: Why copies cannot overlap.
    """

    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def store(self, tensor: torch.Tensor) -> Stored:
        """Copy ``tensor`` to the host and wait for the copy."""
        return Stored(tensor=tensor.detach().to("cpu", copy=True), device=tensor.device)

    def settle(self, stored: Stored) -> None:
        """Do nothing, because no copy is pending."""

    def load(self, stored: Stored) -> Loading:
        """Copy a tensor back to the device and wait for the copy."""
        return Loading(tensor=stored.tensor.to(stored.device, copy=True))

    def finish(self, loading: Loading) -> torch.Tensor:
        """Return the device tensor."""
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Do nothing, because these transfers use no pool."""


class BlockPool:
    """Pool of reusable blocks of host memory.

    The total size of all blocks never exceeds the peak number of bytes in use. If the sizes change,
    for example when resolutions alternate, idle blocks of previous sizes are freed.

    Args:
        allocate: Function that allocates a block of the given number of bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._idle: deque[torch.Tensor] = deque()
        self.in_use = 0
        """Bytes in use."""
        self.peak = 0
        """Peak of bytes in use."""

    @property
    def held(self) -> int:
        """Total size in bytes of all blocks, in use or idle."""
        return self.in_use + sum(block.nbytes for block in self._idle)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a block of exactly ``nbytes`` bytes with undefined contents."""
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
        """Return a block to the pool."""
        self.in_use -= block.nbytes
        self._idle.append(block)


class StreamTransfers:
    """Asynchronous copies between a GPU and page-locked host memory, all on a single side stream.

    Because copies in both directions share the side stream, a host block is never overwritten
    before its previous content has been read. Device tensors are always allocated on the
    computation's stream. The computation waits for each copy before it reuses the copied tensor's
    memory, so peak memory does not depend on timing. With ``record_stream``, memory would stay
    occupied while the host runs ahead.

    Args:
        device: A device with streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = accelerator_of(device).streams
        self._side = self._streams.Stream(device)
        self.pool = BlockPool(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        )

    def store(self, tensor: torch.Tensor) -> Stored:
        """Start copying ``tensor`` to a page-locked block on the side stream."""
        block = self.pool.take(tensor.numel() * tensor.element_size())
        host = block.view(tensor.dtype).as_strided(tensor.shape, stored_strides(tensor))
        self._side.wait_stream(self._computation())
        with self._streams.stream(self._side):
            for target, source in _dense_parts(host, tensor.detach()):
                target.copy_(source, non_blocking=True)
        event = self._side.record_event()
        return Stored(tensor=host, device=tensor.device, buffer=block, event=event)

    def settle(self, stored: Stored) -> None:
        """Make the computation wait for the copy to the host."""
        self._computation().wait_event(stored.event)

    def load(self, stored: Stored) -> Loading:
        """Start copying a tensor to newly allocated device memory on the side stream."""
        source = stored.tensor
        target = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device=stored.device
        )
        computation = self._computation()
        # Work that used this memory before may still be queued there.
        self._side.wait_stream(computation)
        with self._streams.stream(self._side):
            target.copy_(source, non_blocking=True)
        return Loading(tensor=target, event=self._side.record_event(), waiting=computation)

    def finish(self, loading: Loading) -> torch.Tensor:
        """Make the computation wait for the copy to the device."""
        # The stream that owns the memory must wait too, even if the tensor is dropped unused.
        loading.waiting.wait_event(loading.event)
        current = self._computation()
        if current != loading.waiting:
            current.wait_event(loading.event)
        return loading.tensor

    def release(self, stored: Stored) -> None:
        """Return the block to the pool; copies that reuse it run later on the side stream."""
        # A copy that still runs may read device memory that is reused. Nobody needs what it copies.
        if stored.buffer is not None:
            self.pool.give(stored.buffer)

    def _computation(self) -> Any:
        return self._streams.current_stream(self._device)


def stored_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gap-free copy of ``tensor``."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


_PART: Final = 2**18
"""Minimum size in bytes of a part of a tensor that is copied separately."""


def _dense_parts(
    target: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of contiguous parts, so that no copy allocates device memory."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
    if dense or source.dim() < 2 or source.nbytes < _PART * len(source):
        yield target, source
        return
    for to, part in zip(target, source, strict=True):
        yield from _dense_parts(to, part)


def transfers_for(device: torch.device) -> Transfers:
    """Return transfers for a device: asynchronous if the GPU passed ``zerotune doctor --prove``."""
    if accelerator_of(device).streams is None:
        return KeptTransfers()
    unproven = why_unproven("activation offload", accelerator=device.type)
    return StreamTransfers(device) if unproven is None else WaitingTransfers(reason=unproven)


# -- Which tensors are offloaded, and when they return.


KEY: Final = "activations"
_FLAG, _HOOK = "gradient_checkpointing", "_gradient_checkpointing_func"


@attrs.define(kw_only=True)
class OffloadCounts:
    """Counts of transfers made by an ``ActivationOffload``."""

    stored: int = 0
    """Number of tensors copied to the host."""
    stored_bytes: int = 0
    """Number of bytes copied to the host."""
    fetched_ahead: int = 0
    """Number of tensors whose prefetch had started when the backward pass needed them."""
    fetched_late: int = 0
    """Number of tensors whose prefetch had not started when the backward pass needed them."""
    kept: int = 0
    """Number of tensors that were still on the device when the backward pass needed them."""


class ActivationOffload(Closable):
    """Offload the activations of a diffusers model's checkpointed blocks to host memory.

    Gradient checkpointing keeps the inputs of all blocks, and the tensors computed between blocks,
    until the backward pass. This class copies these activations, except those of the last block, to
    page-locked host memory while the next block runs. In the backward pass, a block's activations
    are copied back while the next block in the model is recomputed. Results are bitwise identical
    to those without offload. On the CPU, nothing is copied. ::

        with ActivationOffload().attach(unet):
            loss = objective(unet, batch, generator)
            loss.backward()

    ``ActivationOffload`` supports autocast and ZeRO-3. As with autograd, saved tensors must not be
    changed in place before the backward pass.

    Args:
        smallest: Minimum size of offloaded tensors, in bytes or as text such as ``"1MiB"``. Tensors
            that require no gradient, such as conditioning shared by all blocks, always stay on the
            device.
        ahead: Number of blocks to prefetch.
        transfers: Object that copies tensors; by default it depends on the device type.

    Raises:
        InvalidValueError: ``smallest`` is not a valid size, or ``ahead`` is below 1.
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
                "at least one block must be prefetched", "write 1", "ahead", ahead
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
        """Transfers since this object was created."""

    @property
    def attached(self) -> bool:
        """Return whether this object is attached to a model."""
        return bool(self._before)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decision about where activations are stored; empty before the first forward pass."""
        if self._transfers is None:
            return ()
        if isinstance(self._transfers, KeptTransfers):
            why = "this device shares the host's memory, so nothing is copied"
            return (Decision(KEY, "device", "device", why),)
        why, where = "the host stores inputs of checkpointed blocks until the backward pass", "host"
        if isinstance(self._transfers, WaitingTransfers):
            where = "host, with synchronous copies"
            why += f"; {self._transfers.reason}"
        return (Decision(KEY, "device", where, why),)

    def attach(self, model: torch.nn.Module) -> Self:
        """Enable gradient checkpointing with activation offload for ``model``.

        Args:
            model: A diffusers model with ``enable_gradient_checkpointing``; pass an engine's
                ``module``, not the engine.

        Raises:
            InvalidValueError: The model has no gradient checkpointing, or this object is already
                attached to a model.
        """
        if self.attached:
            raise InvalidValueError(
                "is already attached to a model",
                "call detach() first, or create one object per model",
                "ActivationOffload",
                type(model).__name__,
            )
        switch: Any = getattr(model, "enable_gradient_checkpointing", None)
        if switch is None or not getattr(model, "_supports_gradient_checkpointing", False):
            raise InvalidValueError(
                "has no gradient checkpointing",
                "pass a diffusers model that supports enable_gradient_checkpointing()",
                "model",
                type(model).__name__,
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
        """Restore the model's previous checkpointing settings; repeated calls have no effect."""
        for module, values in self._before:
            for name in (_FLAG, _HOOK):
                vars(module).pop(name, None)
            vars(module).update(values)
        for hook in self._hooks:
            hook.remove()
        self._before, self._hooks = [], ()
        self._newest = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)`` with gradient checkpointing, and offload its inputs.

        ``attach`` passes ``checkpoint`` to diffusers. Models from other libraries may call
        ``checkpoint`` for their blocks.

        Args:
            function: Block to run.
            *args: Arguments of the block.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        call = self._begin()
        # Inside the block, the innermost hooks are checkpoint's; these hooks see its inputs only.
        with saved_tensors_hooks(call.pack, self._unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def _enter_model(self, _model: torch.nn.Module, _arguments: Any) -> None:
        # Tensors computed between blocks belong to the block before them.
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
        # An expanded tensor needs less memory than its copy would.
        expanded = any(size > 1 and stride == 0 for size, stride in dimensions)
        return tensor.requires_grad and not weight and not expanded

    def _store(self, call: _Call) -> None:
        for saved in call.saved():
            # Smaller tensors are recorded too: their block still counts for prefetching.
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
        """Alias of ``detach``."""
        self.detach()


class _Saved:
    """A saved tensor on the device or the host; released when no graph needs it any more."""

    def __init__(self, *, tensor: torch.Tensor, call: _Call, transfers: Transfers) -> None:
        # Detached, because its graph references this object.
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.nbytes = tensor.numel() * tensor.element_size()
        self.transfers = transfers
        self.stored: Stored | None = None
        self.loading: Loading | None = None
        self.call = call
        """Newest block with this input; the tensor is offloaded with this block."""

    def stay(self, tensor: torch.Tensor, call: _Call) -> None:
        """Keep the tensor on the device, because a later block has the same input."""
        self.tensor, self.call = tensor.detach(), call

    def check_unchanged(self, tensor: torch.Tensor) -> None:
        """Raise an error if the tensor was changed in place after it was saved."""
        if tensor._version != self.version:
            raise TrainingError(
                "an operation changed the input of a checkpointed block in place, after the block "
                "had run",
                "replace the operation with an out-of-place one, or train without "
                "ActivationOffload",
                "activations",
                tuple(tensor.shape),
            )

    def here(self) -> torch.Tensor | None:
        """Return the original device tensor, or ``None`` if it was freed."""
        if self.tensor is not None:
            self.check_unchanged(self.tensor)
        return self.tensor

    def prefetch(self) -> None:
        """Start copying the tensor to the device, unless a copy exists there or is under way."""
        if self.stored is not None and self.tensor is None and self.loading is None:
            self.loading = self.transfers.load(self.stored)

    def fetch(self) -> torch.Tensor:
        """Return the tensor on the device."""
        self.prefetch()
        if self.loading is None:
            raise TrainingError(
                "an offloaded activation is neither on the device nor on the host",
                "run the backward pass before detach(), or report a bug if you already do",
                "activations",
            )
        loading, self.loading = self.loading, None
        tensor = self.transfers.finish(loading)
        if self.stored is not None and not self.stored.is_copy:
            self.check_unchanged(tensor)
        return tensor

    def __del__(self) -> None:
        # A pending copy would write into memory that has been reused.
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
        """Return the object that the autograd graph stores in place of ``tensor``."""
        saved = self._owner._save(tensor, self)
        if isinstance(saved, torch.Tensor):
            return saved
        self._saved.append(weakref.ref(saved))
        return _Ticket(call=self, saved=saved)

    def saved(self) -> Iterator[_Saved]:
        """Yield the block's inputs that an autograd graph still needs."""
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                yield saved

    @property
    def alive(self) -> bool:
        """Return whether an autograd graph still needs an input of the block."""
        return any(True for _ in self.saved())


class _Ticket:
    """A saved tensor and its block; the autograd graph stores it in place of the tensor."""

    def __init__(self, *, call: _Call, saved: _Saved) -> None:
        self.call, self.saved = call, saved
