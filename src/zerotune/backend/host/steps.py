"""``StreamedSteps``: collect gradients unit by unit, and update the units' weights on the host.

A unit's gradients are copied to the host once all of them are computed. With clipping, updates
begin after the gradient norm is known. Without clipping, a unit's update begins as soon as its
gradients are on the host, while the backward pass continues. This is safe, because nothing reads a
parameter after its gradient has been accumulated. The arithmetic is that of ZeRO-2 with CPU
offload.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import attrs
import torch

from zerotune.backend.ema_update import EMAUpdate
from zerotune.backend.host.gradients import Gradients, Place
from zerotune.backend.host.lanes import Copy, Lane
from zerotune.backend.host.passes import Passes, UnitPass
from zerotune.backend.host.residency import Residency
from zerotune.backend.host.units import FlatOrder, Member, Unit, UnitPart
from zerotune.backend.host.updates import Update
from zerotune.backend.step.awaited import Held, hold, release
from zerotune.backend.step.kernel import HostStepOp
from zerotune.backend.step.uses import CALL_COMPILED, COMPILED, VIEWED, ForeignUses
from zerotune.backend.step_state import Stage
from zerotune.errors import EngineError, StepOrderError
from zerotune.plan.memory.hosted import GRADIENTS_UNDER_WAY


@attrs.define(eq=False, kw_only=True)
class Window:
    """The gradients of a unit in the current accumulation window."""

    place: Place | None = None
    """Memory for the gradients, on the host if ``Gradients.on_host``."""
    came: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """Gradients of the current micro batch on the device, by the parameter's index."""
    landed: Copy | None = None
    """Newest copy of gradients to the host; it completes after all earlier copies."""
    on_host: set[int] = attrs.field(factory=set)
    """Indices of the parameters whose gradient is in ``place``."""
    norms: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    """Norms of gradients that stay on the device, in the order in which they came."""
    squares: dict[tuple[int, int], float] = attrs.field(factory=dict)
    """Sums of squared gradients, by parameter index and the elements' owner under ZeRO-2."""
    expected: int = 0
    """Number of gradients expected in this micro batch."""
    taken: bool = False
    """Whether the unit's update has begun."""


@attrs.define(eq=False)
class _Tally:
    """Results of one step's updates; updates of the previous step may still be running."""

    is_finite: bool = True
    """Whether every gradient so far is finite."""
    stepped: int = 0
    """Number of updated units."""


