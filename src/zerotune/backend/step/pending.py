"""``PendingStep``: a step of the optimizer that has begun and whose pass is still to be taken.

It is cut into parts. One taker works on them: a thread in the order in which the forward pass uses
the weights (``ThreadedStep``), or, where there is none, whoever needs a weight first. A tensor that
is still to be written is awaited: it is empty, and of a class whose every use torch reports, so
that a use waits for the parts that write it and no others. What goes around torch finds it empty
and fails. Which parameters a pass writes is fixed when the engine starts, whatever is frozen later;
a step of which somebody could read old values, through a view made before it, is taken at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast

import attrs
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import Follower, FragmentAddress
from zerotune.backend.step.adams import SlabStep
from zerotune.backend.step.kernel import Average
from zerotune.errors import EngineError
from zerotune.plan.memory.estimate import EXCHANGED_PARTS, LEAST_EXCHANGED

_PARTS_ALONE: Final = 256
"""Parts of a step: each costs the interpreter's lock twice, which may take 5 ms."""


@attrs.frozen(kw_only=True)
class Piece:
    """A run of elements of one slab, of one fragment at most."""

    slab: int
    start: int
    stop: int
    key: str | None = None
    """The fragment's key; ``None``: padding."""
    offset: int = 0
    """First element in the fragment."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@attrs.frozen(kw_only=True)
class Part:
    """What is taken at once."""

    pieces: tuple[Piece, ...]
    names: frozenset[str]
    """Of the parameters it writes, or that are written where every rank takes its part of them."""


@attrs.frozen(kw_only=True)
class Span:
    """Where a parameter lies in the weights of a slab, those of all ranks one after the other."""

    name: str
    slab: int
    start: int
    stop: int


def divide(
    addresses: Sequence[FragmentAddress],
    sizes: Sequence[int],
    *,
    first: Collection[str] = (),
    parts: int | None = None,
    least: int | None = None,
) -> tuple[Part, ...]:
    """Cut slabs into parts of about equal size, none of which ends within a small fragment.

    Args:
        addresses: Of the fragments in the slabs.
        sizes: Elements of each slab; what no fragment covers is padding, which is stepped too.
        first: Parameters that are wanted before all others, and so have parts of their own.
        parts: As many as wanted, about.
        least: Elements of a part.
    """
    size = max(least or LEAST_EXCHANGED, sum(sizes) // (parts or _PARTS_ALONE), 1)
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


def divide_alike(
    addresses: Sequence[FragmentAddress],
    sizes: Sequence[int],
    *,
    spans: Iterable[Span],
    parts: int | None = None,
    least: int | None = None,
) -> tuple[Part, ...]:
    """Cut slabs at the same places on every rank, each part within one slab.

    The arguments are those of ``divide``, with sizes that are the same on every rank, and with the
    spans of all parameters.
    """
    size = max(least or LEAST_EXCHANGED, sum(sizes) // (parts or EXCHANGED_PARTS), 1)
    pieces: dict[tuple[int, int], list[Piece]] = {}
    names: dict[tuple[int, int], set[str]] = {}
    for slab, numel in enumerate(sizes):
        for index in range(-(-numel // size)):
            pieces[slab, index], names[slab, index] = [], set()
    for piece, _ in _pieces_of(addresses, sizes, max(sizes)):
        for index in range(piece.start // size, (piece.stop - 1) // size + 1):
            start = max(piece.start, index * size)
            stop = min(piece.stop, (index + 1) * size)
            offset = piece.offset + start - piece.start
            within = attrs.evolve(piece, start=start, stop=stop, offset=offset)
            pieces[piece.slab, index].append(within)
    for span in spans:
        numel = sizes[span.slab]
        for rank in range(span.start // numel, (span.stop - 1) // numel + 1):
            start = max(span.start - rank * numel, 0)
            stop = min(span.stop - rank * numel, numel)
            for index in range(start // size, (stop - 1) // size + 1):
                names[span.slab, index].add(span.name)
    return tuple(Part(pieces=tuple(pieces[key]), names=frozenset(names[key])) for key in pieces)


@attrs.frozen(kw_only=True, eq=False)
class Exchange:
    """Gives each rank the weights that the others have written, in an order that all share.

    It is used by one thread, beside whatever collectives others are in.
    """

    group: ProcessGroup
    """Of all ranks, on connections of its own."""
    data: Any
    """torch's group of the same ranks, for the weights."""
    partitions: Sequence[Sequence[torch.Tensor]]
    """By slab, then by rank: flat, of the same length."""

    def order(self, wished: Sequence[int]) -> list[int]:
        """The first rank's order of the parts."""
        order: list[int] = self.group.broadcast(list(wished), purpose="begin a step's pass")
        return order

    def agree(self, error: BaseException | None) -> None:
        """Return if no rank has failed, before any weight is sent; ``error`` is this rank's."""
        if not self.group.any(error is not None, purpose="exchange a step's weights"):
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = self.group.gather(text, purpose="say what a step failed with")
        if error is not None:
            raise error
        rank = next(rank for rank, each in enumerate(texts) if each is not None)
        raise EngineError(
            f"the step under way failed on another rank ({texts[rank]})",
            key=f"rank {rank}",
            fix="see that rank's own error; weights are no longer alike, so resume from the last "
            "checkpoint",
        )

    def share(self, pieces: Sequence[Piece]) -> None:
        """Have the same part of every rank."""
        part = slice(pieces[0].start, pieces[-1].stop)
        # As bytes, whatever their dtype.
        shares = [each[part].view(torch.uint8) for each in self.partitions[pieces[0].slab]]
        with self.group.naming("exchanging a step's weights"):
            dist.all_gather(shares, shares[self.group.rank], group=self.data)


