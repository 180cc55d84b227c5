"""``PendingStep``: an optimizer step that has begun, but whose weights are not all updated yet.

A step is divided into parts. A thread runs the parts in the order in which the forward pass uses
the weights (``ThreadedStep``); without a thread, the first use of a weight runs its parts. Until a
tensor is updated, it is empty and has a class that intercepts every use through torch, so that a
use waits for exactly the parts that write the tensor. Code that bypasses torch finds the tensor
empty and fails. The set of parameters that steps update is fixed when the engine starts, even if
some are frozen later. If a view could still read old values, the step is completed before ``step``
returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast

import attrs
import torch
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from zerotune.backend.master_weights import EMAUpdate, FragmentAddress
from zerotune.backend.step.adams import SlabStep
from zerotune.backend.step.kernel import EMAPart, ema_parts
from zerotune.errors import EngineError

_LEAST: Final = 2**18
"""Smallest number of elements of a part of a step."""
_PARTS: Final = 256
"""Largest number of parts of a step: each part acquires the GIL twice, which may take 5 ms."""


@attrs.frozen(kw_only=True)
class Piece:
    """Consecutive elements of one slab (flat tensor): part of one fragment, or padding."""

    slab: int
    start: int
    stop: int
    key: str | None = None
    """Key of the fragment; ``None`` for padding."""
    offset: int = 0
    """Offset of the first element in the fragment."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@attrs.frozen(kw_only=True)
class Part:
    """Unit of work of a step: pieces of slabs that are updated together."""

    pieces: tuple[Piece, ...]
    names: frozenset[str]
    """Names of the parameters that this part updates."""


