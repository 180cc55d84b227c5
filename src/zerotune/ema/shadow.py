"""``EMAShadow``: an fp32 EMA of this rank's master weights; ``EMAShadows``: several EMAs.

An update reads each fragment of the master weights once, even for several shadows. The first
updates are verified: an error is raised if a shadow does not move closer to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
from typing_extensions import override

from zerotune._util.table import Line, Page, Readable
from zerotune._util.text import counted, format_size, listing, whole
from zerotune.backend.deepspeed.external import master_weights_of
from zerotune.backend.ema_update import EMAInMemory, EMATensors, EMAUpdate
from zerotune.backend.engine import StartedEngine
from zerotune.backend.step_state import surely, uninterrupted
from zerotune.ema.decay import DecaySchedule, as_schedule, decay_of_update
from zerotune.ema.stores import ELEMENT_BYTES, StoredState, as_store, room_for
from zerotune.errors import EMAError, InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerotune.backend.fragments import Fragment
    from zerotune.backend.master_weights import MasterWeights
    from zerotune.ema.stores import ShadowStore

_CHECKED_UPDATES = 3
"""Number of updates that are verified to move the shadow towards the weights."""

_ROUNDING_STEP = 2.0**-23
"""Maximum relative rounding error of fp32 per element of an update."""

_COMPARED_AT_ONCE = 2**18
"""Elements per chunk: 2 MiB in float64 fit a CPU cache, which is ten times faster."""


class EMAShadow(Readable):
    """An exponential moving average of an engine's fp32 master weights.

    Each rank averages its fragments of the master weights in fp32; the shadow needs 4 bytes per
    element. Nothing is gathered. With master weights in host memory, updates transfer nothing
    between host and device::

        ema = EMAShadow(decay=0.999).attach(engine)
        for batch in data:
            ...
            if engine.step().applied:
                ema.step()
        with ema.swapped_in():
            validate(engine)

    Args:
        decay: Decay per optimizer step: a number or a schedule from ``zerotune.ema.decay``.
        update_every: Number of optimizer steps per update. Each update applies the decay of
            ``update_every`` steps.
        start_after: Number of initial optimizer steps during which the shadow is a copy of the
            weights.
        store: Storage of the shadow: ``HostStore()``, ``DeviceStore()`` or
            ``FileStore(folder=...)``; by default host memory.

    Attributes:
        name: Name for exports: ``"ema"``, or the shadow's name in ``EMAShadows``.

    Raises:
        InvalidValueError: An argument is out of range.
    """

    name = "ema"

    def __init__(
        self,
        *,
        decay: DecaySchedule | float = 0.9999,
        update_every: int = 1,
        start_after: int = 0,
        store: ShadowStore | None = None,
    ) -> None:
        self._schedule = as_schedule(decay)
        self._update_every = whole(update_every, key="update_every")
        self._start_after = whole(start_after, key="start_after", least=0)
        self._store = as_store(store)
        self._master: MasterWeights | None = None
        self._tensors: EMATensors = EMAInMemory()
        self._exchanged: set[tuple[str, int]] = set()
        """Key of the fragment and first element of each range that contains trained weights."""
        self._kept: dict[tuple[str, int], tuple[Any, torch.Tensor]] = {}
        """Elements that the master weights would round, by the same keys: places and values."""
        self._swapped = False
        self._copied = False
        """Whether the shadow has only copied weights so far."""
        self._steps = self._checked = 0

    def attach(self, source: Any) -> Self:
        """Attach the shadow to ``source``, and copy the current weights.

        Collective: every rank must call ``attach``.

        Args:
            source: A zerotune engine, its ``master_weights``, a ``deepspeed.DeepSpeedEngine``,
                or a ``torch.nn.Module`` with fp32 parameters.

        Returns:
            This shadow.

        Raises:
            EMAError: The shadow is already attached, or the ranks' fragments lack elements of a
                trainable parameter.
            EngineError: ``source`` has no master weights.
        """
        if self._master is not None:
            raise EMAError("is already attached", "create one shadow per engine", "EMAShadow")
        master = master_weights_of(source)
        tensors = room_for(master, self._store)
        self._copy_weights(master, tensors)
        check_complete(master, tensors)
        self._tensors = tensors
        self._master = master
        self._copied = True
        master.emas.add(self)
        return self

    @property
    def attached(self) -> bool:
        """Whether the shadow is attached to an engine or a model."""
        return self._master is not None

    @property
    def swapped(self) -> bool:
        """Whether the model currently uses the EMA weights."""
        return self._swapped

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the shadow has counted."""
        return self._steps

    @property
    def decay(self) -> float:
        """Decay of the latest update; 0.0 before the first update."""
        update = self._steps - self._steps % self._update_every
        if not update:
            return 0.0
        return decay_of_update(
            self._schedule,
            step=update,
            update_every=self._update_every,
            start_after=self._start_after,
        )

    @property
    def nbytes(self) -> int:
        """Size of this rank's shadow in bytes."""
        return ELEMENT_BYTES * sum(self._tensors.edges(key)[-1] for key in self._tensors)

    def step(self) -> None:
        """Update the shadow after one applied optimizer step.

        Raises:
            EMAError: The shadow is not attached, is swapped in, or moved away from the weights in
                one of the first updates; its engine is closed; or it is attached to a bare model
                that an engine trains.
        """
        update_together(self)

    def count_step(self) -> EMAUpdate | None:
        """Count one optimizer step, and return the update that is due, or ``None``.

        ``step`` calls ``count_step`` and applies the update.

        Raises:
            EMAError: The shadow is not attached, or is swapped in; its engine is closed; or it is
                attached to a bare model that an engine trains.
        """
        check_trains(self._ready("step()", settled=False))
        self._steps += 1
        self._copied = False
        if self._steps % self._update_every:
            return None
        update, weight = self._steps // self._update_every, 1.0 - self.decay
        # While a warm-up keeps the weights unchanged, an update proves nothing; verifying each
        # update would double the cost of a long warm-up.
        early = update <= _CHECKED_UPDATES or update & (update - 1) == 0
        if early and self._checked < _CHECKED_UPDATES:
            return CheckedUpdate(tensors=self._tensors, weight=weight, shadow=self)
        return EMAUpdate(tensors=self._tensors, weight=weight)

    def count_checked(self) -> None:
        """Count one verified update."""
        self._checked += 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run the model with the EMA weights inside the block.

        Master weights and shadow are exchanged in place, without a third copy. Leaving the block
        restores weights and shadow bit for bit, even after an error. Collective: every rank must
        enter and leave the block.

        Raises:
            EMAError: The shadow is not attached, or is already swapped in.
            CollectiveError: A rank did not enter the block, for example because of ``if
                trainer.is_main: ...``.
        """
        master = self._ready("swapped_in()")
        # Before anything moves, because a rank that waits for others must still have its weights.
        master.group.barrier("running with averaged weights")
        try:
            with uninterrupted():
                self._swapped = True
                self._exchange(master, to_shadow=True)
            yield
        finally:
            surely(lambda: self._swap_back(master))

    def _swap_back(self, master: MasterWeights) -> None:
        if self._swapped:
            self._exchange(master, to_shadow=False)
        self._swapped = False

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full EMA tensor of every trainable parameter.

        Only one full tensor is in memory at a time.

        Collective: every rank must iterate to the end.

        Yields:
            Name of the parameter, and an fp32 CPU tensor of the parameter's shape. The order is the
            same on all
            ranks.
        """
        master = self._attached()

        def averaged(fragment: Fragment) -> torch.Tensor:
            return fragment.value if self._swapped else self._of(fragment)

        yield from master.gather(averaged)

    def distance(self) -> float:
        """Return the relative L2 distance between shadow and master weights over all ranks.

        Collective: every rank must call ``distance``.

        Returns:
            ``|shadow - weights| / |weights|``; 0 if shadow and weights are equal.
        """
        master = self._ready("distance()")
        apart = norm = 0.0
        for fragment in master.read():
            shadow = self._of(fragment)
            value = fragment.value.to(shadow.device)
            apart += squared_distance(shadow, value)
            norm += squared_norm(value)
        if not master.replicated:
            parts = master.group.gather((apart, norm), purpose="measure an EMA's distance")
            apart, norm = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return math.sqrt(apart / norm) if norm else math.sqrt(apart)

    def check_stepped(self) -> None:
        """Check that ``step`` has been called if the weights changed after the shadow copied them.

        Functions that save or export the shadow call ``check_stepped``. Collective: every rank must
        call it.

        Raises:
            EMAError: ``step`` has not been called since the shadow copied the weights, although the
                weights have changed.
        """
        if self._copied and not self._swapped and self.distance() > _ROUNDING_STEP:
            raise EMAError(
                "the weights have changed since the shadow copied them, but ema.step() was not "
                "called, so the shadow averages nothing",
                "call ema.step() after every applied optimizer step; if the weights were "
                "loaded, call ema.begin_anew()",
                self.name,
            )

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return ``steps`` and this rank's fragments, as views keyed by ``name[start:stop]``.

        With a ``FileStore``, every access to a fragment reads it from the file.

        Raises:
            EMAError: The shadow is not attached, or is swapped in and thus contains the trained
                weights.
        """
        self._ready("state_dict()")
        others = {"steps": torch.tensor(self._steps)}
        if isinstance(self._tensors, dict):
            return {**self._tensors, **others}
        return StoredState(lambda: self._ready("state_dict()"), self._tensors, others)

    @torch.no_grad()
    @uninterrupted()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a ``state_dict`` that the same rank of the same engine returned.

        Args:
            state: Tensors by name. Each tensor is accessed once, so the mapping may read a tensor
                from disk when it is accessed.

        Raises:
            EMAError: The shadow is not attached, is swapped in, or has different fragments; the
                shadow is unchanged. However, if only the size of a fragment differs, the fragments
                before it have already been loaded.
        """
        self._ready("load_state_dict()")
        self._check_parts({*self._tensors, "steps"}, set(state), key="state")
        for key in self._tensors:
            saved, numel = state[key], self._tensors.edges(key)[-1]
            if saved.numel() != numel:
                raise EMAError(f"has {saved.numel()} elements instead of {numel}", key=key)
            _fill(self._tensors, key, saved.view(-1))
        self._steps, self._copied = int(state["steps"]), False

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Reset the shadow to a copy of the current weights, and its step count to 0.

        Raises:
            EMAError: The shadow is not attached, or is swapped in.
        """
        self._copy_weights(self._ready("begin_anew()"), self._tensors)
        self._steps, self._checked, self._copied = 0, 0, True

    @property
    def device(self) -> torch.device:
        """Device of the shadow."""
        return self._tensors.device

    @torch.no_grad()
    def move(self, store: ShadowStore) -> None:
        """Move the shadow to ``store``; the move needs memory for a second copy.

        Raises:
            EMAError: The shadow is swapped in, or the new storage has too little space. After an
                error, the shadow stays in its old storage.
        """
        if not self.attached:
            self._store = as_store(store)
            return
        tensors = room_for(self._ready("move()"), as_store(store))
        for key, tensor in self._tensors.items():
            _fill(tensors, key, tensor)
        self._tensors, self._store = tensors, store

    @property
    def source(self) -> MasterWeights:
        """The master weights that the shadow averages.

        Raises:
            EMAError: The shadow is not attached.
        """
        return self._attached(settled=False)

    @property
    def store(self) -> ShadowStore:
        """Storage of the shadow."""
        return self._store

    @override
    def brief(self) -> str:
        """Summarise decay, storage and steps in one line."""
        attached = (
            "not attached" if self._master is None else f"{counted(self._steps, 'step')} counted"
        )
        return f"{self._schedule!r} {self._store}, {attached}"

    @override
    def page(self) -> Page:
        """Return the text of ``explain`` as a page."""
        return Page(blocks=tuple(Line(line) for line in self.explain().splitlines()))

    def explain(self) -> str:
        """Describe the EMA, its decay and its memory as text."""
        every = f", every {counted(self._update_every, 'step')}" if self._update_every > 1 else ""
        after = f", after {counted(self._start_after, 'step')}" if self._start_after else ""
        lines = [f"EMA: {self._schedule!r}{every}{after}"]
        if self._master is not None:
            lines.append(
                f"  this rank averages {self.nbytes // ELEMENT_BYTES:,} fp32 elements "
                f"{self._store} ({format_size(self.nbytes)}); {counted(self._steps, 'step')} "
                f"counted, current decay {self.decay:.6g}"
            )
        return "\n".join(lines)

    @staticmethod
    @torch.no_grad()
    def _copy_weights(master: MasterWeights, into: EMATensors) -> None:
        for fragment in master.read():
            key = fragment.address.key
            if fragment.value.numel() != into.edges(key)[-1]:
                raise EMAError(
                    f"has {fragment.value.numel()} elements instead of {into.edges(key)[-1]}",
                    "report this as a bug, with the model's class and the plan",
                    key,
                )
            _fill(into, key, fragment.value)

    def _of(self, fragment: Fragment) -> torch.Tensor:
        return self._tensors[fragment.address.key]

    @staticmethod
    def _check_parts(ours: set[str], theirs: set[str], *, key: str) -> None:
        if ours != theirs:
            raise EMAError(
                f"does not match the weights (missing {listing(sorted(ours - theirs))}, "
                f"unexpected {listing(sorted(theirs - ours))})",
                "use the model, plan and world size with which the shadow was created",
                key,
            )

    def _attached(self, *, settled: bool = True) -> MasterWeights:
        if self._master is None:
            raise EMAError(
                "is not attached to an engine or model",
                "write ema = EMAShadow(decay=0.999).attach(engine)",
                "EMAShadow",
            )
        if settled:
            # An update may be part of an optimizer's step that is still under way.
            self._master.settle()
        return self._master

    def _ready(self, what: str, *, settled: bool = True) -> MasterWeights:
        master = self._attached(settled=settled)
        if self._swapped:
            raise EMAError(
                "cannot be called while the shadow is swapped in and contains the trained weights",
                "leave the `with ema.swapped_in()` block first",
                what,
            )
        return master

    def _exchange(self, master: MasterWeights, *, to_shadow: bool) -> None:
        # Record each exchanged range: if reading a sub-group or the EMA's file fails half way,
        # undoing must touch only the ranges that were exchanged.
        with torch.no_grad(), master.editing() as fragments:
            for fragment in fragments:
                key = fragment.address.key
                for part, shadow in self._tensors.ranges(key):
                    place = key, part.start
                    if (place in self._exchanged) != to_shadow:
                        if to_shadow:
                            self._keep(place, shadow, master.rounded(fragment.address, shadow))
                        exchange(fragment.value[part], shadow)
                        if place in self._kept and not to_shadow:
                            which, values = self._kept.pop(place)
                            shadow[which] = values
                        self._exchanged ^= {place}

    def _keep(self, place: tuple[str, int], shadow: torch.Tensor, rounded: torch.Tensor) -> None:
        """Copy the elements that the master weights cannot hold, so that they come back."""
        if rounded is shadow:
            return
        lost = rounded != shadow
        few = int(lost.sum()) < lost.numel() // 4
        which = lost.nonzero().squeeze(1) if few else slice(None)
        self._kept[place] = which, shadow[which].clone()


class EMAShadows(Mapping[str, "EMAShadow"]):
    """Several shadows of the same weights, for example with different half-lives.

    An update reads every fragment once for all shadows, which saves time if the master weights are
    on NVMe or a GPU. ``EMAShadows`` is a mapping from names to shadows, as the ``shadows=``
    argument of checkpoint functions requires::

        emas = EMAShadows(
            shadows={
                "fast": EMAShadow(decay=HalfLife(steps=500)),
                "slow": EMAShadow(decay=HalfLife(steps=20_000)),
            }
        ).attach(engine)
        emas.step()
        with emas["slow"].swapped_in(): ...

    Args:
        shadows: Unattached shadows by name.

    Raises:
        InvalidValueError: No shadow is given, or the same shadow is given under two names.
    """

    def __init__(self, *, shadows: Mapping[str, EMAShadow]) -> None:
        self._shadows = dict(shadows)
        if not self._shadows or len({*map(id, self._shadows.values())}) < len(self._shadows):
            raise InvalidValueError(
                "needs at least one shadow, and each shadow needs exactly one name",
                'write EMAShadows(shadows={"fast": EMAShadow(decay=0.99)})',
                "shadows",
                list(self._shadows),
            )

    def attach(self, source: Any) -> Self:
        """Attach all shadows to ``source``, and copy the current weights. Collective.

        Args:
            source: As in ``EMAShadow.attach``.
        """
        master = master_weights_of(source)
        for name, shadow in self._shadows.items():
            shadow.attach(master)
            shadow.name = name
        return self

    def step(self) -> None:
        """Update all shadows after one applied optimizer step; see ``EMAShadow.step``."""
        update_together(*self._shadows.values())

    @property
    def nbytes(self) -> int:
        """Total size of this rank's shadows in bytes."""
        return sum(shadow.nbytes for shadow in self._shadows.values())

    def explain(self) -> str:
        """Describe every shadow as text."""
        return "\n".join(f"{name}: {shadow.explain()}" for name, shadow in self._shadows.items())

    @override
    def __getitem__(self, name: str) -> EMAShadow:
        return self._shadows[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._shadows)

    @override
    def __len__(self) -> int:
        return len(self._shadows)