@attrs.frozen(kw_only=True, eq=False)
class Upload:
    """Brings weights to where the model has them: here, at once."""

    targets: Sequence[torch.Tensor | None]
    """By slab, flat; ``None``: the step itself has written them there."""
    sources: Sequence[torch.Tensor | None]
    """Where the step has written them instead."""
    exchange: Exchange | None = None
    """Exchange with other ranks that hold the other parts; ``None`` if not needed."""

    def begin(self) -> None:
        """Before the first part is taken: the weights of the step before are used no more."""

    def send(self, pieces: Sequence[Piece]) -> Any:
        """Bring written elements there; what ``receive`` has to be given."""
        for piece in pieces:
            source, target = self.sources[piece.slab], self.targets[piece.slab]
            if source is not None and target is not None:
                part = slice(piece.start, piece.stop)
                # Without page-locking the driver copies the source aside first, and waits.
                target[part].copy_(source[part], non_blocking=source.is_pinned())
        if self.exchange is not None:
            self.exchange.share(pieces)

    def receive(self, sent: Any) -> None:
        """Have what comes after on this thread see them."""


@attrs.frozen(kw_only=True, eq=False)
class StreamUpload(Upload):
    """Brings weights to a device on a stream of its own, beside what is computed there."""

    stream: Any
    """``torch.cuda.Stream`` or another accelerator's."""
    accelerator: Any
    """DeepSpeed's."""

    @override
    def begin(self) -> None:
        # The page-locked buffers of the step before may still be read from.
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
    """A step of all slabs that has begun; its parts run when it is settled or a weight is needed.

    Args:
        parts: All of the slabs, each element once.
        order: Indices of ``parts``, in the order in which they are taken.
        steps: Of the slabs, begun.
        upload: Where written weights go.
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
        self._followers: list[Follower] = []
        self._followed: dict[int, int] = {}
        self._sent: dict[int, Any] = {}
        self._over = False
        self._error: BaseException | None = None
        self._awaited: dict[int, Awaited] = {}
        self._released: set[str] = set()
        """Names of the parameters that are written and can be used."""
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self._writers: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            for name in part.names:
                self._writers.setdefault(name, []).append(index)
        self.used: dict[str, None] = {}
        """Names of the parameters that were waited for one by one, in that order."""
        upload.begin()

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Have every use of a parameter's weights wait until they are written.

        The tensor is empty until then. One without elements is not written.
        """
        if name not in self._writers:
            return
        # As one, for threads that use it meanwhile.
        with self._lock:
            self._addresses.append((tensor, tensor.data_ptr()))
            hold(tensor, name=name, step=self)
            self._awaited[id(tensor)] = cast(Awaited, tensor)

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages follow the weights as they are written.

        Returns:
            Whether they will: no longer once everything is written.
        """
        with self._lock:
            if self._over or self._error is not None:
                return False
            self._followers.extend(followers)
            released = {i for name in self._released for i in self._writers[name]}
        # From here on anybody may change what is released.
        self._bring(released)
        return True

    def moved(self) -> bool:
        """Whether a tensor that was held has other memory than the step writes."""
        return any(
            id(tensor) not in self._awaited and tensor.data_ptr() != address
            for tensor, address in self._addresses
        )

    def run(self) -> None:
        """Run all parts in order; keep an error for the thread that waits."""
        for index in self._order:
            self._take(index)
        self._end()

    def run_in_thread(self) -> None:
        """As ``run``, in a thread: errors are kept instead of raised."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Have everybody who waits raise an error, now and later."""
        if not isinstance(error, Exception):
            # Raised once where it happened: a later use must not look as if Ctrl-C were pressed.
            interrupted = EngineError(
                f"{type(error).__name__} came in the middle of the optimizer's step, so that some "
                "weights have it behind them and others have not",
                key="step",
                fix="resume from the last checkpoint",
            )
            interrupted.__cause__ = error
            error = interrupted
        with self._lock:
            self._error = self._error or error
            self._wake()

    def settle(self) -> None:
        """Return once everything is written and nothing awaited any more."""
        self._complete()
        self._raise()
        for tensor in list(self._awaited.values()):
            self._release(tensor)

    def land(self, tensor: Any) -> None:
        """Return once a tensor is written."""
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
        """What this step holds a tensor for; another thread may be a step behind."""
        held: Held | None = vars(tensor).get("_awaited")
        return held if held is not None and held.step is self else None

    def _complete(self) -> None:
        """Return once everything is written, or something has failed."""
        self.run()

    def _bring(self, indices: Iterable[int]) -> None:
        """Return once these parts are written, or something has failed."""
        for index in indices:
            self._take(index)

    def _take(self, index: int) -> None:
        """Write a part, or give averages that came after that what they missed."""
        with self._turn:
            with self._lock:
                followers = tuple(self._followers)
            seen = self._followed.get(index)
            if seen == len(followers) or self._failed:
                return
            if self._taking:
                raise EngineError(
                    "a signal handler used the weights in the middle of the optimizer's step",
                    key="step",
                    fix="let the handler set a flag, and save or read where the loop sees it",
                )
            self._taking = True
            try:
                if seen is None:
                    sent = self._write(self._parts[index].pieces, followers)
                else:
                    sent = self._sent[index]
                    self._catch_up(index, followers[seen:])
                with self._lock:
                    self._sent[index] = sent
                    self._followed[index] = len(followers)
                    self._wake()
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._taking = False

    def _write(self, pieces: Sequence[Piece], followers: Sequence[Follower]) -> Any:
        self._update(pieces, followers)
        with torch.no_grad():
            return self._upload.send(pieces)

    @torch.no_grad()
    def _update(self, pieces: Sequence[Piece], followers: Sequence[Follower]) -> None:
        for piece in pieces:
            self._steps[piece.slab].run(piece.start, piece.stop, _averages(piece, followers))

    def _end(self) -> None:
        """Give averages that came late what they missed; then none can join any more."""
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
    def _catch_up(self, index: int, followers: Sequence[Follower]) -> None:
        for piece in self._parts[index].pieces:
            weight = self._steps[piece.slab].masters.read(slice(piece.start, piece.stop))
            for average in _averages(piece, followers):
                average.shadow.lerp_(weight, average.weight)

    def _followed_by_all(self, index: int) -> bool:
        """Whether a part is written, and every average has it."""
        return self._followed.get(index) == len(self._followers)

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
    """A step that one thread takes, which no signal interrupts; everybody else waits for it."""

    _wanted: tuple[int, ...] = ()
    """Parts that somebody waits for, which the thread takes before all others."""

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
        # Whoever has waited may change what is written, which averages must have read by then.
        self._wait_for(lambda: self._failed or all(map(self._followed_by_all, needed)))