def divide(
    addresses: Sequence[FragmentAddress],
    sizes: Sequence[int],
    *,
    first: Collection[str] = (),
    parts: int | None = None,
    least: int | None = None,
) -> tuple[Part, ...]:
    """Divide slabs into parts of about equal size without splitting small fragments.

    Args:
        addresses: Addresses of the fragments in the slabs.
        sizes: Number of elements of each slab; padding outside fragments is updated as well.
        first: Names of parameters that are used first and get separate parts.
        parts: Approximate number of parts.
        least: Minimum number of elements per part.
    """
    size = max(least or _LEAST, sum(sizes) // (parts or _PARTS), 1)
    every = list(_pieces_of(addresses, sizes, size))
    cut: list[Part] = []
    for early in (True, False):
        pieces: list[Piece] = []
        names: set[str] = set()
        wanted = [(piece, name) for piece, name in every if (name in first) is early]
        for index, (piece, name) in enumerate(wanted):
            pieces.append(piece)
            names.update(() if name is None else (name,))
            if sum(each.numel for each in pieces) >= size or index + 1 == len(wanted):
                cut.append(Part(pieces=tuple(pieces), names=frozenset(names)))
                pieces.clear()
                names.clear()
    return tuple(cut)


def _pieces_of(
    addresses: Sequence[FragmentAddress], sizes: Sequence[int], size: int
) -> Iterator[tuple[Piece, str | None]]:
    for slab, numel in enumerate(sizes):
        at = 0
        for address in sorted(
            (a for a in addresses if a.slab == slab), key=lambda each: each.offset
        ):
            if address.offset > at:
                yield Piece(slab=slab, start=at, stop=address.offset), None
            at = address.offset + address.numel
            for offset in range(0, address.numel, size):
                start = address.offset + offset
                stop = min(start + size, at)
                piece = Piece(slab=slab, start=start, stop=stop, key=address.key, offset=offset)
                yield piece, address.name
        if at < numel:
            yield Piece(slab=slab, start=at, stop=numel), None


@attrs.frozen(kw_only=True, eq=False)
class Upload:
    """Copies updated weights to the model's tensors, synchronously."""

    targets: Sequence[torch.Tensor | None]
    """The model's flat weights, by slab; ``None`` if the step writes them directly."""
    sources: Sequence[torch.Tensor | None]
    """Flat buffers that the step writes, by slab; ``None`` if the step writes the targets."""

    def begin(self) -> None:
        """Prepare for a step, after the model's last use of the previous weights."""

    def send(self, pieces: Sequence[Piece]) -> Any:
        """Start copying updated elements to the model.

        Args:
            pieces: The elements.

        Returns:
            An object for ``receive``.
        """
        for piece in pieces:
            source, target = self.sources[piece.slab], self.targets[piece.slab]
            if source is not None and target is not None:
                part = slice(piece.start, piece.stop)
                # If the source is not page-locked, the driver first copies it to a staging buffer,
                # and waits.
                target[part].copy_(source[part], non_blocking=source.is_pinned())

    def receive(self, sent: Any) -> None:
        """Make the copied weights visible to later work of this thread.

        Args:
            sent: Result of ``send``.
        """


@attrs.frozen(kw_only=True, eq=False)
class StreamUpload(Upload):
    """Copies updated weights to a device on a separate stream, concurrently with computation."""

    stream: Any
    """Stream of the device for copies."""
    accelerator: Any
    """Module or object with the device's streams and events."""

    @override
    def begin(self) -> None:
        # Copies may still be reading the previous step's page-locked buffers.
        self.stream.synchronize()
        self.stream.wait_stream(self.accelerator.current_stream())

    @override
    def send(self, pieces: Sequence[Piece]) -> Any:
        with self.accelerator.stream(self.stream):
            Upload.send(self, pieces)
            sent = self.accelerator.Event()
            sent.record(self.stream)
        return sent

    @override
    def receive(self, sent: Any) -> None:
        self.accelerator.current_stream().wait_event(sent)


class PendingStep:
    """An optimizer step that has begun; its parts run on ``settle`` or when a weight is used.

    Args:
        parts: Parts that cover every element of the slabs exactly once.
        order: Indices of ``parts``, in the order in which they run.
        steps: Step of each slab; every step has already begun.
        upload: Copies updated weights to the model.
    """

    def __init__(
        self,
        *,
        parts: Sequence[Part],
        order: Sequence[int],
        steps: Sequence[SlabStep],
        upload: Upload,
    ) -> None:
        self._parts, self._steps, self._upload = parts, steps, upload
        self._order = tuple(order)
        # Not a Condition: Ctrl-C within its Python code may leave it locked for ever.
        self._lock = threading.RLock()
        self._waiting: list[SimpleQueue[None]] = []
        self._turn = threading.RLock()
        self._taking = False
        self._updates: list[EMAUpdate] = []
        self._followed: dict[int, int] = {}
        self._sent: dict[int, Any] = {}
        self._over = False
        self._error: BaseException | None = None
        self._awaited: dict[int, Awaited] = {}
        self._released: set[str] = set()
        """Names of parameters that are updated and can be used."""
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self._writers: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            for name in part.names:
                self._writers.setdefault(name, []).append(index)
        self.used: dict[str, None] = {}
        """Names of parameters whose use had to wait, in order of use."""
        upload.begin()

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Make every use of a parameter wait until its weights are updated.

        Until then, the tensor is empty. A parameter that no part updates is left
        unchanged.

        Args:
            name: Name of the parameter.
            tensor: The parameter's weights.
        """
        if name not in self._writers:
            return
        # Take the lock, since other threads may use the tensor meanwhile.
        with self._lock:
            self._addresses.append((tensor, tensor.data_ptr()))
            hold(tensor, name=name, step=self)
            self._awaited[id(tensor)] = cast(Awaited, tensor)

    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:
        """Update EMAs together with the weights.

        Args:
            updates: The updates.

        Returns:
            Whether the step will update the EMAs; ``False`` once its last part has run.
        """
        with self._lock:
            if self._over or self._error is not None:
                return False
            self._updates.extend(updates)
            released = {i for name in self._released for i in self._writers[name]}
        # Apply released weights to the EMAs now, since other code may change these weights later.
        self._bring(released)
        return True

    def moved(self) -> bool:
        """Whether other code has replaced the memory of any tensor since its update."""
        return any(
            id(tensor) not in self._awaited and tensor.data_ptr() != address
            for tensor, address in self._addresses
        )

    def run(self) -> None:
        """Run all parts in order, and store any error for the waiting thread."""
        for index in self._order:
            self._take(index)
        self._end()

    def run_in_thread(self) -> None:
        """Thread target: call ``run``, and store any error instead of raising it."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Make all current and later waits raise an error.

        Args:
            error: The error; one that is not an ``Exception`` is wrapped in an ``EngineError``.
        """
        if not isinstance(error, Exception):
            # The interrupt is raised only where it happened: a later use must not look as if Ctrl-C
            # were pressed.
            interrupted = EngineError(
                f"{type(error).__name__} interrupted the optimizer step, so only some weights are "
                "updated",
                key="step",
                fix="resume from the last checkpoint",
            )
            interrupted.__cause__ = error
            error = interrupted
        with self._lock:
            self._error = self._error or error
            self._wake()

    def settle(self) -> None:
        """Wait until all weights are updated, and make all tensors usable."""
        self._complete()
        self._raise()
        for tensor in list(self._awaited.values()):
            self._release(tensor)

    def land(self, tensor: Any) -> None:
        """Wait until a tensor's weights are updated, and make the tensor usable.

        Args:
            tensor: A tensor that was passed to ``hold``.
        """
        held = self._held(tensor)
        if held is not None:
            self._bring(self._writers[held.name])
            self._raise()
            self.used.setdefault(held.name)
            self._release(tensor)

    def _release(self, tensor: Any) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            held = self._held(tensor)
            if held is None:
                return
            for index in self._writers[held.name]:
                self._upload.receive(self._sent[index])
            release(tensor)
            del self._awaited[id(tensor)]
            self._released.add(held.name)

    def _held(self, tensor: Any) -> Held | None:
        """The tensor's record for this step; ``None`` if a different step holds the tensor."""
        held: Held | None = vars(tensor).get("_awaited")
        return held if held is not None and held.step is self else None

    def _complete(self) -> None:
        """Wait until all weights are updated or the step has failed."""
        self.run()

    def _bring(self, indices: Iterable[int]) -> None:
        """Wait until these parts are done or the step has failed."""
        for index in indices:
            self._take(index)

    def _take(self, index: int) -> None:
        """Run a part, or apply a finished part to EMAs that were added later."""
        with self._turn:
            with self._lock:
                updates = tuple(self._updates)
            seen = self._followed.get(index)
            if seen == len(updates) or self._failed:
                return
            if self._taking:
                raise EngineError(
                    "a signal handler used the weights during the optimizer step",
                    key="step",
                    fix="only set a flag in the handler, and use the weights where the training "
                    "loop checks the flag",
                )
            self._taking = True
            try:
                if seen is None:
                    sent = self._write(self._parts[index].pieces, updates)
                else:
                    sent = self._sent[index]
                    self._catch_up(index, updates[seen:])
                with self._lock:
                    self._sent[index] = sent
                    self._followed[index] = len(updates)
                    self._wake()
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._taking = False

    def _write(self, pieces: Sequence[Piece], updates: Sequence[EMAUpdate]) -> Any:
        self._update(pieces, updates)
        with torch.no_grad():
            return self._upload.send(pieces)

    @torch.no_grad()
    def _update(self, pieces: Sequence[Piece], updates: Sequence[EMAUpdate]) -> None:
        for piece in pieces:
            for start, stop, emas in _ema_parts(piece, updates):
                self._steps[piece.slab].run(start, stop, emas)

    def _end(self) -> None:
        """Apply finished parts to EMAs that were added later; then accept no more EMAs."""
        with self._turn:
            while True:
                with self._lock:
                    late = [index for index in self._followed if not self._followed_by_all(index)]
                    if self._failed or not late:
                        self._over = True
                        self._wake()
                        return
                for index in late:
                    self._take(index)

    @torch.no_grad()
    def _catch_up(self, index: int, updates: Sequence[EMAUpdate]) -> None:
        for piece in self._parts[index].pieces:
            for start, stop, emas in _ema_parts(piece, updates):
                weight = self._steps[piece.slab].masters.read(slice(start, stop))
                for ema in emas:
                    ema.tensor.lerp_(weight, ema.weight)

    def _followed_by_all(self, index: int) -> bool:
        """Whether a part is done, including all EMAs."""
        return self._followed.get(index) == len(self._updates)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.put(None)

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        while True:
            ticket: SimpleQueue[None] = SimpleQueue()
            with self._lock:
                if holds():
                    return
                self._waiting.append(ticket)
            ticket.get()

    @property
    def _failed(self) -> bool:
        return self._error is not None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class ThreadedStep(PendingStep):
    """A step that one thread runs, uninterrupted by signals; other threads only wait for it."""

    _wanted: tuple[int, ...] = ()
    """Parts that a thread waits for, which run before all others."""

    @override
    def run(self) -> None:
        for index in self._order:
            for wanted in self._wanted:
                self._take(wanted)
            self._take(index)
        self._end()

    @override
    def _complete(self) -> None:
        self._wait_for(lambda: self._over or self._failed)

    @override
    def _bring(self, indices: Iterable[int]) -> None:
        needed = tuple(indices)
        self._wanted = needed
        # Code that waited may overwrite the weights, so EMAs must have read them before.
        self._wait_for(lambda: self._failed or all(map(self._followed_by_all, needed)))


def _ema_parts(
    piece: Piece, updates: Sequence[EMAUpdate]
) -> Iterator[tuple[int, int, list[EMAPart]]]:
    """Yield ranges of a piece in its slab, with the EMAs to update in each range."""
    if piece.key is None:
        yield piece.start, piece.stop, []
        return
    before, stop = piece.start - piece.offset, piece.offset + piece.numel
    for first, last, emas in ema_parts(updates, piece.key, piece.offset, stop):
        yield before + first, before + last, emas


# -- Tensors whose uses wait.


class Lands(Protocol):
    """An object that updates held tensors, such as a ``PendingStep``."""

    def land(self, tensor: Any) -> None:
        """Wait until a tensor is updated, and make the tensor usable.

        Args:
            tensor: A tensor that was passed to ``hold``.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Held:
    """Class, content and gradient edge of a held tensor, to be restored on release."""

    step: Lands
    name: str
    kind: type
    content: torch.Tensor
    edge: Any
    """Gradient edge; created before the tensor is emptied, because it records the shape."""


class Awaited:
    """Mixin for the class of a tensor whose uses must wait for its update."""

    _awaited: Held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for the tensors that are used, unless only shape, dtype or gradient are read."""
        if func in BESIDE_THE_CONTENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in OF_THE_SHAPE and (held := vars(args[0]).get("_awaited")) is not None:
            return func(held.content, *args[1:], **(kwargs or {}))
        for tensor in _awaited_among((args, kwargs)):
            land(tensor)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        land(self)
        return cast(Any, self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        land(self)
        return cast(Any, self).__reduce_ex__(protocol)


def hold(tensor: Any, *, name: str, step: Lands) -> None:
    """Empty a tensor, and make every use of the tensor wait until it is released.

    Args:
        tensor: The tensor; ``release`` restores its memory.
        name: Name of the parameter that the tensor belongs to.
        step: The step that updates the tensor.
    """
    kind: Any = type(tensor)
    tensor._awaited = Held(
        step=step,
        name=name,
        kind=kind,
        content=tensor.data,
        edge=get_gradient_edge(tensor) if tensor.requires_grad else None,
    )
    tensor.data = tensor.data.new_empty(0)
    tensor.__class__ = awaited(kind)


def release(tensor: Any) -> None:
    """Restore a held tensor's memory and class."""
    held = tensor._awaited
    # In this order, since other threads may use it meanwhile.
    tensor.data = held.content
    tensor.__class__ = held.kind
    del tensor._awaited


def land(tensor: Any) -> None:
    """Wait until a tensor is updated; return at once if the tensor is not held."""
    held: Held | None
    # A different step may have begun by the time this step's lock is free.
    while (held := vars(tensor).get("_awaited")) is not None:
        held.step.land(tensor)


@cache
def awaited(kind: type) -> type:
    """Return the subclass of the tensor class ``kind`` that is used for held tensors."""
    return type(f"Awaited{kind.__name__}", (Awaited, kind), {})


def _awaited_among(value: Any) -> Iterator[Any]:
    if isinstance(value, Awaited):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _awaited_among(each)
    elif isinstance(value, Mapping):
        yield from _awaited_among(list(value.values()))


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_GRADIENT: Final[Any] = torch.Tensor.grad
OF_THE_SHAPE: Final = frozenset(
    (
        *_getters("shape", "ndim", "itemsize", "nbytes"),
        torch.Tensor.size,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.stride,
        torch.Tensor.is_contiguous,
        torch.Tensor.__len__,
    )
)
BESIDE_THE_CONTENT: Final = frozenset(
    (
        *_getters("grad", "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout"),
        *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse"),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.element_size,
        torch.Tensor.__hash__,
    )
)
