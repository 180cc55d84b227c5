"""``StreamedSteps``: gradients as they come, and the steps they make.

A gradient leaves the device when all of its unit have come. With clipping every pass follows the
norm. Without, a unit's pass begins as soon as its gradients are on the host, while the backward
pass goes on: when a parameter's gradient has been added up, everything that differentiates through
it has run. The arithmetic is ZeRO-2's with CPU offload, whatever the order.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

import attrs
import torch

from zerotune.backend.master_weights import Follower
from zerotune.backend.step.adams import SplitMasters, stepper_of
from zerotune.backend.step.kernel import HostStepOp
from zerotune.backend.step.pending import hold, release
from zerotune.backend.stream.gradients import Gradients, Place
from zerotune.backend.stream.lanes import Copy, Lane
from zerotune.backend.stream.passes import Passes, UnitPass
from zerotune.backend.stream.residency import Residency
from zerotune.backend.stream.units import FlatOrder, Unit
from zerotune.errors import EngineError
from zerotune.plan.memory.estimate import GRADIENTS_UNDER_WAY


@attrs.define(eq=False, kw_only=True)
class Window:
    """The gradients of a unit since the last step."""

    place: Place | None = None
    """Where they lie in host memory."""
    came: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """By the member's index, of the micro batch under way."""
    landed: Copy | None = None
    """The newest copy to the host, after which all earlier ones are complete."""
    on_host: set[int] = attrs.field(factory=set)
    """Members that have a gradient there."""
    squares: dict[tuple[int, int], float] = attrs.field(factory=dict)
    """Sums of squares of gradients, by member and by the rank that has them at ZeRO-2."""
    expected: int = 0
    """Gradients that may still come in this micro batch, and have."""
    taken: bool = False
    """Its pass has begun."""


@attrs.define(eq=False)
class _Tally:
    """What the passes of one step have met; those of the step before may still be taken."""

    is_finite: bool = True
    """Every gradient so far."""
    stepped: int = 0
    """Units."""


