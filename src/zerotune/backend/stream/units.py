"""``Unit``: weights that come to the device together, and where they lie meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import attrs
import torch

from zerotune.backend.step.adams import VECTOR, Masters, SplitMasters, WholeMasters
from zerotune.errors import EngineError
from zerotune.plan.model import UNIT_ALIGNED, outermost_modules, repeated_modules

if TYPE_CHECKING:
    from zerotune.backend.stream.lanes import Copy


NamedModules = list[tuple[str, torch.nn.Module]]
Kind = tuple[bool, torch.dtype]
"""Whether parameters are trained, and their dtype."""


# -- Where units lie, and which of their elements this process steps.


class HostMemory:
    """Memory of this process alone, which steps all of it.

    Args:
        pin: Whether to page-lock it.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, for what only this process has."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self._pin)

    def weights(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, for the weights of a unit; zeros."""
        return self.zeros(numel, dtype)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy weights into some of what ``weights`` returned."""
        target.copy_(source)

    def filled(self) -> None:
        """Return once a unit's weights are all there."""

    def share(self, span: slice) -> slice:
        """Of elements that one group steps, those that this process does."""
        return span

    def keep(self, weights: torch.Tensor) -> torch.Tensor:
        """What ``weights`` returned, for the time after the engine."""
        return weights


# -- A unit, its parameters and its slabs.


@attrs.frozen(kw_only=True, eq=False)
class Member:
    """One parameter of a unit."""

    name: str
    parameter: torch.nn.Parameter
    span: slice
    """Its elements in the unit's flat tensors."""
    group: int | None
    """Index of the optimizer's group; ``None``: frozen."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """Those elements of a parameter that this rank steps."""

    member: Member
    span: slice
    """In the flattened parameter."""
    offset: int
    """First element in the slab."""
    fragments: tuple[tuple[int, slice], ...]
    """Ranks, and what lies in their parts at ZeRO-2, in the slab."""
    singles: tuple[slice, ...]
    """What ZeRO-2 steps one by one, in the slab."""

    @property
    def key(self) -> str:
        """As ``FragmentAddress.key``."""
        return f"{self.member.name}[{self.span.start}:{self.span.stop}]"

    @property
    def place(self) -> slice:
        """Its elements in the slab."""
        return slice(self.offset, self.offset + self.span.stop - self.span.start)

    def runs(self) -> Iterator[tuple[slice, bool]]:
        """Its elements in the slab, cut; and whether they are stepped one by one."""
        at = self.offset
        for single in self.singles:
            if at < single.start:
                yield slice(at, single.start), False
            yield single, True
            at = single.stop
        if at < self.place.stop:
            yield slice(at, self.place.stop), False


@attrs.frozen(kw_only=True, eq=False)
class UnitSlab:
    """Of a unit, what one group of the optimizer steps on this rank: what the layout calls a slab.

    It may be empty where there are several ranks.
    """

    group: int
    span: slice
    """Its elements in the unit's flat tensors."""
    members: tuple[Member, ...]
    """All that the group has in the unit."""
    parts: tuple[Part, ...]
    key: torch.nn.Parameter
    """Flat, what the optimizer's groups hold: the fp32 weights, or their low halves."""
    masters: Masters
    """The fp32 weights."""
    dtype: torch.dtype
    """Of the weights, and of their gradients."""

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.span.stop - self.span.start)

    def gaps(self) -> Iterator[slice]:
        """Elements of no parameter."""
        at = 0
        for part in self.parts:
            if at < part.offset:
                yield slice(at, part.offset)
            at = part.place.stop
        if at < self.numel:
            yield slice(at, self.numel)


