"""``PendingStep``: a step of the optimizer that has begun and is taken while others go on.

It is cut into parts, and any thread may take any of them: a thread of its own in the order in which
the forward pass uses the weights, or whoever cannot wait. A tensor that is still to be written is
awaited: it is empty, and of a class whose every use torch reports, so that a use waits for the
parts that write it and no others. What goes around torch finds it empty and fails; nobody reads an
old value.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final, cast

import attrs
import torch
import torch.distributed as dist
from typing_extensions import override

from zerotune.backend.deepspeed.host_adam import SlabStep
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import Follower, FragmentAddress, MasterLayout
from zerotune.backend.ops.host_step import Average, HostStepOp, load_host_step
from zerotune.backend.proof import FastPath, why_disproven, why_unproven
from zerotune.decisions import Decision
from zerotune.errors import EngineError, PlatformError
from zerotune.plan.api import ResolvedPlan
from zerotune.plan.memory.estimate import EXCHANGED_PARTS, LEAST_EXCHANGED
from zerotune.platform import MachineProbe
from zerotune.platform.cgroups import cpu_quota
from zerotune.platform.cores import affinity_here, describe_cpus, read_cpus

KEY: Final = "optimizer.step"
HIDDEN_KEY: Final = "optimizer.step.hidden"
THREADS_KEY: Final = "optimizer.step.threads"

_ROUNDS_OTHERWISE: Final = "this build of torch rounds otherwise than the op host_step"
_PARTS: Final = 256
"""Parts of a step: each costs the interpreter's lock twice, which may take 5 ms."""
_SHARED_PARTS: Final = EXCHANGED_PARTS
_LEAST: Final = LEAST_EXCHANGED
"""Elements of a part, at least."""


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
    size = max(least or _LEAST, sum(sizes) // (parts or _PARTS), 1)
    found: dict[bool, list[Part]] = {True: [], False: []}
    open_: dict[bool, list[tuple[Piece, str | None]]] = {True: [], False: []}

    def close(early: bool) -> None:
        if open_[early]:
            pieces = tuple(piece for piece, _ in open_[early])
            names = frozenset(name for _, name in open_[early] if name is not None)
            found[early].append(Part(pieces=pieces, names=names))
            open_[early].clear()

    for piece, name in _pieces(addresses, sizes, size):
        early = name in first
        open_[early].append((piece, name))
        if sum(each.numel for each, _ in open_[early]) >= size:
            close(early)
    for early in (True, False):
        close(early)
    return (*found[True], *found[False])


def _pieces(
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

    Args:
        addresses: As for ``divide``, of this rank.
        sizes: As for ``divide``; the same on every rank.
        spans: Of all parameters.
        parts: As for ``divide``.
        least: As for ``divide``.
    """
    size = max(least or _LEAST, sum(sizes) // (parts or _SHARED_PARTS), 1)
    pieces: dict[tuple[int, int], list[Piece]] = {}
    names: dict[tuple[int, int], set[str]] = {}
    for slab, numel in enumerate(sizes):
        for index in range(-(-numel // size)):
            pieces[slab, index], names[slab, index] = [], set()
    for piece, _ in _pieces(addresses, sizes, max(sizes)):
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

    def order(self, own: Sequence[int]) -> list[int]:
        """The first rank's order of the parts."""
        found: list[int] = self.group.broadcast(list(own), purpose="begin a step's pass")
        return found

    def agree(self, error: BaseException | None) -> None:
        """Return if no rank has failed, before any weight is given away.

        Args:
            error: What this rank has failed with.

        Raises:
            EngineError: Another rank has failed; names it, and with what.
            BaseException: ``error`` itself.
        """
        if not self.group.any(error is not None, purpose="exchange a step's weights"):
            return
        said = None if error is None else f"{type(error).__name__}: {error}"
        told = self.group.gather(said, purpose="say what a step failed with")
        if error is not None:
            raise error
        rank = next(rank for rank, each in enumerate(told) if each is not None)
        raise EngineError(
            f"the step under way failed on another rank ({told[rank]})",
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
    """With the other ranks, where each has only a part; ``None``: nobody needs it."""

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
    """A step of every slab, begun; taken part by part, by whoever calls.

    Args:
        parts: All of the slabs, each element once.
        order: Indices of ``parts``, in the order in which ``run`` takes them.
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
        self._changed = threading.Condition(threading.RLock())
        self._ending = threading.Lock()
        self._open = dict.fromkeys(order)
        self._followers: list[Follower] = []
        self._followed: dict[int, int] = {}
        self._sent: dict[int, Any] = {}
        self._over = False
        self._error: BaseException | None = None
        self._awaited: dict[int, Awaited] = {}
        self._writers: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            for name in part.names:
                self._writers.setdefault(name, []).append(index)
        self.used: dict[str, None] = {}
        """Names of the parameters that were waited for one by one, in that order."""
        upload.begin()

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Have every use of a tensor wait until it is written.

        Args:
            name: Of the parameter whose weights it holds.
            tensor: Empty from now on; it has its memory again when it is written.
        """
        kind = type(tensor)
        tensor._awaited = _Held(  # type: ignore[attr-defined]
            step=self, name=name, kind=kind, content=tensor.data
        )
        tensor.data = tensor.data.new_empty(0)
        tensor.__class__ = awaited(kind)
        self._awaited[id(tensor)] = cast(Awaited, tensor)

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages follow the weights as they are written.

        Returns:
            Whether they will: no longer once everything is written.
        """
        with self._changed:
            if self._over or self._error is not None:
                return False
            self._followers.extend(followers)
            return True

    def run(self) -> None:
        """Take what nobody has taken. An error is kept for whoever waits."""
        while (index := self._claim(None)) is not None:
            self._take(index)
        self._end()

    def settle(self) -> None:
        """Return once everything is written and nothing awaited any more.

        Raises:
            BaseException: What a part failed with, in whatever thread.
        """
        self._complete()
        self._raise()
        for tensor in list(self._awaited.values()):
            self._release(tensor)

    def land(self, tensor: Any) -> None:
        """Return once a tensor is written.

        Raises:
            BaseException: As ``settle``.
        """
        held: _Held | None = vars(tensor).get("_awaited")
        if held is not None:
            self._wait(self._writers[held.name])
            self.used.setdefault(held.name)
            self._release(tensor)

    def _release(self, tensor: Any) -> None:
        with self._changed, torch._C.DisableTorchFunctionSubclass():
            held: _Held | None = vars(tensor).get("_awaited")
            if held is None:
                return
            for index in self._writers[held.name]:
                self._upload.receive(self._sent[index])
            # In this order, since other threads may use it meanwhile.
            tensor.data = held.content
            tensor.__class__ = held.kind
            del tensor._awaited, self._awaited[id(tensor)]

    def _claim(self, wanted: int | None) -> int | None:
        with self._changed:
            index = next(iter(self._open), None) if wanted is None else wanted
            if index is None or index not in self._open or self._error is not None:
                return None
            del self._open[index]
            return index

    def _complete(self) -> None:
        """Return once everything is written, or something has failed."""
        self.run()

    def _take(self, index: int) -> None:
        with self._changed:
            followers = tuple(self._followers)
        try:
            sent = self._write(self._parts[index].pieces, followers)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self._fail(error)
            return
        with self._changed:
            self._followed[index] = len(followers)
            self._sent[index] = sent
            self._changed.notify_all()

    def _write(self, pieces: Sequence[Piece], followers: Sequence[Follower]) -> Any:
        self._update(pieces, followers)
        with torch.no_grad():
            return self._upload.send(pieces)

    @torch.no_grad()
    def _update(self, pieces: Sequence[Piece], followers: Sequence[Follower]) -> None:
        for piece in pieces:
            self._steps[piece.slab].run(piece.start, piece.stop, _averages(piece, followers))

    def _wait(self, indices: Iterable[int]) -> None:
        for index in indices:
            # Whoever needs a part that nobody has begun takes it itself.
            if self._claim(index) is not None:
                self._take(index)
            with self._changed:
                while index not in self._followed and not self._failed:
                    self._changed.wait()
            self._raise()

    def _end(self) -> None:
        """Give followers that came late what they have missed; then none can come any more."""
        with self._ending:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: len(self._followed) == len(self._parts) or self._failed
                    )
                    count = len(self._followers)
                    late = [(i, seen) for i, seen in self._followed.items() if seen < count]
                    if self._failed or not late:
                        self._over = True
                        return
                try:
                    self._catch_up(late, count)
                except BaseException as error:  # noqa: BLE001 - as above
                    self._fail(error)

    @torch.no_grad()
    def _catch_up(self, late: Sequence[tuple[int, int]], count: int) -> None:
        for index, seen in late:
            for piece in self._parts[index].pieces:
                weight = self._steps[piece.slab].weight[piece.start : piece.stop]
                for average in _averages(piece, self._followers[seen:count]):
                    average.shadow.lerp_(weight, average.weight)
            self._followed[index] = count

    @property
    def _failed(self) -> bool:
        return self._error is not None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class SharedStep(PendingStep):
    """A step of which every rank takes its part and has those of the others, part by part.

    Args:
        parts: As for ``PendingStep``, cut alike on every rank.
        order: As for ``PendingStep``; the first rank's holds.
        steps: As for ``PendingStep``.
        upload: As for ``PendingStep``.
        exchange: With the other ranks.
    """

    def __init__(
        self,
        *,
        parts: Sequence[Part],
        order: Sequence[int],
        steps: Sequence[SlabStep],
        upload: Upload,
        exchange: Exchange,
    ) -> None:
        super().__init__(parts=parts, order=order, steps=steps, upload=upload)
        self._exchange = exchange

    @override
    def run(self) -> None:
        """Take all parts together with the other ranks, in one thread. An error is kept."""
        try:
            order = self._exchange.order(list(self._open))
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self._fail(error)
            return
        for index in order:
            self._take(index)
            if self._failed:
                break
        self._end()

    @override
    def _complete(self) -> None:
        self._end()

    @override
    def _claim(self, wanted: int | None) -> int | None:
        """Nobody: out of turn, no other rank would have it."""
        return None

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


@attrs.frozen(kw_only=True, eq=False)
class _Held:
    """What an awaited tensor will be."""

    step: PendingStep
    name: str
    kind: type
    content: torch.Tensor


class Awaited:
    """Mixed into the class of a tensor that is still to be written."""

    _awaited: _Held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for what is used; nothing of it is needed for its shape or gradient."""
        if func in _BESIDE_THE_CONTENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _OF_THE_SHAPE and (held := vars(args[0]).get("_awaited")) is not None:
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


def land(tensor: Any) -> None:
    """Wait until a tensor is written, if it is awaited.

    Raises:
        BaseException: What the step failed with.
    """
    held: _Held | None = vars(tensor).get("_awaited")
    if held is not None:
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
_OF_THE_SHAPE: Final = frozenset(
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
_BESIDE_THE_CONTENT: Final = frozenset(
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


# -- An optimizer whose steps may be under way.


class DeferredSteps(ABC):
    """Steps of an Adam in host memory that may return before their pass is taken.

    A thread of its own takes it behind the next forward, averages join it, or whoever uses a
    weight first takes what it needs.

    Args:
        op: The compiled functions.
        module: The model.
        layout: Where the optimizer has its weights.
        group: The processes that train together.
    """

    def __init__(
        self,
        *,
        op: HostStepOp,
        module: torch.nn.Module,
        layout: MasterLayout,
        group: ProcessGroup,
    ) -> None:
        self._op = op
        self._module = module
        self._layout = layout
        self._group = group
        self._parts: tuple[Part, ...] = ()
        self._order: list[int] = []
        self._pending: PendingStep | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._at_once: str | None = None
        self._averaged = False
        self._stream: Any = None
        self._compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @property
    @abstractmethod
    def _stepped_by(self) -> torch.optim.Optimizer:
        """The optimizer whose steps these are."""

    @property
    @abstractmethod
    def _accelerator(self) -> Any:
        """What has the device's streams and events."""

    def why_at_once(self) -> str | None:
        """Why a step must not return before its pass is taken, if so."""
        return None

    @property
    def op(self) -> HostStepOp:
        """The compiled functions."""
        return self._op

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    def hidden(self) -> bool:
        """Whether passes are taken behind what comes after their steps."""
        return self._thread is not None

    @property
    def needs_a_thread(self) -> bool:
        """Whether a pass that is taken later can only be taken by a thread of its own."""
        return False

    def take_at_once(self, reason: str) -> None:
        """Take every pass before its step returns."""
        self._at_once = reason

    def hide(self) -> None:
        """Take every pass in a thread of its own, behind what comes after its step."""
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="zerotune-step",
            initializer=self._enter_thread,
            initargs=(self._accelerator, self._accelerator.current_device()),
        )

    def _enter_thread(self, accelerator: Any, device: Any) -> None:
        # A thread begins on the first device, and going back to it from a stream of another takes
        # hundreds of megabytes there, from every rank.
        accelerator.set_device(device)
        self._op.spare_a_core()

    def settle(self) -> None:
        """Return once the pass under way is taken, if there is one.

        Raises:
            BaseException: What it failed with; again at every call.
        """
        pending = self._pending
        if pending is None:
            return
        pending.settle()
        if pending.used:
            ranks = {name: rank for rank, name in enumerate(pending.used)}
            last = len(ranks)
            # What the last forward used first is written first.
            self._order.sort(
                key=lambda index: min(
                    (ranks.get(name, last) for name in self._parts[index].names), default=last
                )
            )
        if self._pending is pending:
            self._pending = None

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages move with the pass under way; whether there is one they can move with."""
        self._averaged, pending = True, self._pending
        if pending is None or not pending.follow(followers):
            return False
        if self._thread is None:
            # It has waited for them, and nobody else takes it.
            self.settle()
        return True

    def close(self) -> None:
        """Settle, and let the thread go; steps that come all the same are taken at once."""
        self._at_once = "closed"
        try:
            self.settle()
        finally:
            self._pending = None
            if self._thread is not None:
                self._thread.shutdown()

    def _may_wait(self) -> bool:
        """Whether the step that begins now may return before its pass is taken."""
        averaged, self._averaged = self._averaged, False
        hooks = self._stepped_by._optimizer_step_post_hooks
        return (
            self._at_once is None
            and (self._thread is not None or (averaged and not self.needs_a_thread))
            # Hooks after the optimizer's step are told that it has been taken.
            and not hooks
            and self._waits_for_compiled()
        )

    def _waits_for_compiled(self) -> bool:
        """Have compiled forwards wait before they are entered; whether all can."""
        for module in self._module.modules():
            own = vars(module)
            if own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]:
                # The call itself is compiled: nothing runs before its guards look at the weights.
                return False
            if hasattr(own.get("forward"), "_torchdynamo_orig_callable"):
                if module not in self._compiled:
                    module.register_forward_pre_hook(_land_all)
                self._compiled.add(module)
        return True

    def _launch(self, steps: Sequence[SlabStep], upload: Upload) -> None:
        """Leave begun steps to whoever takes them."""
        if not self._parts:
            self._parts = self._divide([step.weight.numel() for step in steps])
            self._order = list(range(len(self._parts)))
        pending = self._begin(steps, upload)
        self._pending = pending
        for name, tensor in self._written().items():
            pending.hold(name, tensor)
        if self._thread is not None:
            self._thread.submit(pending.run)

    def _divide(self, sizes: Sequence[int]) -> tuple[Part, ...]:
        return divide(self._layout.addresses, sizes, first=self._wanted_first())

    def _begin(self, steps: Sequence[SlabStep], upload: Upload) -> PendingStep:
        return PendingStep(parts=self._parts, order=tuple(self._order), steps=steps, upload=upload)

    def _upload(
        self,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        exchange: Exchange | None = None,
    ) -> Upload:
        away = [target for target in targets if target is not None]
        accelerator = self._accelerator
        if all(target.device.type == "cpu" for target in away):
            return Upload(sources=sources, targets=targets, exchange=exchange)
        if self._stream is None:
            self._stream = accelerator.Stream()
        return StreamUpload(
            sources=sources,
            targets=targets,
            exchange=exchange,
            stream=self._stream,
            accelerator=accelerator,
        )

    @abstractmethod
    def _written(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the pass writes for the model, by the parameters' names."""

    def _wanted_first(self) -> Collection[str]:
        """Names of parameters that are used as soon as the step ends."""
        return ()


def op_or_reason(
    plan: ResolvedPlan,
    group: ProcessGroup,
    *,
    obstacle: str | None,
    rounds_alike: Callable[[HostStepOp], bool] | None,
) -> HostStepOp | str:
    """The compiled functions that every rank can take steps with, or why not. Collective.

    Args:
        plan: Whether that is wanted.
        group: The processes that train together.
        obstacle: What stands in the way on this rank.
        rounds_alike: Whether this build of torch rounds as they do; ``None``: none of its own
            arithmetic is met.
    """
    op: HostStepOp | None = None
    if not plan.host_step:
        obstacle = "the plan was resolved with host_step=False"
    obstacle = obstacle or why_disproven("one pass", accelerator=plan.platform.accelerator)
    if obstacle is None:
        try:
            op = load_host_step()
        except PlatformError as error:
            obstacle = f"the op host_step cannot be built: {error.reason}"
        else:
            alike = rounds_alike is None or rounds_alike(op)
            obstacle = None if alike else _ROUNDS_OTHERWISE
    elsewhere = group.any(obstacle is not None, purpose="choose who takes the steps")
    if op is None or elsewhere:
        return obstacle or "another rank cannot take it so"
    return op


def shares_cores(step: DeferredSteps) -> Decision:
    """Say what a pass computes on, and what is left to the forward beside it."""
    threads, read = torch.get_num_threads(), MachineProbe().read_text
    cores = describe_cpus(read_cpus(read, affinity_here()), quota=cpu_quota(read))
    taken = step.op.beside(threads) if step.hidden else threads
    if not step.hidden:
        reason = "nothing else computes while the pass is taken"
    elif taken < threads:
        reason = "one is left to what the next forward does on the host"
    else:
        reason = "shared with the next forward: a pass on one of two takes longer than both on two"
    return Decision(
        key=THREADS_KEY,
        before=threads,
        after=taken,
        reason=f"{reason}; {cores} for this process; it follows torch's threads, which a trainer "
        "sets to what data workers and other ranks leave (threads)",
    )


def choose_when(step: DeferredSteps, plan: ResolvedPlan) -> Decision:
    """Choose who takes the pass, and when. Collective.

    On a device nothing is taken later unless that is proven there, or asked for.
    """
    at_once = step.why_at_once()
    on_cpu = plan.platform.accelerator == "cpu"
    unproven = None if on_cpu else _why_unproven(step, plan)
    after = "taken before the step returns"
    if at_once is not None:
        reason = at_once
        step.take_at_once(at_once)
    elif plan.hidden_step or (plan.hidden_step is None and not on_cpu and unproven is None):
        after = "taken in a thread, behind the next forward"
        reason = "the cores have nothing else to do meanwhile, and it is proven on this device"
        if plan.hidden_step:
            reason = "asked for" if unproven is None else f"asked for, unproven: {unproven}"
        step.hide()
    else:
        if unproven is not None:
            step.take_at_once(unproven)
        elif not step.needs_a_thread:
            after += ", or together with the averages"
        if plan.hidden_step is False:
            reason = "the plan was resolved with hidden=False"
        elif unproven is None:
            reason = "model and optimizer share these cores, so nothing is gained beside each other"
        else:
            reason = f"{unproven}; plan.resolve(hidden=True) asks for it all the same"
    return Decision(key=HIDDEN_KEY, before=None, after=after, reason=reason)


def _why_unproven(step: DeferredSteps, plan: ResolvedPlan) -> str | None:
    """Why a pass is not hidden by default on some rank; the ranks must do the same."""
    path: FastPath = "exchange" if step.needs_a_thread else "hidden step"
    unproven = why_unproven(path, accelerator=plan.platform.accelerator)
    elsewhere = step.group.any(unproven is not None, purpose="choose when a pass is taken")
    return unproven or ("it is not proven on another rank's device" if elsewhere else None)


def _land_all(module: torch.nn.Module, _inputs: Any) -> None:
    """Wait for the weights of a module whose forward is compiled."""
    for parameter in module.parameters():
        land(parameter)
