"""``Unit``: weights that are copied to the device together, and their location in host memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import attrs
import torch

from zerotune.backend.host.lanes import Copy, check_process
from zerotune.backend.step.adams import (
    VECTOR,
    Masters,
    SplitMasters,
    StochasticMasters,
    WholeMasters,
)
from zerotune.decisions import Decision
from zerotune.errors import EngineError
from zerotune.plan.context import MastersName
from zerotune.plan.facts import (
    UNIT_ALIGNED,
    inner_tensors,
    is_wrapper,
    outermost_modules,
    repeated_modules,
)

NamedModules = list[tuple[str, torch.nn.Module]]
Kind = tuple[bool, torch.dtype | None]
"""Whether parameters are trained, and their dtype; frozen ones of all dtypes move together."""


# -- Host memory of units, and this process's share of their elements.


class HostMemory:
    """Private host memory of a process that updates all weights itself.

    Args:
        pin: Whether to page-lock the memory.
    """

    def __init__(self, *, pin: bool) -> None:
        self.pins = pin

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros, private to this process.

        Args:
            numel: Number of elements of the new tensor.
            dtype: Dtype of the new tensor.
        """
        return torch.zeros(numel, dtype=dtype, pin_memory=self.pins)

    def weights(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros for a unit's weights.

        Args:
            numel: Number of elements of the new tensor.
            dtype: Dtype of the new tensor.
        """
        return self.zeros(numel, dtype)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy weights into the host memory.

        Args:
            target: Slice of a tensor returned by ``weights``.
            source: The weights.
        """
        target.copy_(source)

    def filled(self) -> None:
        """Wait until all weights of a unit are in host memory."""

    def share(self, span: slice) -> slice:
        """Return this process's share of a unit's elements in one parameter group.

        Args:
            span: Range of the group's elements in the unit.
        """
        return span

    def owned(self, sizes: Sequence[int]) -> Sequence[bool]:
        """Return which of a unit's parameters this process updates, if it updates whole ones.

        Args:
            sizes: Number of elements of each parameter.
        """
        return [True] * len(sizes)

    def keep(self, weights: torch.Tensor) -> torch.Tensor:
        """Return a unit's weights, stored in memory that outlives the engine.

        Args:
            weights: A result of ``HostMemory.weights``.
        """
        return weights


# -- A unit, its parameters and its slabs.


@attrs.frozen(kw_only=True, eq=False)
class Member:
    """One parameter of a unit, or a tensor that stores values of a quantized one."""

    name: str
    parameter: torch.Tensor
    dtype: torch.dtype
    """Dtype of the weights in the unit's memory."""
    span: slice
    """Range of the parameter's elements in the unit's flat tensors."""
    group: int | None
    """Index of the optimizer's group; ``None`` if frozen."""

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's weights.

        Args:
            flat: A flat tensor of the unit.
        """
        return flat[self.span].view(self.dtype).view(self.parameter.shape)

    def apart(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's weights in the same memory, but in a storage of their own.

        torch saves no storage that tensors of several dtypes share.

        Args:
            flat: A flat tensor of the unit, in host memory.
        """
        memory, start = flat.view(torch.uint8).numpy(), self.span.start * flat.element_size()
        count = self.parameter.numel()
        own = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=start)
        return own.view(self.parameter.shape)