class Unit:
    """Weights that come to the device together.

    The parameters are views of one storage of the device, which is of this unit alone: emptied
    and filled again, it is what autograd saved.

    Args:
        name: Of the module.
        members: Names and parameters; all of one dtype, trained or none of them.
        order: Which parameters are trained, and where they are at ZeRO-2.
        device: Where the model computes.
        memory: Where the weights lie meanwhile.
        resident: Whether the weights stay on the device.
        split: Whether the master weights are those in bf16 and their low halves.
    """

    def __init__(
        self,
        *,
        name: str,
        members: Sequence[tuple[str, torch.nn.Parameter]],
        order: FlatOrder,
        device: torch.device,
        memory: HostMemory,
        resident: bool = False,
        split: bool = False,
    ) -> None:
        self.name, self.resident = name, resident
        dtype = members[0][1].dtype
        self.members, self.numel = _laid_out(members, order)
        self.host = memory.weights(self.numel, dtype)
        self.flat = torch.empty(self.numel, dtype=dtype, device=device)
        for member in self.members:
            flat, parameter = self.flat[member.span], member.parameter
            memory.fill(self.host[member.span], parameter.data.reshape(-1))
            parameter.data = flat.view(parameter.shape)
        memory.filled()
        trained = self.members[0].group is not None
        self.slabs = tuple(self._slabs(order, memory, split)) if trained else ()
        self._storage = self.flat.untyped_storage()
        self._storage.resize_(0)
        self.is_here = False
        """Whether it has memory on the device."""
        self.loaded: tuple[int, int] | None = None
        """The version that is on the device, or on its way there."""
        self.loading: Copy | None = None
        """The copy under way, until something has waited for it."""
        self.written: Future[None] | None = None
        """Done once the pass of the last step has written the host's weights."""
        self.calls = 0
        """Calls of it under way, in either pass."""
        self.version = 0
        """Counts what has been written to the host's weights by passes and edits."""

    def _slabs(self, order: FlatOrder, memory: HostMemory, split: bool) -> Iterator[UnitSlab]:
        for group in dict.fromkeys(member.group for member in self.members):
            members = tuple(member for member in self.members if member.group == group)
            start = members[0].span.start
            after = [m.span.start for m in self.members if m.span.start > members[-1].span.start]
            span = memory.share(slice(start, min(after, default=self.numel)))
            key, masters = _masters(self.host.data[span], split)
            yield UnitSlab(
                group=group or 0,
                span=span,
                members=members,
                parts=tuple(_parts(members, span, order)),
                key=key,
                masters=masters,
                dtype=self.host.dtype,
            )

    @property
    def nbytes(self) -> int:
        """Bytes on the device while it is there."""
        return self.host.nbytes

    @property
    def current(self) -> tuple[int, int]:
        """The version of the host's weights; writes through torch change it too."""
        return self.version, self.host._version

    @property
    def is_current(self) -> bool:
        """Whether the newest weights are on the device, or on their way there."""
        return self.is_here and self.loaded == self.current

    def of_member(self, member: Member) -> torch.Tensor:
        """The host's weights of a parameter, in its shape; not waited for."""
        return self.host[member.span].view(member.parameter.shape)

    def allocate(self) -> None:
        """Take memory on the device."""
        self._storage.resize_(self.nbytes)
        self.is_here = True

    def evict(self) -> None:
        """Give the device's memory back; what is queued on the current stream may still use it."""
        self._storage.resize_(0)
        self.is_here, self.loaded = False, None

    def give_back(self, memory: HostMemory) -> None:
        """Leave parameters that are not on the device with their weights in host memory."""
        stays = self.resident and self.is_current
        self.host = memory.keep(self.host)
        self.loading = self.written = None
        for member in self.members if not stays else ():
            member.parameter.data = self.of_member(member)


def _masters(weights: torch.Tensor, split: bool) -> tuple[torch.nn.Parameter, Masters]:
    """Master weights of a slab, which are equal to its weights, and what the optimizer holds."""
    if split:
        low = torch.nn.Parameter(torch.zeros_like(weights, dtype=torch.int16), requires_grad=False)
        return low, SplitMasters(high=weights, low=low.data)
    key = torch.nn.Parameter(weights.float())
    return key, WholeMasters(key.data)