# -- Updates.


@attrs.define(kw_only=True, eq=False)
class CheckedUpdate(EMAUpdate):
    """An update that is verified.

    The update must multiply the distance between shadow and weights by the decay, up to rounding
    errors. The distance is that of the first elements of each fragment.
    """

    shadow: EMAShadow
    _before: float = attrs.field(default=0.0, init=False)
    _after: float = attrs.field(default=0.0, init=False)
    _norm: float = attrs.field(default=0.0, init=False)
    """Squares of both distances and of the weights."""

    @property
    @override
    def joins_steps(self) -> bool:
        return False

    @override
    def update(self, emas: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        for ema, weight in zip(emas, weights, strict=True):
            # Comparing all elements would take several times as long as the update.
            sample = ema[:_COMPARED_AT_ONCE], weight[:_COMPARED_AT_ONCE]
            self._before += squared_distance(*sample)
            self._norm += squared_norm(sample[1])
            super().update([ema], [weight])
            self._after += squared_distance(*sample)

    def verify(self) -> None:
        """Verify the update.

        An update cannot be verified if the weights have hardly moved, for example during a warm-up
        from learning rate zero.
        """
        before, after, decay = math.sqrt(self._before), math.sqrt(self._after), 1.0 - self.weight
        allowed = decay * before + _ROUNDING_STEP * math.sqrt(self._norm)
        if not math.isfinite(after + before):
            raise EMAError(
                "the weights or the shadow are not finite",
                "clip gradients or lower the learning rate, and create a new EMAShadow",
                "ema.step()",
            )
        if after > allowed:
            raise EMAError(
                f"an update with decay {decay:.6g} changed the shadow's distance to the "
                f"weights from {before:.4g} to {after:.4g}; expected at most {allowed:.4g}",
                "make sure that nothing else writes to the shadow or the weights during the update",
                "ema.step()",
            )
        if allowed < before:
            self.shadow.count_checked()


@uninterrupted()
def update_together(*shadows: EMAShadow) -> None:
    """Update several shadows of the same weights in one pass over the fragments.

    If the optimizer's step is still pending, the updates become part of that step.

    Args:
        shadows: Shadows attached to the same engine or model.
    """
    updates = [update for shadow in shadows if (update := shadow.count_step()) is not None]
    shadows[0].source.update_emas(updates)
    for update in updates:
        if isinstance(update, CheckedUpdate):
            update.verify()


def check_trains(master: MasterWeights) -> None:
    """Check that the weights are those that a running engine or the caller updates."""
    if master.closed:
        raise EMAError(
            "the engine is closed, so its weights no longer change",
            "call ema.step() before closing the engine; attach a new EMAShadow to a new engine",
            "ema.step()",
        )
    if StartedEngine.trains(master.bare):
        raise EMAError(
            "is attached to a bare model that an engine now trains, and the engine updates its own "
            "master weights",
            "write ema = EMAShadow(decay=0.999).attach(engine) after zerotune.prepare",
            "EMAShadow",
        )


# -- Is the shadow complete?


def check_complete(master: MasterWeights, tensors: EMATensors) -> None:
    """Check that all ranks' fragments together contain every element of the trainable parameters.

    Collective: every rank must call ``check_complete``.
    """
    parameters = master.parameters
    if not parameters:
        raise EMAError(
            "there is no trainable parameter to average",
            "call requires_grad_(True) on the parameters to train before attaching the EMA",
            "attach",
        )
    total = sum(math.prod(shape) for shape in parameters.values())
    counts = master.group.gather(sum(tensors.edges(key)[-1] for key in tensors))
    count = counts[master.group.rank] if master.replicated else sum(counts)
    if count != total:
        raise EMAError(
            f"the ranks' fragments contain {count} of {total} elements of the trainable parameters",
            "attach the EMA on every rank after the engine is built; if the error persists, "
            "report it with the plan",
            "attach",
            counts,
        )


# -- Arithmetic on large flat tensors that needs only a small temporary.


def _side_by_side(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(torch.split(tensor, _COMPARED_AT_ONCE) for tensor in tensors), strict=True)


def squared_norm(tensor: torch.Tensor) -> float:
    """Return the sum of squares of a 1-D tensor, in float64."""
    return sum(float(part.double().square().sum()) for (part,) in _side_by_side(tensor))


def squared_distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the squared L2 distance of two 1-D tensors of equal length, in float64."""
    return sum(
        float(one.double().sub_(other.double()).square_().sum())
        for one, other in _side_by_side(left, right)
    )


def exchange(left: torch.Tensor, right: torch.Tensor) -> None:
    """Exchange the contents of two 1-D tensors of equal length and dtype, on any devices."""
    for one, other in _side_by_side(left, right):
        former = one.clone()
        one.copy_(other)
        other.copy_(former)


def _fill(tensors: EMATensors, key: str, values: torch.Tensor) -> None:
    """Set a fragment of an EMA."""
    for part, shadow in tensors.ranges(key):
        shadow.copy_(values[part])
