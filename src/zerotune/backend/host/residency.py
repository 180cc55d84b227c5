"""``Residency``: upload units to the device before they are used, and evict them later.

In the forward pass, a hook before a module's call uploads the module's unit; in the backward pass,
a hook on the call's output uploads the unit again. A unit may be evicted when no call uses it. In
the backward pass, a call ends when the unit's last gradient is computed; for a frozen unit, it ends
when the gradients of the call's inputs are computed. The order of uses is learned from the last
complete pass: units are prefetched in this order, and the unit whose next use is furthest away is
evicted first.
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

from zerotune.backend.host.lanes import Copy, Lane
from zerotune.backend.host.units import Unit
from zerotune.backend.host.weights import Inside
from zerotune.errors import EngineError

_AHEAD: Final = 2
"""Number of units to prefetch."""
_NEVER: Final = 2**62


@attrs.define(kw_only=True)
class HostCounts:
    """Uploads and evictions of units since the engine started, and the units' device memory."""

    fetched: int = 0
    """Number of uploads to the device."""
    late: int = 0
    """Number of uploads that were not prefetched."""
    evicted: int = 0
    """Number of evictions from the device."""
    in_use: int = 0
    """Bytes of device memory that units occupy now."""
    peak: int = 0
    """Largest number of bytes that units have occupied at once."""


@attrs.define(eq=False)
class _Call:
    """One call of a module, until its backward pass has ended."""

    units: Sequence[Unit]
    inputs: frozenset[tuple[int, int]]
    """Graph edges of the inputs whose gradients end the call."""
    task: int | None = None
    """Backward pass in which the call was used last."""
    left: int = 0
    """Number of inputs whose gradients are missing."""