def _laid_out(
    members: Sequence[tuple[str, torch.nn.Parameter]], order: FlatOrder
) -> tuple[tuple[Member, ...], int]:
    """Give each parameter its place, those of one group together; and the elements of all."""
    at, placed = 0, []
    for name, parameter in sorted(members, key=lambda member: order.group_of(member[0]) or 0):
        span, group = slice(at, at + parameter.numel()), order.group_of(name)
        placed.append(Member(name=name, parameter=parameter, span=span, group=group))
        at += -(-parameter.numel() // UNIT_ALIGNED) * UNIT_ALIGNED
    return tuple(placed), at


def _parts(members: Sequence[Member], span: slice, order: FlatOrder) -> Iterator[Part]:
    """What of each parameter lies in a slab, which has these elements of the unit."""
    for member in members:
        start, stop = max(member.span.start, span.start), min(member.span.stop, span.stop)
        if start < stop:
            own = slice(start - member.span.start, stop - member.span.start)
            shift = member.span.start - span.start
            fragments = ((rank, _within(f, own, shift)) for rank, f in order.fragments(member.name))
            singles = (_within(single, own, shift) for single in order.singles(member.name))
            yield Part(
                member=member,
                span=own,
                offset=start - span.start,
                fragments=tuple((rank, f) for rank, f in fragments if f.start < f.stop),
                singles=tuple(each for each in singles if each.start < each.stop),
            )


def _within(elements: slice, own: slice, shift: int) -> slice:
    """Those of a parameter's elements that are its own, ``shift`` further on."""
    return slice(max(elements.start, own.start) + shift, min(elements.stop, own.stop) + shift)


def make_units(
    model: torch.nn.Module,
    modules: NamedModules,
    *,
    order: FlatOrder,
    device: torch.device,
    memory: HostMemory,
    split: bool = False,
) -> tuple[list[Unit], dict[torch.nn.Module, list[Unit]]]:
    """Lay a model's parameters out in units; frozen ones outside of all just move to the device.

    Of a module the larger kind is streamed: its frozen base, or what of it is trained. The rest of
    what is trained, and what a module shares with others outside, stays on the device. ``split`` is
    that of ``Unit``. Returned are the units, resident ones last, and those each module needs.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    outside = _outside(model, modules)
    units: list[Unit] = []
    owner: dict[int, Unit] = {}

    def add(name: str, parameters: Sequence[torch.nn.Parameter], *, resident: bool) -> None:
        unit = Unit(
            name=name,
            members=[(names[id(p)], p) for p in parameters],
            order=order,
            device=device,
            memory=memory,
            resident=resident,
            split=split,
        )
        units.append(unit)
        owner.update((id(p), unit) for p in parameters)

    for name, module in modules:
        free = (p for p in module.parameters() if id(p) not in owner and id(p) not in outside)
        kinds = _kinds(free, names, order)
        if kinds:
            largest = max(kinds.values(), key=lambda kind: sum(p.nbytes for p in kind))
            add(name, largest, resident=False)
    rest = _kinds((p for p in model.parameters() if id(p) not in owner), names, order)
    for (trained, dtype), parameters in rest.items():
        if trained:
            add(f"resident {str(dtype).removeprefix('torch.')}", parameters, resident=True)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in owner:
            tensor.data = tensor.data.to(device)
        elif (quantized := getattr(tensor, "quant_state", None)) is not None:
            # How to read it, which stays.
            quantized.to(device)
    return units, {module: _streamed_in(module, owner) for _, module in modules}


def _streamed_in(module: torch.nn.Module, owner: Mapping[int, Unit]) -> list[Unit]:
    """The units that a call of a module needs."""
    found = dict.fromkeys(owner[id(p)] for p in module.parameters() if id(p) in owner)
    return [unit for unit in found if not unit.resident]


def _outside(model: torch.nn.Module, modules: NamedModules) -> set[int]:
    """Ids of the parameters that something outside of all units has too."""
    inside = {id(part) for _, module in modules for part in module.modules()}
    return {
        id(parameter)
        for part in model.modules()
        if id(part) not in inside
        for parameter in part.parameters(recurse=False)
    }


def _kinds(
    parameters: Iterator[torch.nn.Parameter], names: Mapping[int, str], order: FlatOrder
) -> dict[Kind, list[torch.nn.Parameter]]:
    kinds: dict[Kind, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.numel():
            kind = order.group_of(names[id(parameter)]) is not None, parameter.dtype
            kinds.setdefault(kind, []).append(parameter)
    return kinds


# -- Which modules are units.


def find_units(model: torch.nn.Module, named: Sequence[str] = ()) -> NamedModules:
    """The modules whose weights are streamed, each as a whole; of nested ones the outermost.

    They are those that the user names, else the blocks that diffusers calls repeated and those that
    the library knows, else modules of one class that stand in a row.

    Args:
        model: The model.
        named: Names of classes, or dotted names of modules.

    Raises:
        EngineError: A name is of no module with weights.
    """
    repeated = [(name, model.get_submodule(name)) for name in repeated_modules(model)]
    if not named:
        return repeated
    for each in named:
        if not any(each in (name, type(part).__name__) for name, part in model.named_modules()):
            raise EngineError(
                "is neither the class nor the dotted name of a module of the model",
                key="streamed.units",
                value=each,
                fix=f"such as {type(repeated[0][1]).__name__ if repeated else 'Block'!r}",
            )
    return [(name, model.get_submodule(name)) for name in outermost_modules(model, named)]


# -- How ZeRO-2 lays trained parameters out, which its roundings depend on.
#
# It joins the parameters of a group, pads them, and gives each rank an equal part. Norms are added
# up by part, and the last few elements of a part, which fill no vector, are stepped one by one,
# where the compiler of DeepSpeed's Adam chose the roundings.


_ALIGNMENT: Final = 2
"""Elements to a multiple of which DeepSpeed pads a group for each rank."""


class FlatOrder:
    """Where ZeRO-2 would have each parameter.

    Args:
        groups: Names of the parameters, by the optimizer's group and in its order.
        sizes: Elements of each parameter.
        world_size: Number of ranks.
    """

    def __init__(
        self, groups: Sequence[Sequence[str]], *, sizes: Mapping[str, int], world_size: int = 1
    ) -> None:
        self.groups, self.world_size = groups, world_size
        self._places: dict[str, tuple[int, slice]] = {}
        self._parts: list[int] = []
        for group, names in enumerate(groups):
            at = 0
            for name in names:
                self._places[name] = group, slice(at, at + sizes[name])
                at += sizes[name]
            self._parts.append(-(-at // (_ALIGNMENT * world_size)) * _ALIGNMENT)

    def group_of(self, name: str) -> int | None:
        """Index of the optimizer's group; ``None``: frozen."""
        place = self._places.get(name)
        return None if place is None else place[0]

    def place_of(self, name: str, element: int) -> int:
        """Where an element of the flattened parameter is in its group."""
        return int(self._places[name][1].start) + element

    def fragments(self, name: str) -> Iterator[tuple[int, slice]]:
        """Ranks, and which elements of the flattened parameter lie in their parts."""
        group, place = self._places[name]
        size = self._parts[group]
        for rank in range(self.world_size):
            start, stop = max(place.start, rank * size), min(place.stop, (rank + 1) * size)
            if start < stop:
                yield rank, slice(start - place.start, stop - place.start)

    def singles(self, name: str) -> Iterator[slice]:
        """Elements of the flattened parameter that are stepped one by one."""
        group, place = self._places[name]
        size = self._parts[group]
        for rank in range(self.world_size):
            stop = min(place.stop, (rank + 1) * size)
            start = max(place.start, (rank + 1) * size - size % VECTOR)
            if start < stop:
                yield slice(start - place.start, stop - place.start)
