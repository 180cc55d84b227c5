"""``Residency``: which units are on the device, when they come and when they go.

A unit comes before a call of it: in the forward pass by a hook before the call, in the backward
pass by a hook on what the call has returned. It may go once no call of it is under way: in the
backward pass that is when its last gradient has come, or, of a frozen unit, when the gradients of
its own inputs are complete. The order of uses is learned from the last whole pass: what comes next
is fetched ahead, and what is used last goes first.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import attrs
import torch
from torch.utils._pytree import tree_leaves

from zerotune.backend.stream.lanes import Lane
from zerotune.backend.stream.units import Unit
from zerotune.backend.stream.weights import Inside

_AHEAD: Final = 2
"""Units that are fetched beside the one in use."""
_NEVER: Final = 2**62


@attrs.define(kw_only=True)
class StreamCounts:
    """What has moved since the engine started."""

    fetched: int = 0
    """Units copied to the device."""
    late: int = 0
    """Of these, the ones that were not on their way when they were needed."""
    evicted: int = 0
    """Units that gave their memory back."""
    in_use: int = 0
    """Bytes of the device that units have."""
    peak: int = 0
    """Most bytes they had at a time."""


@attrs.define(eq=False)
class _Call:
    """One call of a module, as far as its backward pass."""

    units: Sequence[Unit]
    inputs: frozenset[tuple[int, int]]
    """Places in the graph of the inputs whose gradients end the call."""
    is_open: bool = False
    left: int = 0
    """Inputs whose gradients have not come."""


class Residency:
    """Brings units to the device before they are used, and sends away what is used last.

    Args:
        model: The model.
        units: All of it.
        needs: The units of each streamed module.
        capacity: Bytes of the device that streamed units may take; a call that needs more gets it.
        lane: Copies to the device.
        hurry: Has the pass that writes a unit taken soon.
        before: Called before each forward pass of the model, and before each streamed module.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        units: Sequence[Unit],
        needs: Mapping[torch.nn.Module, Sequence[Unit]],
        capacity: int,
        lane: Lane,
        hurry: Callable[[Unit], None],
        before: Callable[[], None],
    ) -> None:
        self._streamed = [unit for unit in units if not unit.resident]
        self._capacity, self._lane, self._hurry, self._before = capacity, lane, hurry, before
        self.counts = StreamCounts()
        self._lock = threading.RLock()
        self.inside = Inside()
        """The calls of units that a thread is in."""
        self._trace: list[Unit] = []
        self._order: list[Unit] = []
        self._uses: dict[Unit, list[int]] = {}
        self._at = 0
        self.in_backward = False
        self._shared: dict[tuple[int, int], list[Any]] = {}
        self.is_final: Callable[[Unit], bool] = lambda _: False
        """Whether a unit's gradients are all there, so that it must not be used again."""
        self._hooks = [model.register_forward_pre_hook(_of_root(model, self))]
        self._entering: dict[torch.nn.Module, int] = {}
        for module, units_of_it in needs.items():
            enter, leave = _of_module(module, units_of_it, self)
            self._hooks += [enter, leave]
            self._entering[module] = enter.id

    @property
    def order(self) -> Sequence[Unit]:
        """Units in the order of the last whole pass; empty before the first."""
        return self._order or self._trace

    # -- What is on the device.

    def ensure(self, unit: Unit) -> None:
        """Have a unit's newest weights on the device for what is computed from here on."""
        with self._lock:
            if not unit.is_current:
                self.counts.late += bool(self._order) and not unit.resident
                self._make_room(unit)
                self._fetch(unit)
            loading = unit.loading
        if loading is not None:
            loading.receive()
            with self._lock:
                if unit.loading is loading:
                    unit.loading = None

    def close_calls(self, unit: Unit) -> None:
        """No call of a unit is under way: each has used its weights."""
        unit.calls = 0

    def _fetch(self, unit: Unit) -> None:
        if not unit.is_here:
            unit.allocate()
            self.counts.in_use += unit.nbytes
            self.counts.peak = max(self.counts.peak, self.counts.in_use)
        written = unit.written
        if written is not None:
            self._hurry(unit)
        self.counts.fetched += 1
        unit.loaded = unit.current
        unit.loading = self._lane.submit(
            lambda: _copy(unit.host, unit.flat),
            wait=None if written is None else written.result,
        )

    def _make_room(self, wanted: Unit, near: Collection[Unit] = ()) -> bool:
        """Send away what is used last until there is room; whether there is.

        Args:
            wanted: What room is needed for.
            near: Units that are used soon; nothing used sooner than ``wanted`` goes for it.
        """
        if wanted.is_here or wanted.resident:
            return True
        held = sum(unit.nbytes for unit in self._streamed if unit.is_here)
        while held + wanted.nbytes > self._capacity:
            free = [
                unit
                for unit in self._streamed
                if unit.is_here and not unit.calls and unit.loading is None and unit not in near
            ]
            if not free:
                return False
            last = max(free, key=self._next_use)
            if near and self._next_use(last) <= self._next_use(wanted):
                return False
            held -= last.nbytes
            self.counts.in_use -= last.nbytes
            self.counts.evicted += 1
            last.evict()
        return True

    def _next_use(self, unit: Unit) -> int:
        """Uses of others until the next of this one."""
        uses = self._uses.get(unit)
        if not uses:
            return _NEVER
        index = bisect_left(uses, self._at)
        if index < len(uses):
            return uses[index] - self._at
        return uses[0] + len(self._order) - self._at

    def _use(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.ensure(unit)
            if not self._trace or self._trace[-1] is not unit:
                self._trace.append(unit)
            distance = self._next_use(unit)
            if distance != _NEVER:
                self._at = (self._at + distance) % len(self._order)
                self._fetch_ahead(self._order[self._at + 1 :], [unit])

    def _fetch_ahead(self, coming: Sequence[Unit], near: list[Unit]) -> None:
        """Ask for what is used next, as far as there is room."""
        wanted = len(near) + _AHEAD
        with self._lock:
            for unit in coming:
                if unit in near:
                    continue
                near.append(unit)
                if len(near) > wanted or not self._make_room(unit, near):
                    return
                if not unit.is_current:
                    self._fetch(unit)

    def rewind(self) -> None:
        """The next forward pass comes next: ask for what it uses first."""
        self._learn()
        self._at = 0
        self._fetch_ahead(self._order, [])

    def _learn(self) -> None:
        if self._trace and (self.in_backward or not self._order) and self._trace != self._order:
            self._order, self._uses = list(self._trace), {}
            for index, unit in enumerate(self._order):
                self._uses.setdefault(unit, []).append(index)

    # -- Calls.

    def enter_model(self) -> None:
        """A forward pass of the model begins."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.inside.leave_all()
        for module, hook in self._entering.items():
            # Last: hooks of others see weights as from outside.
            cast(Any, module._forward_pre_hooks).move_to_end(hook)
        self._learn()
        self._trace, self._at, self.in_backward, self._shared = [], 0, False, {}
        for unit in self._streamed:
            # An error may have ended a pass in the middle.
            unit.calls = 0
        self._before()

    def enter_call(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        """A call of a module begins, in the forward pass or recomputed in the backward pass."""
        self._before()
        for unit in units:
            # Nothing of a call makes room for the rest of it.
            unit.calls += 1
        self._use(units)
        self.inside.enter(module, units)

    def leave_call(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        """It has ended, perhaps with an error."""
        self.inside.leave(module)
        for unit in units:
            unit.calls = max(0, unit.calls - 1)

    def watch_backward(self, units: Sequence[Unit], inputs: Any, output: Any) -> None:
        """Have a call's units come back when the backward pass reaches it, and go when it is over.

        Args:
            units: Of the call.
            inputs: Whatever holds its inputs.
            output: Whatever holds its outputs.
        """
        if not torch.is_grad_enabled():
            return
        outputs = _differentiated(output)
        passed = {id(tensor) for tensor in outputs}
        own = {id(t): t for t in _differentiated(inputs) if id(t) not in passed}
        call = _Call(units, frozenset(map(_edge, own.values())))
        if torch._C._current_graph_task_id() == -1:
            for tensor in own.values():
                # Its node is held until the next forward, so that no other has its id.
                self._shared.setdefault(_edge(tensor), [tensor.grad_fn, 0])[1] += 1
        for tensor in outputs:
            _watch(tensor, partial(self._enter_backward, call))
        for tensor in own.values():
            _watch(tensor, partial(self._leave_backward, call, _edge(tensor)))

    def _enter_backward(self, call: _Call, _gradient: torch.Tensor) -> None:
        if call.is_open:
            return
        call.is_open = True
        # What many blocks take, such as an embedding of the time step, is whole only at the end.
        alone = {edge for edge in call.inputs if self._shared.get(edge, (None, 1))[1] == 1}
        call.inputs = frozenset(alone) or call.inputs
        call.left = len(call.inputs)
        self.in_backward = True
        for unit in call.units:
            unit.calls += 1
        self._use(call.units)

    def _leave_backward(self, call: _Call, edge: tuple[int, int], _gradient: torch.Tensor) -> None:
        if edge in call.inputs and call.is_open:
            call.left -= 1
            if call.left == 0:
                for unit in call.units:
                    unit.calls = max(0, unit.calls - 1)

    def close(self) -> None:
        """Watch the model no more, and wait for what is on its way."""
        for hook in self._hooks:
            hook.remove()
        self._entering = {}
        self.inside.leave_all()
        try:
            for unit in self._streamed:
                if unit.loading is not None:
                    unit.loading.finish()
        finally:
            # Graphs that are left have hooks that have this, which no collector of garbage sees.
            self._shared = {}
            self._hurry = lambda _: None
            self._before = lambda: None
            self.is_final = lambda _: False


def _watch(tensor: Any, call: Callable[[torch.Tensor], None]) -> None:
    """Call it with a tensor's gradient once that is complete."""
    tensor.register_hook(call)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=source.is_pinned())


def _differentiated(tree: Any) -> list[torch.Tensor]:
    leaves = (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [tensor for tensor in leaves if tensor.grad_fn is not None]


def _edge(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor.grad_fn), tensor.output_nr


# -- Hooks are functions, which a copy of the model takes as they are: what it calls is not watched.


def _of_root(model: torch.nn.Module, residency: Residency) -> Any:
    def enter(called: torch.nn.Module, _args: Any) -> None:
        if called is model:
            residency.enter_model()

    return enter


def _of_module(module: torch.nn.Module, units: Sequence[Unit], residency: Residency) -> list[Any]:
    def enter(called: torch.nn.Module, _args: Any, _kwargs: Any) -> None:
        if called is module:
            residency.enter_call(module, units)

    def leave(called: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if called is module:
            residency.leave_call(module, units)
            residency.watch_backward(units, (args, kwargs), output)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