@attrs.frozen(kw_only=True, eq=False)
class UnitPart:
    """The elements of a parameter that this rank updates."""

    member: Member
    span: slice
    """Range of elements in the flattened parameter."""
    offset: int
    """Offset of the first element in the slab."""
    fragments: tuple[tuple[int, slice], ...]
    """Each rank, and the range of slab elements that it would own under ZeRO-2."""
    singles: tuple[slice, ...]
    """Slab elements that ZeRO-2's Adam updates with scalar instead of vector code."""

    key: str = attrs.field(init=False)
    """Key of this part, as in ``FragmentAddress.key``."""
    place: slice = attrs.field(init=False)
    """Range of this part's elements in the slab."""

    @key.default
    def _key(self) -> str:
        return f"{self.member.name}[{self.span.start}:{self.span.stop}]"

    @place.default
    def _place(self) -> slice:
        return slice(self.offset, self.offset + self.span.stop - self.span.start)

    def runs(self) -> Iterator[tuple[slice, bool]]:
        """Yield ranges of this part in the slab, and whether scalar code updates each range."""
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
    """A unit's elements that belong to one parameter group and are updated by this rank.

    With several ranks, a slab may be empty.
    """

    group: int
    span: slice
    """Range of the slab's elements in the unit's flat tensors."""
    members: tuple[Member, ...]
    """All of the group's parameters in the unit."""
    parts: tuple[UnitPart, ...]
    key: torch.nn.Parameter
    """Tensor in the optimizer's groups: fp32 master weights, or what is stored in their place. It
    is flat, or has the shape of the parameter if each parameter is a slab."""
    masters: Masters
    """The fp32 master weights."""
    dtype: torch.dtype
    """Dtype of the weights and gradients."""
    counts: dict[str, int] = attrs.field(factory=dict)
    """Number of steps of parts that have missed some of the slab's steps, by ``UnitPart.key``."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.span.stop - self.span.start)

    def gaps(self) -> Iterator[slice]:
        """Yield padding: slab elements that belong to no parameter."""
        at = 0
        for part in self.parts:
            if at < part.offset:
                yield slice(at, part.offset)
            at = part.place.stop
        if at < self.numel:
            yield slice(at, self.numel)


_ROW: Final = 1021
"""Number of words in a sum: odd, so that no change of all signs cancels out, and prime, so that
exchanged rows of a matrix change sums."""


class Unit:
    """Weights that are copied to the device and freed there together.

    The parameters are views of one device storage. A unit empties and refills its storage, so
    tensors that autograd has saved stay valid.

    Args:
        name: Name of the module.
        members: Names and parameters, all trained and of the same dtype, or all frozen.
        order: Position of every trained parameter in ZeRO-2's flat buffers.
        device: Device that the model computes on.
        memory: Host memory for the weights.
        resident: Whether the weights stay on the device.
        masters: How each master weight is stored.
        by_parameter: Whether each parameter is a slab of its own, whole on one rank.
        in_place: Whether the model computes with the weights in host memory; the device is a CPU.
    """

    def __init__(
        self,
        *,
        name: str,
        members: Sequence[tuple[str, torch.Tensor]],
        order: FlatOrder,
        device: torch.device,
        memory: HostMemory,
        resident: bool = False,
        masters: MastersName = "fp32",
        by_parameter: bool = False,
        in_place: bool = False,
    ) -> None:
        self.name, self.resident, self._pid = name, resident, os.getpid()
        dtypes = {parameter.dtype for _, parameter in members}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self.members, self.numel = _laid_out(members, order, dtype)
        self.host = memory.weights(self.numel, dtype)
        # In fp32 these are the master weights, which writes to the model must not change.
        self.in_place = in_place and dtype != torch.float32
        self.flat = self.host
        if not self.in_place:
            self.flat = torch.empty(self.numel, dtype=dtype, device=device)
        for member in self.members:
            parameter = member.parameter
            memory.fill(self.host[member.span], parameter.data.reshape(-1).view(dtype))
            parameter.data = member.within(self.flat)
        memory.filled()
        trained = self.members[0].group is not None
        self.slabs: tuple[UnitSlab, ...] = ()
        if trained:
            slabs = self._slab_of_each if by_parameter else self._slabs
            self.slabs = tuple(slabs(order, memory, masters))
        self.owned = tuple(slab for slab in self.slabs if slab.parts)
        """Slabs with weights that this rank updates; others have no states."""
        self._storage = self.flat.untyped_storage()
        if not self.in_place:
            self._storage.resize_(0)
        self.is_here = self.in_place
        """Whether the unit has memory on the device."""
        self.loaded: tuple[int, int] | None = None
        """Version of the weights that are on the device, or being copied there."""
        self.loading: Copy | None = None
        """The running copy to the device, until waited for."""
        self.written: Future[None] | None = None
        """Done once the last step has updated the weights in host memory."""
        self.calls = 0
        """Number of running calls of the unit, forward or backward."""
        self.version = 0
        """Number of updates of the weights in host memory, by steps and edits."""
        self._sums: torch.Tensor | None = None

    def _slabs(self, order: FlatOrder, memory: HostMemory, kind: MastersName) -> Iterator[UnitSlab]:
        for group in dict.fromkeys(member.group for member in self.members):
            members = tuple(member for member in self.members if member.group == group)
            start = members[0].span.start
            after = [m.span.start for m in self.members if m.span.start > members[-1].span.start]
            span = memory.share(slice(start, min(after, default=self.numel)))
            yield self._slab(members, span, order, _masters(self.host.data[span], kind))

    def _slab_of_each(
        self, order: FlatOrder, memory: HostMemory, kind: MastersName
    ) -> Iterator[UnitSlab]:
        owned = memory.owned([member.parameter.numel() for member in self.members])
        for member, own in zip(self.members, owned, strict=True):
            span, shape = member.span, member.parameter.shape
            if not own:
                span, shape = slice(span.start, span.start), torch.Size([0])
            masters = _masters(self.host.data[span], kind, memory=memory, shape=shape)
            yield self._slab((member,), span, order, masters)

    def _slab(
        self,
        members: tuple[Member, ...],
        span: slice,
        order: FlatOrder,
        kept: tuple[torch.nn.Parameter, Masters],
    ) -> UnitSlab:
        return UnitSlab(
            group=members[0].group or 0,
            span=span,
            members=members,
            parts=tuple(_parts(members, span, order)),
            key=kept[0],
            masters=kept[1],
            dtype=self.host.dtype,
        )

    def know_bits(self) -> None:
        """Record the weights on the device, to find later writes that torch does not count."""
        self._sums = self._sum_bits()

    def has_known_bits(self) -> torch.Tensor:
        """Return whether it is certain that nobody has written the weights since ``know_bits``."""
        now = self._sum_bits()
        if now is None or self._sums is None:
            return torch.zeros(1, dtype=torch.bool)
        return (now == self._sums).all().view(1)

    def _sum_bits(self) -> torch.Tensor | None:
        words = self.flat.view(torch.int64)
        whole = len(words) // _ROW * _ROW
        # The script's pass may have left no memory, which is no reason to fail here.
        with contextlib.suppress(torch.OutOfMemoryError):
            rows = words[:whole].view(-1, _ROW).sum(1)
            return torch.cat([rows, words[whole:].sum(0, keepdim=True)])
        return None

    def wait_until_written(self) -> None:
        """Wait until the last step has updated the weights in host memory.

        Raises:
            BaseException: The update has failed.
        """
        if self.written is not None:
            if not self.written.done():
                check_process(self._pid)
            self.written.result()

    @property
    def nbytes(self) -> int:
        """Bytes that the unit occupies on the device while loaded."""
        return self.host.nbytes

    @property
    def current(self) -> tuple[int, int]:
        """Version of the weights in host memory, including writes through torch."""
        return self.version, self.host._version

    @property
    def is_current(self) -> bool:
        """Whether the newest weights are on the device or are being copied there."""
        return self.is_here and self.loaded == self.current

    def allocate(self) -> None:
        """Allocate memory on the device."""
        self._storage.resize_(self.nbytes)
        self.is_here = True

    def evict(self) -> None:
        """Free the device memory; work already queued on the current stream may still use it."""
        self._storage.resize_(0)
        self.is_here, self.loaded = False, None

    def give_back(self, memory: HostMemory) -> None:
        """Make parameters that are not on the device use their weights in host memory.

        Args:
            memory: The unit's host memory.
        """
        self.loading = self.written = None
        if self.resident and self.is_current:
            # The host memory is freed, although somebody may keep the closed engine.
            self.host = self.flat
            return
        self.host = memory.keep(self.host)
        for member in self.members:
            member.parameter.data = member.apart(self.host)


def _masters(
    weights: torch.Tensor,
    kind: MastersName,
    *,
    memory: HostMemory | None = None,
    shape: Sequence[int] = (-1,),
) -> tuple[torch.nn.Parameter, Masters]:
    """The optimizer's tensor of a slab, and master weights initialised from the weights.

    Without ``memory``, only this process's threads access them.
    """
    memory = memory or HostMemory(pin=False)
    masters: Masters
    if kind == "stochastic":
        kept, masters = weights, StochasticMasters(weights)
    elif kind == "split":
        kept = memory.zeros(weights.numel(), torch.int16)
        masters = SplitMasters(high=weights, low=kept)
    else:
        kept = weights
        if weights.dtype != torch.float32:  # fp32 weights are their own master weights.
            kept = memory.zeros(weights.numel(), torch.float32).copy_(weights)
        masters = WholeMasters(kept)
    key = torch.nn.Parameter(kept.view(tuple(shape)), requires_grad=kind == "fp32")
    return key, masters


STORED_OTHERWISE: Final = {
    "split": Decision(
        "streamed.split_masters",
        "fp32",
        "bf16 weights and the low 16 bits of each master weight",
        "saves 2 bytes of host memory per trained weight; in each step, one master "
        "weight in 131,072 (a tie that is rounded up to bf16) grows by one unit in the last "
        "place",
    ),
    "stochastic": Decision(
        "update.masters",
        "fp32",
        "bf16 weights, rounded at random after each update",
        "saves 4 bytes of host memory per trained weight; the rounding depends only on the "
        "step and the position of the weight; an EMA averages the rounded weights",
    ),
}
"""Decisions about master weights that are not stored in fp32, by the name of the storage."""


def _laid_out(
    members: Sequence[tuple[str, torch.Tensor]], order: FlatOrder, dtype: torch.dtype
) -> tuple[tuple[Member, ...], int]:
    """Assign positions to parameters, sorted by group; also return the total number of elements."""
    at, placed = 0, []
    for name, parameter in sorted(members, key=lambda member: order.group_of(member[0]) or 0):
        numel, group = parameter.nbytes // dtype.itemsize, order.group_of(name)
        span = slice(at, at + numel)
        placed.append(
            Member(name=name, parameter=parameter, dtype=parameter.dtype, span=span, group=group)
        )
        at += -(-numel // UNIT_ALIGNED) * UNIT_ALIGNED
    return tuple(placed), at


def _parts(members: Sequence[Member], span: slice, order: FlatOrder) -> Iterator[UnitPart]:
    """Yield the parts of parameters in the slab that holds the unit's elements ``span``."""
    for member in members:
        start, stop = max(member.span.start, span.start), min(member.span.stop, span.stop)
        if start < stop:
            own = slice(start - member.span.start, stop - member.span.start)
            shift = member.span.start - span.start
            fragments = ((rank, _within(f, own, shift)) for rank, f in order.fragments(member.name))
            singles = (_within(single, own, shift) for single in order.singles(member.name))
            yield UnitPart(
                member=member,
                span=own,
                offset=start - span.start,
                fragments=tuple((rank, f) for rank, f in fragments if f.start < f.stop),
                singles=tuple(each for each in singles if each.start < each.stop),
            )