class StreamedSteps:
    """Collect the gradients of units, and update the units' weights.

    Args:
        units: The trained units.
        order: ZeRO-2's layout of the parameters, which determines how norms are summed.
        update: Object that updates the weights of units.
        op: The compiled kernels.
        gradients: Host memory for gradients.
        lane: Lane for copies from the device.
        passes: Object that runs the updates.
        clipping: Largest gradient norm; with 0, gradients are not clipped.
        factor: Function of the norm, the loss scale and ``clipping`` that returns what gradients
            are multiplied by.
        in_backward: Whether updates begin during the backward pass if gradients are not clipped.
        foreign: Lets code outside torch wait for updates in a model whose weights stay on the
            device; ``None`` if ``wait_for_all`` is called before each forward pass.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        order: FlatOrder,
        update: Update,
        op: HostStepOp,
        gradients: Gradients,
        lane: Lane,
        passes: Passes,
        clipping: float,
        factor: Callable[[float, float, float], float],
        in_backward: bool = True,
        foreign: ForeignUses | None = None,
    ) -> None:
        self._units, self.update, self._op, self._gradients = units, update, op, gradients
        self._lane, self.passes, self._clipping = lane, passes, clipping
        self._foreign, self._factor = foreign, factor
        self.is_eager = clipping <= 0 and in_backward
        """Whether updates begin during the backward pass."""
        self._windows = {unit: Window() for unit in units}
        places = {m.name: (u, i) for u in units for i, m in enumerate(u.members)}
        self._unit_of = {name: unit for name, (unit, _) in places.items()}
        self._order = [[places[name] for name in group] for group in order.groups]
        self._world_size = order.world_size
        self._parts = {
            unit: {
                unit.members.index(part.member): (slab, part)
                for slab in unit.slabs
                for part in slab.parts
            }
            for unit in units
        }
        self._leaving: deque[Copy] = deque()
        self._held: list[Unit] = []
        self._holds: dict[Member, Held] = {}
        self._used: dict[Unit, None] = {}
        self._is_compiled = False
        self.at_once: dict[str, None] = {}
        """Reasons for which weights were uploaded before ``step`` returned."""
        self._is_last = False
        self._under_way = False
        self._tally = _Tally()
        self._lock = threading.RLock()
        self.residency = cast(Residency, None)
        """Set by the engine before the first forward pass."""
        self._hooks = [
            _watch(member.parameter, partial(self._arrived, unit, index))
            for unit in units
            for index, member in enumerate(unit.members)
        ]
        self._hooks_by_weight = [(hook.hooks_dict_ref(), hook.id) for hook in self._hooks]

    # -- Gradients.

    def begin_backward(self, *, is_last: bool) -> None:
        """Prepare for the backward pass of one micro batch.

        Args:
            is_last: Whether the micro batch is the last one of its accumulation window.
        """
        self._is_last = is_last
        for hooks, key in self._hooks_by_weight:
            if next(reversed(hooks)) != key:
                # Other hooks, registered since, see the gradient before it is taken.
                hooks[key] = hooks.pop(key)

    def _arrived(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        window = self._windows[unit]
        if window.taken:
            raise EngineError(
                "the backward pass uses this module again, although the update of its weights has "
                "begun",
                "enable gradient_clipping, so that updates wait for the whole backward pass",
                f"model.{unit.name}",
                "gradient_clipping=0",
            )
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = cast(torch.Tensor, parameter.grad), None
            if not window.came:
                window.expected = sum(m.parameter.requires_grad for m in unit.members)
        if index in window.came:
            gradient = window.came[index] + gradient
        window.came[index] = gradient
        if len(window.came) == window.expected:
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Copy a unit's gradients to the host, and begin its update if the step is eager."""
        self.residency.close_calls(unit)
        window = self._windows[unit]
        came, window.came = window.came, {}
        if window.place is None:
            window.place = self._gradients.take(unit)
        window.landed = self._lane.submit(
            partial(self._land, unit, came, window),
            then=partial(self._take_squares, unit, came, window),
        )
        self._leaving.append(window.landed)
        if self.is_eager and self._is_last:
            self._begin(unit, factor=1.0)
        if len(self._leaving) > GRADIENTS_UNDER_WAY:
            # The host runs ahead of the device, which has no room for the gradients of all units.
            self._leaving.popleft().finish()

    def _land(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        if not self._gradients.on_host:
            self._keep(unit, came, window)
            return
        for index, gradient in came.items():
            is_first = index not in window.on_host
            if is_first and self._lane.is_on_host:
                continue  # Copied where its square is taken.
            target, source = self._gradient(unit, index, window), gradient.reshape(-1)
            if is_first:
                target.copy_(source, non_blocking=target.is_pinned())
            elif source.device == target.device:
                target.add_(source)
            else:
                # Add on the device, which is faster than the host.
                source = source + target.to(source.device, non_blocking=target.is_pinned())
                target.copy_(source, non_blocking=target.is_pinned())

    def _keep(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        """Keep gradients on the device, and copy only their norms to the host."""
        norms = []
        for index, gradient in came.items():
            slab, _ = self._parts[unit][index]
            cast(Place, window.place).slabs[slab] = gradient.reshape(-1)
            norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if norms:
            window.norms = torch.stack(norms).to("cpu", non_blocking=True)

    def _take_squares(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        if not self._gradients.on_host:
            norms = window.norms.tolist() if came else ()
            found = zip(came, norms, strict=True)
            window.squares.update({(index, 0): norm**2 for index, norm in found})
            window.on_host.update(came)
            return
        sources = {}
        if self._lane.is_on_host:
            # Copied here, where each is read anyway.
            fresh = came.keys() - window.on_host
            sources = {i: came[i].contiguous() for i in came if i in fresh}
        window.squares.update(self._squares(unit, came, window, sources))
        window.on_host.update(came)

    def _squares(
        self,
        unit: Unit,
        came: Iterable[int],
        window: Window,
        sources: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> dict[tuple[int, int], float]:
        """Sums of gradients' squares in host memory, by the owning rank under ZeRO-2.

        Gradients in ``sources`` are copied to host memory, which only a single rank does here.
        """
        taken, place = {}, cast(Place, window.place)
        for index in came:
            slab, part = self._parts[unit][index]
            own, gradient = place.slabs[slab], sources.get(index)
            for rank, fragment in part.fragments:
                target = own[fragment]
                taken[index, rank] = (target, None) if gradient is None else (gradient, target)
        if not taken:
            return {}
        tensors, into = zip(*taken.values(), strict=True)
        return dict(zip(taken, self._op.take(tensors, into=into), strict=True))

    def _gradient(self, unit: Unit, index: int, window: Window) -> torch.Tensor:
        slab, part = self._parts[unit][index]
        return cast(Place, window.place).slabs[slab][part.place]

    def end_backward(self) -> None:
        """Handle units that received no gradients, or only some, in this micro batch."""
        for unit, window in self._windows.items():
            if window.came or (self.is_eager and self._is_last and not window.taken):
                self._complete(unit)
        if not self._is_last:
            self.residency.rewind()

    def forget(self) -> None:
        """Drop the gradients of the accumulation window.

        Raises:
            StepOrderError: Weights have already been updated with these gradients.
        """
        if not self.take_back():
            raise StepOrderError(
                "gradients cannot be discarded: without clipping, the backward pass has already "
                "updated weights with them",
                "call engine.step(); to be able to discard gradients, enable gradient_clipping",
                "engine.discard",
                "gradient_clipping=0",
            )

    def take_back(self) -> bool:
        """Drop the window's gradients, if no weight has been updated with them.

        Once a gradient is not finite, no further unit is updated.

        Returns:
            Whether the gradients were dropped.
        """
        self._finish_landing()
        if self._under_way:
            self.passes.settle()
            if self._any_stepped():
                return False
            for unit, window in self._windows.items():
                if window.taken:
                    self.update.take_back(unit)
        self.forget_all()
        return True

    def _finish_landing(self) -> None:
        """Wait until every running copy of gradients has reached the host."""
        for window in self._windows.values():
            if window.landed is not None:
                window.landed.finish()

    def _any_stepped(self) -> bool:
        """Whether any unit has been updated with the window's gradients."""
        return self._tally.stepped > 0

    def forget_all(self) -> None:
        """Begin a new accumulation window, and drop the state of the previous one."""
        for window in self._windows.values():
            if window.place is not None and not window.taken:
                self._gradients.give_back(window.place)
        self._windows = {unit: Window() for unit in self._units}
        self._under_way, self._tally = False, _Tally()

    def break_off(self) -> Stage:
        """Abandon the step of a failed backward pass, if any unit may have been updated.

        Returns:
            The engine's stage after the failure.
        """
        if not self._under_way:
            return Stage.BROKEN
        for window in self._windows.values():
            if window.landed is not None:
                # The error that ended the pass is the one to raise.
                with suppress(BaseException):
                    window.landed.finish()
        self.forget_all()
        return Stage.SPOILED

    # -- Steps.

    def norm(self) -> float:
        """Return the L2 norm of the window's gradients, computed as in ZeRO-2.

        Returns:
            The norm; infinity if any gradient is not finite.

        Raises:
            BaseException: Copying a gradient to the host has failed.
        """
        self._finish_landing()
        norms = []
        for group in self._order:
            total = torch.zeros(1)
            for rank in range(self._world_size):
                found = (self._windows[unit].squares.get((index, rank)) for unit, index in group)
                # Add the ranks' sums in fp32.
                total += sum(math.sqrt(square) ** 2 for square in found if square is not None)
            if not math.isfinite(total):
                return math.inf
            norms.append(torch.tensor(total.item() ** 0.5))
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def step(self, norm: float, scale: float = 1.0) -> None:
        """Begin all updates that have not begun yet, in the order of the next forward pass.

        Args:
            norm: Gradient norm; must be finite unless all updates have begun.
            scale: Loss scale of the gradients and of their norm.
        """
        # Before updates begin, since counting waits for the one that is running.
        reason = self._why_at_once()
        factor = self._factor(norm, scale, self._clipping)
        order = self._order_of_uses()
        ranks = {unit: rank for rank, unit in reversed(list(enumerate(order, start=1)))}
        for unit in sorted(self._units, key=lambda each: ranks.get(each, 0)):
            if not self._windows[unit].taken:
                self._begin(unit, factor=factor, rank=ranks.get(unit, 0))
            self._windows[unit] = Window()
            if unit.resident:
                self._hold(unit)
        self._under_way, self._tally = False, _Tally()
        self.residency.rewind()
        if reason is not None:
            self.at_once[reason] = None
            self.settle()
            self.wait_for_all()

    def _order_of_uses(self) -> Sequence[Unit]:
        """Units in the order in which the last pass used them."""
        if self._foreign is None:
            return self.residency.order
        first, self._used = list(self._used), {}
        return [*first, *(unit for unit in self._units if unit not in first)]

    def _why_at_once(self) -> str | None:
        """Why weights cannot be uploaded after the step; ``None`` if they can."""
        if self._foreign is not None and not self._foreign.wait_for_compiled():
            return CALL_COMPILED
        if self._is_compiled:
            return COMPILED
        counted = self._count_views().items()
        return VIEWED if any(views > self._views[unit] for unit, views in counted) else None

    def compiling(self) -> None:
        """From now on, upload weights before ``step`` returns."""
        self._is_compiled = True
        self.settle()
        self.wait_for_all()

    def know_views(self) -> None:
        """Record that all existing views of the weights belong to the engine."""
        # Weights that are held have fewer views than those that are not.
        self.wait_for_all()
        self._views = self._count_views()

    def _count_views(self) -> dict[Unit, int]:
        # An update in progress has further views of its unit's weights.
        with self.passes.paused():
            own = self.passes.views()
            return {unit: _views_of(unit) - own[unit] for unit in self._units}

    def _begin(self, unit: Unit, *, factor: float, rank: int | None = None) -> None:
        window = self._windows[unit]
        place = window.place = window.place or self._gradients.take(unit)
        window.taken = True
        if not self._under_way:
            self.passes.begin_step()
            self._under_way = True
        views = _views_of(unit)
        run = self.update.begin(unit, place.slabs, factor=factor)
        written = self._to_be_written(unit)
        # Also on failure, so that no thread waits forever.
        written.add_done_callback(lambda _: self._gradients.give_back(place))
        unit_pass = UnitPass(
            unit=unit,
            run=run,
            ema_updates=self.passes.ema_updates,
            check=partial(self._check, unit, window, self._tally),
            landed=window.landed,
            written=written,
            views=_views_of(unit) - views,
            rank=self._units.index(unit) if rank is None else rank,
        )
        self.passes.submit(unit_pass)

    def _to_be_written(self, unit: Unit) -> Future[None]:  # noqa: ARG002 - of several ranks
        """Future that is done once the next update of a unit is complete."""
        return Future()

    def _check(self, unit: Unit, window: Window, tally: _Tally) -> list[UnitPart] | None:
        """Return what got no gradient and stays still as in torch; ``None`` if any is NaN."""
        tally.is_finite = tally.is_finite and all(map(math.isfinite, window.squares.values()))
        tally.stepped += tally.is_finite
        if not tally.is_finite:
            return None
        return [part for i, (_, part) in self._parts[unit].items() if i not in window.on_host]

    def replay(self, steps: int) -> None:
        """Continue as if ``steps`` optimizer steps had been taken."""
        self.update.replay(steps)

    def settle(self) -> None:
        """Wait until all updates are complete.

        Raises:
            EngineError: Updates have begun, but ``step`` has not been called.
            BaseException: An update has failed.
        """
        if self._under_way:
            raise EngineError(
                "weights were read when only some of them were updated: without clipping, the "
                "backward pass has begun the optimizer step",
                "call engine.step() before reading weights, or enable gradient_clipping",
                "engine.step",
                "gradient_clipping=0",
            )
        self.passes.settle()

    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:
        """Add EMA updates to the newest step.

        Args:
            updates: The updates.

        Returns:
            Whether a pending step will run the updates.
        """
        return not self._under_way and self.passes.update_emas(updates)

    # -- Units that stay on the device.

    def begin_writing(self) -> None:
        """Wait until the device no longer reads weights in host memory."""
        self._lane.wait_for_device()

    def refresh(self) -> None:
        """Update the model after weights were written in host memory."""
        for unit in self._units:
            unit.version += 1
            if unit.in_place:
                unit.know_bits()
            if unit.resident:
                self._hold(unit)
        if self._foreign is not None:
            # Code outside torch uses weights before the first step as well.
            self.wait_for_all()

    def _hold(self, unit: Unit) -> None:
        with self._lock:
            if unit not in self._held:
                self._held.append(unit)
                for member in unit.members:
                    before = self._holds.get(member)
                    self._holds[member] = hold(
                        member.parameter, name=member.name, step=self, before=before
                    )
            self.residency.upload(unit)

    def wait_for(self, tensor: Any) -> None:
        """Wait until a parameter's unit is on the device, and make the unit usable.

        Args:
            tensor: A parameter of a resident unit.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            # Another thread may have waited for it meanwhile.
            if (held := vars(tensor).get("_awaited")) is not None:
                unit = self._unit_of[held.name]
                self._used.setdefault(unit)
                self._wait_for_unit(unit)

    def wait_for_all(self) -> None:
        """Wait until all resident units are on the device."""
        if not self._held:
            return
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for unit in list(self._held):
                self._wait_for_unit(unit)

    def _wait_for_unit(self, unit: Unit) -> None:
        self.residency.ensure(unit)
        for member in unit.members:
            release(member.parameter)
        self._held.remove(unit)

    @property
    def on_device(self) -> list[Unit]:
        """Units that stay on the device and whose last update has reached it."""
        with self._lock:
            return [unit for unit in self._units if unit.resident and unit not in self._held]

    def close(self) -> None:
        """Remove the gradient hooks, and restore parameters whose unit is not on the device yet."""
        for hook in self._hooks:
            hook.remove()
        if self._foreign is not None:
            self._foreign.close()
        for unit in self._held:
            for member in unit.members:
                release(member.parameter)
        self._held, self._holds = [], {}
        self._leaving.clear()


def _views_of(unit: Unit) -> int:
    """Number of tensors and arrays that share the memory of a unit's weights."""
    # Only the unit's own calls see streamed weights on the device.
    seen = (unit.host, unit.flat) if unit.resident else (unit.host,)
    return sum(torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in seen)


def _watch(parameter: Any, call: Callable[[torch.Tensor], None]) -> Any:
    """Call a function with the parameter after its gradient has been accumulated."""
    return parameter.register_post_accumulate_grad_hook(call)