class SharedStep(ThreadedStep):
    """A step of which every rank takes its part and has those of the others, part by part.

    Its parts are cut alike on every rank, the first rank's order holds, and its upload exchanges.
    """

    @override
    def run(self) -> None:
        """Take all parts together with the other ranks, in one thread. An error is kept."""
        try:
            order = self._exchange.order(self._order)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self.fail(error)
            return
        for index in order:
            for wanted in self._wanted:
                if wanted in self._followed:
                    self._take(wanted)
            self._take(index)
            if self._failed:
                break
        self._end()

    @property
    def _exchange(self) -> Exchange:
        return cast(Exchange, self._upload.exchange)

    @override
    def _write(self, pieces: Sequence[Piece], followers: Sequence[Follower]) -> Any:
        failed: BaseException | None = None
        try:
            self._update(pieces, followers)
        except BaseException as error:  # noqa: BLE001 - the others are told first
            failed = error
        self._exchange.agree(failed)
        with torch.no_grad():
            return self._upload.send(pieces)


def _averages(piece: Piece, followers: Iterable[Follower]) -> list[Average]:
    if piece.key is None:
        return []
    part = slice(piece.offset, piece.offset + piece.numel)
    return [Average(shadow=each.tensors[piece.key][part], weight=each.weight) for each in followers]


# -- Tensors whose every use waits.


class Lands(Protocol):
    """What writes awaited tensors."""

    def land(self, tensor: Any) -> None:
        """Return once a tensor is written; not awaited any more."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Held:
    """What an awaited tensor will be."""

    step: Lands
    name: str
    kind: type
    content: torch.Tensor
    edge: Any
    """Where its gradient goes: made while it is empty, that would expect an empty gradient."""


class Awaited:
    """Mixed into the class of a tensor that is still to be written."""

    _awaited: Held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for what is used; nothing of it is needed for its shape or gradient."""
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
    """Empty a tensor, and have every use of it wait.

    Args:
        tensor: Has its memory again once it is released.
        name: Of the parameter whose weights it holds.
        step: Writes it.
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
    """Make it the tensor that it was."""
    held = tensor._awaited
    # In this order, since other threads may use it meanwhile.
    tensor.data = held.content
    tensor.__class__ = held.kind
    del tensor._awaited


def land(tensor: Any) -> None:
    """Wait until a tensor is written, if it is awaited."""
    held: Held | None
    # Another step may have begun by the time that the lock of this one is free.
    while (held := vars(tensor).get("_awaited")) is not None:
        held.step.land(tensor)


@cache
def awaited(kind: type) -> type:
    """The class of awaited tensors that are ``kind`` otherwise."""
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