def _within(elements: slice, own: slice, shift: int) -> slice:
    """The intersection of two slices, shifted by ``shift``."""
    return slice(max(elements.start, own.start) + shift, min(elements.stop, own.stop) + shift)


def make_units(
    model: torch.nn.Module,
    modules: NamedModules,
    *,
    order: FlatOrder,
    device: torch.device,
    memory: HostMemory,
    masters: MastersName = "fp32",
    by_parameter: bool = False,
    resident: int = 1,
    in_place: bool = False,
) -> tuple[list[Unit], dict[torch.nn.Module, list[Unit]]]:
    """Divide a model's parameters into units, and move all remaining parameters to the device.

    Each module streams either its frozen or its trained parameters, whichever take more memory. All
    other trained parameters, and parameters shared with unstreamed modules, form resident units,
    which stay on the device.

    Args:
        model: The model.
        modules: Names and modules to stream, one unit each; without any, all units are resident.
        order: Position of every trained parameter in ZeRO-2's flat buffers.
        device: Device that the model computes on.
        memory: Host memory for the weights.
        masters: See ``Unit``.
        by_parameter: See ``Unit``.
        resident: Largest number of resident units of each dtype.
        in_place: See ``Unit``.

    Returns:
        All units, with resident ones last, and the streamed units that each module needs.
    """
    names = {
        id(tensor): inner
        for name, parameter in model.named_parameters()
        for inner, tensor in inner_tensors(parameter, name)
    }
    outside = _outside(model, modules)
    units: list[Unit] = []
    owner: dict[int, Unit] = {}

    def add(name: str, parameters: Sequence[torch.Tensor], *, resident: bool) -> None:
        unit = Unit(
            name=name,
            members=[(names[id(p)], p) for p in parameters],
            order=order,
            device=device,
            memory=memory,
            resident=resident,
            masters=masters,
            by_parameter=by_parameter,
            in_place=in_place,
        )
        units.append(unit)
        owner.update((id(p), unit) for p in parameters)

    for name, module in modules:
        free = (t for t in tensors_of(module) if id(t) not in owner and id(t) not in outside)
        kinds = _kinds(free, names, order)
        if kinds:
            largest = max(kinds.values(), key=lambda kind: sum(p.nbytes for p in kind))
            add(name, largest, resident=False)
    rest = _kinds((t for t in tensors_of(model) if id(t) not in owner), names, order)
    for (trained, dtype), parameters in rest.items():
        for number, part in enumerate(_divided(parameters, resident) if trained else ()):
            name = f"resident {str(dtype).removeprefix('torch.')} {number}"
            add(name, part, resident=True)
    for tensor in (*tensors_of(model), *model.buffers()):
        if id(tensor) not in owner:
            tensor.data = tensor.data.to(device)
        if (quantized := getattr(tensor, "quant_state", None)) is not None:
            # The codebook stays on the device, whether the weight is streamed or not.
            quantized.to(device)
    follow_inner_tensors(model)
    for layer in model.modules():
        weight: Any = layer._parameters.get("weight")
        if type(weight).__name__ == "Int8Params" and weight.dtype == torch.int8:
            _let_compute_with(weight, layer, owner.get(id(weight)))
    return units, {module: _streamed_in(module, owner) for _, module in modules}


