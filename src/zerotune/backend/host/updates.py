"""``Update``: how units' weights are updated: by an Adam on the host, or on the device.

On the host, one pass over memory updates all weights of a unit. On the device, an optimizer's own
code updates one parameter after the other: master weights, states and gradient are copied to the
device, and weights and states back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.ema_update import EMAInMemory, EMAUpdate
from zerotune.backend.host.units import FlatOrder, HostMemory, Unit, UnitPart, UnitSlab
from zerotune.backend.optimizers.classes import noise_bits, noise_key
from zerotune.backend.optimizers.client import STOPPED
from zerotune.backend.step.adams import SlabStep, move_into, moved, stepper_of
from zerotune.backend.step.kernel import HostStepOp, Piece, ema_parts
from zerotune.errors import OptimizerError
from zerotune.plan.memory.hosted import NOISE_PERIOD, WEIGHTS_AT_A_TIME

Run = Callable[[Sequence[EMAUpdate], Collection[UnitPart]], None]
"""Function that updates a unit and EMAs of its weights, except for parts without a gradient."""


class Update(ABC):
    """Updates the weights of units."""

    @abstractmethod
    def begin(
        self, unit: Unit, gradients: Mapping[UnitSlab, torch.Tensor], *, factor: float
    ) -> Run:
        """Record the hyperparameters of a unit's step, without updating anything yet.

        Args:
            unit: The unit.
            gradients: Flat gradients, complete once the returned function is called.
            factor: Multiplier for the gradients.

        Returns:
            The function that updates the unit.
        """

    @abstractmethod
    def take_back(self, unit: Unit) -> None:
        """Undo ``begin``, after the returned function was not called."""

    @abstractmethod
    def replay(self, steps: int) -> None:
        """Continue as if ``steps`` optimizer steps had been taken.

        Args:
            steps: Number of steps.
        """


def average(slab: UnitSlab, part: UnitPart, updates: Sequence[EMAUpdate]) -> None:
    """Update EMAs of weights that do not change any more.

    Args:
        slab: The slab of the weights.
        part: The weights.
        updates: The updates.
    """
    size = part.place.stop - part.offset
    for start, stop, emas in ema_parts(updates, part.key, 0, size):
        weight = slab.masters.read(slice(part.offset + start, part.offset + stop))
        for ema in emas:
            ema.tensor.lerp_(weight, ema.weight)


# -- On the host.


class AdamOnHost(Update):
    """Update units in host memory, with the arithmetic of DeepSpeed's or torch's Adam.

    Args:
        op: The compiled kernels.
        adam: An Adam optimizer that ``stepper_of`` supports; its parameters are the tensors
            ``UnitSlab.key``.
        order: Position of every trained parameter in ZeRO-2's flat buffers.
    """

    def __init__(self, *, op: HostStepOp, adam: Any, order: FlatOrder) -> None:
        self._adam, self._order = adam, order
        self._stepper = stepper_of(adam)(op=op, adam=adam)

    @override
    def begin(
        self, unit: Unit, gradients: Mapping[UnitSlab, torch.Tensor], *, factor: float
    ) -> Run:
        groups = self._adam.param_groups
        steps = [
            self._stepper.begin(
                slab.key,
                gradient=gradients[slab],
                group=groups[slab.group],
                factor=factor,
                out=None if slab.masters.holds_weights else unit.host.data[slab.span],
                masters=slab.masters,
                places=self._places(slab),
            )
            for slab in unit.owned
        ]

        def run(emas: Sequence[EMAUpdate], still: Collection[UnitPart]) -> None:
            for slab, step in zip(unit.owned, steps, strict=True):
                _run(slab, step, emas, still)

        return run

    def _places(self, slab: UnitSlab) -> list[tuple[int, int]]:
        return [
            (part.offset, self._order.place_of(part.member.name, part.span.start))
            for part in slab.parts
        ]

    @override
    def take_back(self, unit: Unit) -> None:
        for slab in unit.owned:
            self._adam.state[slab.key]["step"] -= 1

    @override
    def replay(self, steps: int) -> None:
        self._stepper.replay(steps)


def _run(
    slab: UnitSlab, step: SlabStep, updates: Sequence[EMAUpdate], still: Collection[UnitPart]
) -> None:
    counts = slab.counts
    has_singles = step.whole is None and any(part.singles for part in slab.parts)
    if not updates and not has_singles and not still and not counts:
        step.run([Piece(0, step.masters.numel)])
        return
    # An EMA in a file is in memory until its next elements are opened.
    together = all(isinstance(update.tensors, EMAInMemory) for update in updates)
    pieces = []
    # Padding between parameters stays zero. If it were updated with the last elements, it would
    # extend them to whole vectors.
    for part in slab.parts:
        taken = counts.get(part.key, step.taken)
        if part in still:
            counts[part.key] = taken
            average(slab, part, updates)
            continue
        if part.key in counts:
            counts[part.key] = taken + 1
        own = step.after(taken)
        for piece in _pieces(part, own, updates):
            if together and own is step:
                pieces.append(piece)
            else:
                own.run([piece])
    if pieces:
        step.run(pieces)


def _pieces(part: UnitPart, step: SlabStep, updates: Sequence[EMAUpdate]) -> Iterator[Piece]:
    for run, is_single in part.runs() if step.whole is None else [(part.place, False)]:
        inside = run.start - part.offset, run.stop - part.offset
        for start, stop, emas in ema_parts(updates, part.key, *inside):
            yield Piece(part.offset + start, part.offset + stop, emas, is_single=is_single)


# -- On the device.


class OptimizerOnDevice(Update):
    """Update units on the device, one parameter at a time, by an optimizer's own code.

    Args:
        optimizer: The optimizer that keeps the states in host memory; its parameters are the
            tensors ``UnitSlab.key``, of which each is one whole parameter.
        make: Function that creates another one of the same class from parameter groups, whose code
            updates copies on the device.
        order: Positions of the parameters' elements, on which random rounding depends.
        memory: Host memory for the states.
        device: The device.
    """

    def __init__(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        make: Callable[[Sequence[Mapping[str, Any]]], torch.optim.Optimizer],
        order: FlatOrder,
        memory: HostMemory,
        device: torch.device,
    ) -> None:
        self._optimizer, self._make, self._order = optimizer, make, order
        nothing = [
            {**group, "params": [torch.nn.Parameter(torch.zeros(1))]}
            for group in optimizer.param_groups
        ]
        self._worker = worker = make(nothing)
        # Adagrad creates its states before the first step, here from what is stored of the masters.
        optimizer.state.clear()
        self._begins_with_states = bool(worker.state)
        self._memory, self._device = memory, device
        self._module = accelerator_of(device).streams
        # They take turns, so that copies in both directions and updates overlap.
        count = 0 if self._module is None else WEIGHTS_AT_A_TIME
        self._streams = [self._module.Stream(device) for _ in range(count)]
        # Random numbers of a step, drawn once for all weights.
        self._noise, self._drawn_for = torch.empty(0), -1
        self._taken: Counter[Unit] = Counter()
        self._taken_before = 0
        # Not torch's wrapper, which calls the hooks of whole steps.
        step: Any = type(worker).step
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", 0) else step

    @override
    def begin(
        self, unit: Unit, gradients: Mapping[UnitSlab, torch.Tensor], *, factor: float
    ) -> Run:
        taken = self._taken_before + self._taken[unit]
        self._taken[unit] += 1
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return partial(self._run, unit, gradients, factor, groups, taken)

    @override
    def take_back(self, unit: Unit) -> None:
        self._taken[unit] -= 1

    @override
    def replay(self, steps: int) -> None:
        self._taken.clear()
        self._taken_before = steps

    def _run(
        self,
        unit: Unit,
        gradients: Mapping[UnitSlab, torch.Tensor],
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        taken: int,
        emas: Sequence[EMAUpdate],
        still: Collection[UnitPart],
    ) -> None:
        streams = cycle(self._streams)
        # Matrices alternate with biases in a model, and would all be on the same stream.
        for slab in sorted(unit.owned, key=lambda each: -each.key.numel()):
            group = groups[slab.group]
            if slab.parts[0] in still or group.get(STOPPED):
                continue
            with self._on(next(streams, None)):
                weight = self._updated(slab, gradients[slab], factor, group)
                slab.masters.store(weight, partial(self._add_noise, slab, taken))
                if not slab.masters.holds_weights:
                    move_into(unit.host.data[slab.span], weight.to(unit.host.dtype))
                # Before the next one is copied.
                del weight
        for stream in self._streams:
            stream.synchronize()
        for slab in unit.owned:
            average(slab, slab.parts[0], emas)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self._module.stream(stream)

    def _updated(
        self, slab: UnitSlab, came: torch.Tensor, factor: float, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """Run the optimizer's code on a slab and its gradient; return the new weights, flat."""
        worker, kept, shape = self._worker, self._optimizer.state[slab.key], slab.key.shape
        weight = torch.nn.Parameter(slab.masters.fetch(self._device).view(shape))
        weight.grad = moved(came, self._device).to(torch.float32, copy=True).view(shape)
        if factor != 1.0:
            weight.grad *= factor
        for other in worker.param_groups:
            other["params"] = []
        own = worker.param_groups[slab.group]
        own.update(group, params=[weight])
        state = {name: self._uploaded(slab, name, value) for name, value in kept.items()}
        if not state and self._begins_with_states:
            state = dict(self._make([{**group, "params": [weight]}]).state[weight])
        worker.state = defaultdict(dict, {weight: state} if state else {})
        self._step(worker)
        _check_unchanged(worker, own, group)
        for name, value in worker.state[weight].items():
            kept[name] = self._downloaded(value, kept.get(name))
        # The optimizer's copy of the states, and the gradient, need device memory no longer.
        worker.state, own["params"], weight.grad = defaultdict(dict), [], None
        return weight.data.view(-1)

    def _uploaded(self, slab: UnitSlab, name: str, value: Any) -> Any:
        # torch keeps counters and other single numbers in host memory.
        single = name == "step" or (
            isinstance(value, torch.Tensor) and value.dim() == 0 != slab.key.dim()
        )
        return (
            value if single or not isinstance(value, torch.Tensor) else moved(value, self._device)
        )

    def _downloaded(self, value: Any, home: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        if type(value) is not torch.Tensor:
            return value.cpu()
        if not isinstance(home, torch.Tensor) or (home.shape, home.dtype, home.is_pinned()) != (
            value.shape, value.dtype, self._memory.pins,
        ):  # fmt: skip
            home = self._memory.zeros(value.numel(), value.dtype).view(value.shape)
        move_into(home, value)
        return home

    def _add_noise(self, slab: UnitSlab, taken: int, words: torch.Tensor) -> None:
        """Add random numbers from 0 to 65,535, which only depend on the step and the position."""
        if self._drawn_for != taken:
            self._draw(taken)
        # Groups, whose positions all begin at 0, begin at different numbers.
        place = self._order.place_of(slab.parts[0].member.name, 0) + noise_key(0, slab.group)
        begin = self._noise[place % NOISE_PERIOD :]
        later = torch.split(words[begin.numel() :], NOISE_PERIOD)
        for part in (words[: begin.numel()], *later):
            part.add_(begin[: part.numel()])
            begin = self._noise

    def _draw(self, taken: int) -> None:
        """Draw the random numbers of a step."""
        # Before the memory of the next ones is allocated, for which there may be too little.
        self._noise, self._drawn_for = torch.empty(0), -1
        at = torch.arange(NOISE_PERIOD, dtype=torch.int32, device=self._device)
        # In parts, of which each needs memory for another copy.
        for part in torch.split(at, _DRAWN_AT_ONCE):
            noise_bits(noise_key(taken, 0), part).bitwise_and_(0xFFFF)
        self._noise, self._drawn_for = at, taken
        if self._module is not None:
            # The other streams read the numbers too.
            self._module.current_stream(self._device).synchronize()


_DRAWN_AT_ONCE: Final = 2**19
"""Elements; a part with its copy is in a processor's or a card's cache."""


def _check_unchanged(
    worker: torch.optim.Optimizer, group: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    """Refuse an optimizer that keeps values for all weights together in its groups."""
    changed = [name for name, value in before.items() if group[name] is not value]
    changed = [name for name in changed if bool(group[name] != before[name])]
    if changed:
        raise OptimizerError(
            f"the optimizer changes {changed[0]} of its parameter groups in a step, so its states "
            "are not per weight, and it cannot update one weight at a time",
            'use AdamW or Adafactor, or update="host"',
            "optimizer.type",
            type(worker).__name__,
        )