class StreamedSteps:
    """Collects the gradients of units and steps them.

    Args:
        units: Those that are trained.
        order: Of the parameters at ZeRO-2, by which it adds up their norms.
        adam: An Adam that ``stepper_of`` knows, over the keys of the units' slabs.
        op: The compiled functions.
        gradients: Where they lie in host memory.
        lane: Copies from the device.
        passes: Takes the passes.
        clipping: Largest norm of the gradient; 0: off, so that passes begin in the backward pass.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        order: FlatOrder,
        adam: Any,
        op: HostStepOp,
        gradients: Gradients,
        lane: Lane,
        passes: Passes,
        clipping: float,
    ) -> None:
        self._units, self._adam, self._op, self._gradients = units, adam, op, gradients
        self._lane, self.passes, self._clipping = lane, passes, clipping
        self._stepper = stepper_of(adam)(op=op, adam=adam)
        self._windows = {unit: Window() for unit in units}
        places = {m.name: (u, i) for u in units for i, m in enumerate(u.members)}
        self._order = [[places[name] for name in group] for group in order.groups]
        self._flat_order = order
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
        self._is_last = False
        self._under_way = False
        self._tally = _Tally()
        self._expected: list[Follower] = []
        self._moved: list[Follower] = []
        self.is_spoiled = False
        """Whether some units were stepped and others not, by a step that could not be ended."""
        self._lock = threading.RLock()
        self.residency = cast(Residency, None)
        """Set once there is one, before the first pass."""
        self._hooks = [
            _watch(member.parameter, partial(self._arrived, unit, index))
            for unit in units
            for index, member in enumerate(unit.members)
        ]

    @property
    def is_eager(self) -> bool:
        """Whether passes begin in the backward pass."""
        return self._clipping <= 0

    @property
    def under_way(self) -> bool:
        """Whether passes have begun that no ``step`` has closed."""
        return self._under_way

    # -- Gradients.

    def begin_backward(self, *, is_last: bool) -> None:
        """A backward pass begins: ``is_last`` of its window."""
        self._check_claimed()
        self._is_last = is_last

    def _arrived(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        window = self._windows[unit]
        if window.taken:
            raise used_after_step(unit)
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
        """Send a unit's gradients to the host, and have its pass follow where it may."""
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
        for index, gradient in came.items():
            target, source = self._gradient(unit, index, window), gradient.reshape(-1)
            if index not in window.on_host:
                target.copy_(source, non_blocking=target.is_pinned())
            elif source.device == target.device:
                target.add_(source)
            else:
                # On the device, which adds up faster than the host.
                source = source + target.to(source.device, non_blocking=target.is_pinned())
                target.copy_(source, non_blocking=target.is_pinned())

    def _take_squares(self, unit: Unit, came: Mapping[int, torch.Tensor], window: Window) -> None:
        window.on_host.update(came)
        for index in came:
            for rank, square in self._squares(unit, index, window):
                window.squares[index, rank] = square

    def _squares(self, unit: Unit, index: int, window: Window) -> Iterator[tuple[int, float]]:
        """Sums of squares of a gradient in host memory, by the rank that has it at ZeRO-2."""
        slab, part = self._parts[unit][index]
        for rank, fragment in part.fragments:
            yield rank, self._op.take(cast(Place, window.place).slabs[slab][fragment])

    def _gradient(self, unit: Unit, index: int, window: Window) -> torch.Tensor:
        slab, part = self._parts[unit][index]
        return cast(Place, window.place).slabs[slab][part.place]

    def end_backward(self) -> None:
        """Every gradient of this micro batch has come."""
        for unit, window in self._windows.items():
            if window.came or (self.is_eager and self._is_last and not window.taken):
                self._complete(unit)
        if not self._is_last:
            self.residency.rewind()

    def forget(self) -> None:
        """Drop the window's gradients.

        Raises:
            EngineError: Passes with them have begun.
        """
        if not self.take_back():
            raise EngineError(
                "cannot be dropped: with clipping off, its passes began in the backward pass",
                key="engine.discard",
                value="gradient_clipping=0",
                fix="clip gradients, or resume from the last checkpoint",
            )

    def take_back(self) -> bool:
        """Drop the window's gradients and the passes begun with them; whether none was taken.

        Passes are not taken from the first gradient on that is not finite.
        """
        self._finish_landing()
        if self._under_way:
            self.passes.settle()
            if self._any_stepped():
                return False
            for unit, window in self._windows.items():
                for slab in unit.slabs if window.taken else ():
                    self._adam.state[slab.key]["step"] -= 1
        self.forget_all()
        return True

    def _finish_landing(self) -> None:
        """Return once every gradient under way is on the host."""
        for window in self._windows.values():
            if window.landed is not None:
                window.landed.finish()

    def _any_stepped(self) -> bool:
        """Whether a unit was stepped with the window's gradients."""
        return self._tally.stepped > 0

    def forget_all(self) -> None:
        """Begin a window anew, whatever was done with the last one."""
        for window in self._windows.values():
            if window.place is not None and not window.taken:
                self._gradients.give_back(window.place)
        self._windows = {unit: Window() for unit in self._units}
        self._under_way, self._tally = False, _Tally()
        self._expected, self._moved, self.is_spoiled = [], [], False

    def break_off(self) -> None:
        """Give up the step of a backward pass that raised, if some units were stepped in it."""
        if not self._under_way:
            return
        for window in self._windows.values():
            if window.landed is not None:
                # The error that ended the pass is the one to raise.
                with suppress(BaseException):
                    window.landed.finish()
        self.spoil()

    def spoil(self) -> None:
        """Give up a step that has written some units, and cannot write the others."""
        self.forget_all()
        self.is_spoiled = True

    def check_whole(self) -> None:
        """Are all weights of one step?

        Raises:
            EngineError: Some units were stepped and others not.
        """
        if self.is_spoiled:
            raise EngineError(
                "the backward pass failed, or had a gradient that was not finite, after some "
                "weights had been stepped in it: the weights are of different steps",
                key="engine",
                value="gradient_clipping=0",
                fix="resume from the last checkpoint; with clipping, steps wait for all gradients",
            )

    # -- Steps.

    def norm(self) -> float:
        """L2 norm of the window's gradients as ZeRO-2 computes it; infinite if it is not finite.

        Raises:
            BaseException: What bringing a gradient to the host failed with.
        """
        self._finish_landing()
        norms = []
        for group in self._order:
            total = torch.zeros(1)
            for rank in range(self._world_size):
                found = (self._windows[unit].squares.get((index, rank)) for unit, index in group)
                # In fp32 among ranks.
                total += sum(math.sqrt(square) ** 2 for square in found if square is not None)
            if not math.isfinite(total):
                return math.inf
            norms.append(torch.tensor(total.item() ** 0.5))
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def step(self, norm: float) -> None:
        """Begin the passes that have not begun, in the order of the next forward pass.

        Args:
            norm: Of the gradients; finite, unless every pass has begun.
        """
        factor, order = self._factor(norm), self.residency.order
        ranks = {unit: rank for rank, unit in reversed(list(enumerate(order, start=1)))}
        for unit in sorted(self._units, key=lambda each: ranks.get(each, 0)):
            if not self._windows[unit].taken:
                self._begin(unit, factor=factor, rank=ranks.get(unit, 0))
            self._windows[unit] = Window()
            if unit.resident:
                self._hold(unit)
        self._under_way, self._tally = False, _Tally()
        self._expected, self._moved = [], self._expected
        self.residency.rewind()
        if any(views > self._views[unit] for unit, views in self._count_views().items()):
            # Somebody else's view of the weights would show old values.
            self.settle()
            self.land_all()

    def know_views(self) -> None:
        """Record the existing views of the weights as the engine's own."""
        self._views = self._count_views()

    def _count_views(self) -> dict[Unit, int]:
        own = self.passes.views()
        return {unit: _views_of(unit) - own[unit] for unit in self._units}

    def _begin(self, unit: Unit, *, factor: float, rank: int | None = None) -> None:
        window = self._windows[unit]
        place = window.place = window.place or self._gradients.take(unit)
        window.taken = True
        if not self._under_way:
            self.passes.begin_step()
            self.passes.averages.extend(self._expected)
            self._under_way = True
        groups, views = self._adam.param_groups, _views_of(unit)
        steps = []
        for slab in unit.slabs:
            step = self._stepper.begin(
                slab.key,
                gradient=place.slabs[slab],
                group=groups[slab.group],
                factor=factor,
                out=None if isinstance(slab.masters, SplitMasters) else unit.host.data[slab.span],
                masters=slab.masters,
                places=[
                    (part.offset, self._flat_order.place_of(part.member.name, part.span.start))
                    for part in slab.parts
                ],
            )
            steps.append((slab, step))
        written = self._to_be_written(unit)
        # Also where it fails, so that nobody waits for what will not come.
        written.add_done_callback(lambda _: self._gradients.give_back(place))
        unit_pass = UnitPass(
            unit=unit,
            steps=steps,
            averages=self.passes.averages,
            check=partial(self._check, unit, window, self._tally),
            landed=window.landed,
            written=written,
            views=_views_of(unit) - views,
            rank=self._units.index(unit) if rank is None else rank,
        )
        self.passes.submit(unit_pass)

    def _to_be_written(self, unit: Unit) -> Future[None]:  # noqa: ARG002 - of several ranks
        """What is done once the next pass has written a unit."""
        return Future()

    def _check(self, unit: Unit, window: Window, tally: _Tally) -> bool:
        """Zero missing gradients; return whether the unit may be stepped with the others."""
        for index in self._parts[unit]:
            if index not in window.on_host:
                self._gradient(unit, index, window).zero_()
        tally.is_finite = tally.is_finite and all(map(math.isfinite, window.squares.values()))
        tally.stepped += tally.is_finite
        return tally.is_finite

    def _factor(self, norm: float) -> float:
        """What ZeRO-2 multiplies gradients by, with its roundings."""
        if not self._clipping:
            return 1.0
        clip = ((torch.tensor(norm) / 1.0) + 1e-6) / self._clipping
        return float(torch.ones(1).mul_(1.0 / torch.clamp(clip, min=1.0)))

    def replay(self, steps: int) -> None:
        """Continue as a run that has taken so many steps."""
        self._stepper.replay(steps)

    def settle(self) -> None:
        """Return once every pass is taken.

        Raises:
            EngineError: Only some units have been stepped, because the step is not closed.
            BaseException: What a pass failed with.
        """
        if self._under_way:
            raise EngineError(
                "weights are read in the middle of a step, which began in the backward pass",
                key="engine.step",
                value="gradient_clipping=0",
                fix="call engine.step() first, or clip gradients",
            )
        self.passes.settle()

    # -- Averages.

    def expect(self, followers: Sequence[Follower]) -> None:
        """Have averages move with the next step from its first pass on; ``follow`` must come."""
        self._check_claimed()
        if self.is_eager and not self._under_way:
            others = (f for f in self._expected if not any(map(partial(_is_same, f), followers)))
            self._expected = [*others, *followers]

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages move with the newest step; whether there is one under way."""
        if self._under_way:
            return False
        moved = [f for f in self._moved if any(map(partial(_is_same, f), followers))]
        if not moved:
            return self.passes.follow(followers)
        if len(moved) < len(followers):
            raise _other_averages()
        self._moved = [f for f in self._moved if f not in moved]
        return True

    def _check_claimed(self) -> None:
        if self._moved:
            raise _other_averages()

    # -- What stays on the device.

    def refresh(self) -> None:
        """Have the model follow weights that were written in host memory."""
        for unit in self._units:
            unit.version += 1
            if unit.resident:
                self._hold(unit)

    def _hold(self, unit: Unit) -> None:
        with self._lock:
            if unit not in self._held:
                self._held.append(unit)
                for member in unit.members:
                    hold(member.parameter, name=member.name, step=self)

    def land(self, tensor: Any) -> None:
        """Have an awaited weight on the device, with all that came with it."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for unit in self._held:
                if any(member.parameter is tensor for member in unit.members):
                    self._land_unit(unit)
                    return

    def land_all(self) -> None:
        """Wait until all resident units have arrived on the device."""
        if not self._held:
            return
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for unit in list(self._held):
                self._land_unit(unit)

    def _land_unit(self, unit: Unit) -> None:
        self.residency.ensure(unit)
        for member in unit.members:
            release(member.parameter)
        self._held.remove(unit)

    def close(self) -> None:
        """Take gradients no more, and let go of what could not be brought to the device."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._held:
            for member in unit.members:
                release(member.parameter)
        self._held = []
        self._leaving.clear()


def _is_same(one: Follower, other: Follower) -> bool:
    return one.tensors is other.tensors and one.weight == other.weight


def _other_averages() -> EngineError:
    return EngineError(
        "averages have moved with a step in the backward pass, and were not stepped after it",
        key="ema.expect_step",
        value="gradient_clipping=0",
        fix="call ema.step() after every applied step that expect_step() came before",
    )


def _views_of(unit: Unit) -> int:
    """How many tensors and arrays share the memory of a unit's weights."""
    # What is streamed is seen on the device by its own calls alone.
    seen = (unit.host, unit.flat) if unit.resident else (unit.host,)
    return sum(torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in seen)


def _watch(parameter: Any, call: Callable[[torch.Tensor], None]) -> Any:
    """Call it with a parameter whose gradient has been added up."""
    return parameter.register_post_accumulate_grad_hook(call)


def used_after_step(unit: Unit) -> EngineError:
    """A unit that computes on after all of its gradients had come."""
    return EngineError(
        "is used again in the backward pass after its gradients were complete, and its step has "
        "begun",
        key=f"model.{unit.name}",
        value="gradient_clipping=0",
        fix="clip gradients, so that steps wait for the whole backward pass",
    )