def _let_compute_with(weight: Any, layer: Any, unit: Unit | None) -> None:
    """Let an int8 layer of bitsandbytes, which computes with ``state.CB``, use its unit's memory.

    The scales stay on the device, whether the weight is streamed or not.
    """
    if weight.CB is not None:
        layer.init_8bit_state()
    codes = torch.nn.Parameter(weight.data, requires_grad=False)
    layer.state.CB, layer.state.SCB = codes, layer.state.SCB.to(weight.device)
    if unit is not None:
        (member,) = (each for each in unit.members if each.parameter is weight)
        unit.members += (attrs.evolve(member, name=f"{member.name}.CB", parameter=codes),)


def _streamed_in(module: torch.nn.Module, owner: Mapping[int, Unit]) -> list[Unit]:
    """The streamed units that a call of a module needs."""
    found = dict.fromkeys(owner[id(t)] for t in tensors_of(module) if id(t) in owner)
    return [unit for unit in found if not unit.resident]


def tensors_of(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Yield the tensors that store a module's parameters."""
    for parameter in module.parameters(recurse):
        for _, tensor in inner_tensors(parameter):
            yield tensor


def follow_inner_tensors(model: torch.nn.Module) -> None:
    """Put weights that wrap other tensors on the device to which these tensors have moved.

    Args:
        model: The model.
    """
    replaced: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if is_wrapper(parameter):
                module._parameters[name] = replaced.setdefault(id(parameter), wrap_again(parameter))


def wrap_again(tensor: Any, change: Callable[[Any], Any] = lambda inner: inner) -> Any:
    """Return a new parameter that wraps the same tensors as a parameter, or changed ones.

    Args:
        tensor: A frozen parameter, or a tensor that it wraps.
        change: Function from a wrapped tensor to the one in its place.
    """
    if not is_wrapper(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: wrap_again(getattr(tensor, name), change) for name in names}
    wrapped = tensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    # The constructor of parameters would wrap copies.
    wrapped._is_param = True
    return wrapped


def _outside(model: torch.nn.Module, modules: NamedModules) -> set[int]:
    """Ids of tensors that are also used by a module outside all units."""
    inside = {id(part) for _, module in modules for part in module.modules()}
    return {
        id(tensor)
        for part in model.modules()
        if id(part) not in inside
        for tensor in tensors_of(part, recurse=False)
    }


def _kinds(
    parameters: Iterator[torch.Tensor], names: Mapping[int, str], order: FlatOrder
) -> dict[Kind, list[torch.Tensor]]:
    kinds: dict[Kind, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            trained = order.group_of(names[id(parameter)]) is not None
            kind = trained, parameter.dtype if trained else None
            kinds.setdefault(kind, []).append(parameter)
    return kinds


def _divided(parameters: Sequence[torch.Tensor], count: int) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive parameters in at most ``count`` lists of about equal size."""
    size = sum(parameter.numel() for parameter in parameters) / count
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found.append(parameter)
        if sum(each.numel() for each in found) >= size:
            yield found
            found = []
    if found:
        yield found


# -- Modules to stream.


def find_units(model: torch.nn.Module, named: Sequence[str] = ()) -> NamedModules:
    """Return the modules to stream, with their names; the weights of each module form one unit.

    By default, these are the repeated blocks that diffusers declares or that zerotune knows. In
    other models, consecutive modules of the same class are streamed. If such modules are nested,
    only the outermost one is streamed.

    Args:
        model: The model.
        named: Class names or dotted names of the modules to stream, instead of the default ones.

    Raises:
        EngineError: A name in ``named`` matches no module.
    """
    repeated = [(name, model.get_submodule(name)) for name in repeated_modules(model)]
    if not named:
        return repeated
    for each in named:
        if not any(each in (name, type(part).__name__) for name, part in model.named_modules()):
            raise EngineError(
                "is neither a class name nor a dotted name of any module of the model",
                "write the class name of the model's blocks, such as "
                f"{type(repeated[0][1]).__name__ if repeated else 'Block'!r}",
                "streamed.units",
                each,
            )
    return [(name, model.get_submodule(name)) for name in outermost_modules(model, named)]


# -- Layout of trained parameters at ZeRO-2, on which its roundings depend.
#
# ZeRO-2 concatenates a group's parameters, pads them, and assigns each rank an equal part. Norms
# are summed by part. The last few elements of a part, which fill no vector, are updated by scalar
# code, whose roundings the compiler of DeepSpeed's Adam or of torch chose.


_ALIGNMENT: Final = 2
"""DeepSpeed pads a group to a multiple of this number of elements per rank."""


class FlatOrder:
    """Position of every trained parameter in ZeRO-2's flat buffers.

    Args:
        groups: Names of the parameters in each of the optimizer's groups, in the group's order.
        sizes: Number of elements of each parameter.
        world_size: Number of ranks.
        vector: Number of elements in a vector; scalar code updates the remaining ones.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        *,
        sizes: Mapping[str, int],
        world_size: int = 1,
        vector: int = VECTOR,
    ) -> None:
        self.groups, self.world_size, self._vector = groups, world_size, vector
        self._places: dict[str, tuple[int, slice]] = {}
        self._shares: list[int] = []
        for group, names in enumerate(groups):
            at = 0
            for name in names:
                self._places[name] = group, slice(at, at + sizes[name])
                at += sizes[name]
            self._shares.append(-(-at // (_ALIGNMENT * world_size)) * _ALIGNMENT)

    def group_of(self, name: str) -> int | None:
        """Return the index of a parameter's optimizer group; ``None`` if frozen.

        Args:
            name: Name of the parameter.
        """
        place = self._places.get(name)
        return None if place is None else place[0]

    def place_of(self, name: str, element: int) -> int:
        """Return the position of a flattened parameter's element in the optimizer group.

        Args:
            name: Name of the parameter.
            element: Index in the flattened parameter.
        """
        return int(self._places[name][1].start) + element

    def numel(self, name: str) -> int:
        """Return the number of elements of a trained parameter.

        Args:
            name: Name of the parameter.
        """
        place = self._places[name][1]
        return int(place.stop - place.start)

    def fragments(self, name: str) -> Iterator[tuple[int, slice]]:
        """Yield each rank, and the part of a flattened parameter that the rank owns under ZeRO-2.

        Args:
            name: Name of the parameter.
        """
        group, place = self._places[name]
        size = self._shares[group]
        for rank in range(self.world_size):
            start, stop = max(place.start, rank * size), min(place.stop, (rank + 1) * size)
            if start < stop:
                yield rank, slice(start - place.start, stop - place.start)

    def singles(self, name: str) -> Iterator[slice]:
        """Yield the ranges of a flattened parameter that ZeRO-2 updates with scalar code.

        Args:
            name: Name of the parameter.
        """
        group, place = self._places[name]
        size = self._shares[group]
        for rank in range(self.world_size):
            stop = min(place.stop, (rank + 1) * size)
            start = max(place.start, (rank + 1) * size - size % self._vector)
            if start < stop:
                yield slice(start - place.start, stop - place.start)