class Residency:
    """Upload units to the device before their use, and evict those whose next use is furthest away.

    Args:
        model: The model.
        units: All units of the model.
        needs: The units of each streamed module.
        capacity: Limit of device memory for streamed units, in bytes; a call that needs more may
            exceed the limit.
        lane: Lane for copies to the device.
        hurry: Function that is called with a unit whose pending update must run before all others.
        before: Function that is called before each forward pass of the model, and before each call
            of a streamed module.
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
        self.counts = HostCounts()
        self._lock = threading.RLock()
        self.inside = Inside({})
        """Calls of units that the current thread is executing."""
        self._trace: list[Unit] = []
        self._order: list[Unit] = []
        self._uses: dict[Unit, list[int]] = {}
        self._at = 0
        self.in_backward = False
        self._shared: dict[tuple[int, int], list[Any]] = {}
        enter_model = _Hook(model, lambda _args: self.enter_model())
        self._hooks = [model.register_forward_pre_hook(enter_model)]
        self._entering: dict[torch.nn.Module, int] = {}
        for module, units_of_it in needs.items():
            enter, leave = _of_module(module, units_of_it, self)
            self._hooks += [enter, leave]
            self._entering[module] = enter.id

    @property
    def order(self) -> Sequence[Unit]:
        """Units in the order of the last complete pass; empty before the first pass."""
        return self._order or self._trace

    # -- Units on the device.

    def ensure(self, unit: Unit) -> None:
        """Make ``unit``'s newest weights available on the device to later computation."""
        with self._lock:
            if not unit.is_current:
                self.counts.late += bool(self._order) and not unit.resident
                self._make_room(unit)
                self._fetch(unit)
            loading = unit.loading
            if unit.in_place and loading is not None and not loading.is_done:
                self._hurry(unit)
        if loading is not None:
            loading.receive()
            with self._lock:
                if unit.loading is loading:
                    unit.loading = None

    def upload(self, unit: Unit) -> None:
        """Copy a unit that stays on the device there, as soon as its pending update is complete.

        Args:
            unit: A resident unit.
        """
        with self._lock:
            if not unit.is_current:
                self._fetch(unit)

    def close_calls(self, unit: Unit) -> None:
        """Record that all calls of ``unit`` have finished."""
        unit.calls = 0

    def _fetch(self, unit: Unit) -> None:
        if not unit.is_here:
            unit.allocate()
            self.counts.in_use += unit.nbytes
            self.counts.peak = max(self.counts.peak, self.counts.in_use)
        written = unit.written
        unit.loaded = unit.current
        if unit.in_place:
            # The step writes where the model reads, so there is nothing to copy.
            unit.loading = None if written is None else Copy(self._lane, written)
            return
        if written is not None:
            self._hurry(unit)
        self.counts.fetched += 1
        unit.loading = self._lane.submit(
            partial(_upload, unit),
            wait=None if written is None else written.result,
        )

    def _make_room(self, wanted: Unit, near: Collection[Unit] = ()) -> bool:
        """Evict units, furthest next use first, until a unit fits; return whether it fits.

        Args:
            wanted: The unit to upload.
            near: Units that are used soon. If given, no unit needed before ``wanted`` is evicted.
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
        """Number of uses of units before the next use of this one."""
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
        """Upload the next units in the order, as far as device memory allows."""
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
        """Prepare for the next forward pass, and prefetch its first units."""
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
        """Prepare for a forward pass of the model."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.inside.leave_all()
        for module, hook in self._entering.items():
            # Run this hook last, so that hooks of other code see the weights as outside the call.
            cast(Any, module._forward_pre_hooks).move_to_end(hook)
        self._learn()
        self._trace, self._at, self.in_backward, self._shared = [], 0, False, {}
        for unit in self._streamed:
            # An error may have interrupted a pass.
            unit.calls = 0
        self._before()

    def enter_call(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        """Prepare for a call of a module, including a recomputation in the backward pass.

        Args:
            module: The module.
            units: The units that the call needs.
        """
        self._before()
        for unit in units:
            # No unit of a call is evicted for another unit of the same call.
            unit.calls += 1
        self._use(units)
        self.inside.enter(module, units)

    def leave_call(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        """Record that a call of a module has ended, possibly with an error.

        Args:
            module: The module.
            units: The units that the call needed.
        """
        self.inside.leave(module)
        for unit in units:
            unit.calls = max(0, unit.calls - 1)

    def watch_backward(self, units: Sequence[Unit], inputs: Any, output: Any) -> None:
        """Register hooks that upload a call's units in the backward pass and release them later.

        Args:
            units: The units that the call needs.
            inputs: The call's inputs, in any nested structure.
            output: The call's outputs, in any nested structure.
        """
        if not torch.is_grad_enabled():
            return
        outputs = _differentiated(output)
        passed = {id(tensor) for tensor in outputs}
        own = {id(t): t for t in _differentiated(inputs) if id(t) not in passed}
        call = _Call(units, frozenset(map(_edge, own.values())))
        if torch._C._current_graph_task_id() == -1:
            for tensor in own.values():
                # The node is kept until the next forward, so that its id stays unique.
                self._shared.setdefault(_edge(tensor), [tensor.grad_fn, 0])[1] += 1
        for tensor in outputs:
            _watch(tensor, partial(self._enter_backward, call))
        for tensor in own.values():
            _watch(tensor, partial(self._leave_backward, call, _edge(tensor)))

    def _enter_backward(self, call: _Call, _gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise EngineError(
                "create_graph=True (a gradient penalty) needs all weights at once, but weights of "
                "this model are on the device only while their module's pass runs",
                'train without streaming, such as with plan.resolve(engine="host")',
                f"model.{call.units[0].name}",
                "create_graph=True",
            )
        task = torch._C._current_graph_task_id()
        if call.task == task:
            return
        call.task = task
        # If many blocks share an input, such as a time embedding, its gradient is complete only at
        # the end of the backward pass.
        alone = {edge for edge in call.inputs if self._shared.get(edge, (None, 1))[1] == 1}
        call.inputs = frozenset(alone) or call.inputs
        call.left = len(call.inputs)
        self.in_backward = True
        for unit in call.units:
            unit.calls += 1
        self._use(call.units)

    def _leave_backward(self, call: _Call, edge: tuple[int, int], _gradient: torch.Tensor) -> None:
        if edge in call.inputs and call.task == torch._C._current_graph_task_id():
            call.left -= 1
            if call.left == 0:
                for unit in call.units:
                    unit.calls = max(0, unit.calls - 1)

    def close(self) -> None:
        """Remove all hooks, and wait for running uploads."""
        for hook in self._hooks:
            hook.remove()
        self._entering = {}
        self.inside.close()
        try:
            for unit in self._streamed:
                if unit.loading is not None:
                    unit.loading.finish()
        finally:
            # Hooks in remaining graphs refer to this object, invisibly to the garbage collector.
            self._shared = {}
            self._hurry = lambda _: None
            self._before = lambda: None


def _watch(tensor: Any, call: Callable[[torch.Tensor], None]) -> None:
    """Call a function with a tensor's gradient once the gradient is complete."""
    tensor.register_hook(call)


def _upload(unit: Unit) -> None:
    host = unit.host
    unit.flat.copy_(host, non_blocking=host.is_pinned())
    if unit.resident and unit.slabs:
        unit.know_bits()


def _differentiated(tree: Any) -> list[torch.Tensor]:
    leaves = (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [tensor for tensor in leaves if tensor.grad_fn is not None]


def _edge(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor.grad_fn), tensor.output_nr


# -- Hooks of modules.


class _Hook:
    """A hook that ignores copies of its module, which share it, and that cannot be pickled."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., None]) -> None:
        self._module, self._call = module, call

    def __call__(self, called: torch.nn.Module, *passed: Any) -> None:
        if called is self._module:
            self._call(*passed)

    def __deepcopy__(self, _memo: Any) -> _Hook:
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise EngineError(
            "a model that the host engine trains, or a copy of it, cannot be pickled as a whole",
            "pass model.state_dict() to torch.save, or export the model with trainer.export, or "
            "close the engine first",
            "model",
            type(self._module).__name__,
        )


def _of_module(module: torch.nn.Module, units: Sequence[Unit], residency: Residency) -> list[Any]:
    def leave(args: Any, kwargs: Any, output: Any) -> None:
        residency.leave_call(module, units)
        residency.watch_backward(units, (args, kwargs), output)

    enter = _Hook(module, lambda *_: residency.enter_call(module, units))
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(_Hook(module, leave), with_kwargs=True, always_call=True),
    ]
