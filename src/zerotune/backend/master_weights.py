"""The fp32 weights that the optimizer updates, with one interface for every engine.

Under ZeRO no rank holds all master weights. With NVMe offload, not even a rank's share is in
memory. EMA, checkpoints, export and verification read and write master weights through
``MasterWeights`` and never use DeepSpeed's internals.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import torch
from typing_extensions import override

from zerotune.backend.data_access import DataAccess
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.fragments import (
    EditableFragment,
    Fragment,
    FragmentAddress,
    OptimizerStates,
    Slab,
    narrow,
)
from zerotune.errors import EngineError

if TYPE_CHECKING:
    from zerotune.backend.ema_update import EMA, EMAUpdate

_COMPARED_PARAMETERS: Final = 4

_COMPARED_ELEMENTS: Final = 64
"""Sample size of ``check_model``; a check costs a few small copies."""


class MasterLayout(ABC):
    """Placement of an engine's master weights in flat tensors (slabs).

    Args:
        addresses: This rank's fragments, ordered by slab.
        order: Name and full shape of every trainable parameter. The order is the same on all
            ranks, and parameters in the same flat tensor are consecutive.
    """

    replicated: bool = False
    """Whether every rank holds all master weights (no partitioning)."""

    def __init__(
        self,
        *,
        addresses: tuple[FragmentAddress, ...],
        order: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        self.addresses = addresses
        self.order = order
        self.edited = False
        """Master weights were written from outside; the model is updated by the next step."""

    @property
    @abstractmethod
    def tensors(self) -> Sequence[torch.Tensor]:
        """The flat tensors in the optimizer's parameter groups; their data may be on NVMe."""

    def rounded(self, address: FragmentAddress, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return fp32 values as they are read from a fragment after they were written to it."""
        return values

    def masters_of(self, address: FragmentAddress, part: slice) -> torch.Tensor:
        """Return a slice of a loaded fragment's fp32 weights, 1-D. Do not write to the result.

        Args:
            address: The fragment.
            part: Slice of the fragment to return.
        """
        return narrow(self.tensors[address.slab].reshape(-1), address)[part]

    def settle(self) -> None:  # noqa: B027 - most layouts have no such steps
        """Wait until a pending optimizer step has written every weight and state."""

    def written(self) -> str | None:
        """Return the name of a weight that other code has written, where no values can tell."""
        return None

    def begin_writing(self) -> None:  # noqa: B027 - others copy in the order of computation
        """Wait until neither a device nor another rank reads weights that will be written."""

    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:  # noqa: ARG002 - of pending steps
        """Add EMA updates to the pending optimizer step.

        Args:
            updates: The updates; all can join steps.

        Returns:
            Whether a pending step will run the updates.
        """
        return False

    @property
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and weights of the model that are copies of the master weights, between steps."""
        return ()

    def have_known_bits(self) -> Iterable[tuple[Collection[str], torch.Tensor]]:
        """Yield names of weights, and whether they are as written, for some weights together."""
        return ()

    @property
    def watched(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and weights of the model that no other code may write."""
        return self.weights

    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:  # noqa: ARG002
        """Return a fragment's weights from the model, 1-D, in the model's compute dtype.

        Args:
            address: The fragment.

        Returns:
            The weights; ``None`` if the model computes with the master weights, or if the master
            weights or the model's weights are not in memory.
        """
        return None

    def states_at_rest(self, slab: int) -> OptimizerStates | None:  # noqa: ARG002 - of most layouts
        """Return a flat tensor's states if their names, dtypes and counters are known.

        Args:
            slab: Index of the flat tensor.

        Returns:
            The states; ``None`` if the flat tensor must be loaded into memory first.
        """
        return None

    @abstractmethod
    def reading(self, slab: int) -> AbstractContextManager[Slab]:
        """Load a flat tensor into memory for reading.

        Args:
            slab: Index of the flat tensor.
        """

    @abstractmethod
    def writing(self, slab: int) -> AbstractContextManager[Slab]:
        """Load a flat tensor into memory for writing; changes are stored when the context ends.

        Args:
            slab: Index of the flat tensor.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Recompute the low-precision weights of the model from the master weights.

        Collective: every rank must call it.
        """


class MasterWeights:
    """Read, write and gather the fp32 master weights of an engine.

    The interface is the same for plain training and ZeRO stages 0-3. Optimizer states may be on the
    GPU, in host RAM or on NVMe; states on NVMe are loaded one sub-group at a time. Only trainable
    parameters have master weights.
    """

    def __init__(self, *, layout: MasterLayout, group: ProcessGroup, device: torch.device) -> None:
        self._layout = layout
        self._versions: list[int] = []
        self._written_in_place()
        self._doubtful = set[str]()
        """Names of weights that other code may have written since they were last compared."""
        self._access = DataAccess(())
        self._group = group
        self._device = device
        self.emas: WeakSet[EMA] = WeakSet()
        """EMAs attached to these weights, by weak reference."""
        self.closed = False
        """Whether the engine of these weights is closed."""
        self.bare: frozenset[int] = frozenset()
        """Ids of the parameters of a bare model; empty for an engine's weights."""

    @property
    def addresses(self) -> tuple[FragmentAddress, ...]:
        """Addresses of this rank's fragments, in the order of ``read``. Reads no weights."""
        return self._layout.addresses

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every trainable parameter by name, in the same order on all ranks."""
        return dict(self._layout.order)

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all fragments (no partitioning)."""
        return self._layout.replicated

    @property
    def group(self) -> ProcessGroup:
        """The processes over which the master weights are partitioned or replicated."""
        return self._group

    @property
    def device(self) -> torch.device:
        """The device that the engine trains on; the master weights may be on a different device."""
        return self._device

    @property
    def numel(self) -> int:
        """Number of elements of this rank's fragments."""
        return sum(address.numel for address in self.addresses)

    def watch(self) -> None:
        """Until ``close``, notice that other code uses the data of the model's weights."""
        self._access = DataAccess(self._layout.watched)

    def close(self) -> None:
        """Record that the engine is closed."""
        self.closed = True
        self._access.close()

    def settle(self) -> None:
        """Wait until a pending optimizer step has written every weight and state.

        Only code that accesses DeepSpeed's buffers directly needs to call ``settle``; zerotune's
        methods call it themselves.
        """
        self._layout.settle()

    @torch.no_grad()
    def update_emas(self, updates: Sequence[EMAUpdate]) -> None:
        """Update EMAs of the weights, reading every fragment once.

        If the optimizer step is pending, the updates become part of it, because it reads every
        weight anyway. Call ``settle`` before reading the EMAs.

        Args:
            updates: The updates. An empty sequence announces that a later step may have EMAs to
                update.
        """
        joins = all(update.joins_steps for update in updates)
        if (joins and self._layout.update_emas(updates)) or not updates:
            return
        for fragments in self._read_slabs():
            for update in updates:
                update.apply(fragments)

    @torch.no_grad()
    def check_model(self, sample: int) -> None:
        """Compare a sample of the model's weights with the master weights. Not collective.

        Weights that other code may have written since the last call are compared whole.

        A difference means that code outside the engine has replaced or changed the model's weights.
        The optimizer does not notice such a change.

        Args:
            sample: Seed for choosing the sample.
        """
        self.settle()
        if self._layout.edited:
            self._layout.edited = False
            return
        if (name := self._layout.written()) is not None:
            raise _written_elsewhere(name, "written in place since the last step")
        self._doubtful |= self._written_in_place() | self._access.take_used()
        chance = random.Random(sample)  # noqa: S311 - a sample, and no secret
        addresses = self._layout.addresses
        chosen = []
        for address in chance.sample(addresses, min(_COMPARED_PARAMETERS, len(addresses))):
            start = chance.randrange(max(1, address.numel - _COMPARED_ELEMENTS))
            chosen.append((address, slice(start, min(start + _COMPARED_ELEMENTS, address.numel))))
        known = list(self._layout.have_known_bits())
        same = self._compare(chosen, [is_same for _, is_same in known])
        for (names, _), is_same in zip(known, same, strict=True):
            self._doubtful.update(() if is_same else names)
        for address in addresses if self._doubtful else ():
            if address.name in self._doubtful:
                # One after the other, since they may be large.
                self._compare([(address, slice(0, address.numel))])
        self._doubtful.clear()

    def check_replaced(self) -> None:
        """Raise an error if other code has replaced the data of a weight of the model."""
        if (name := self._access.replaced()) is not None:
            raise _written_elsewhere(name, "other data")

    def _compare(
        self,
        chosen: Iterable[tuple[FragmentAddress, slice]],
        further: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor]:
        """Compare parts of fragments with the model, and return ``further`` in host memory."""
        pairs: list[tuple[FragmentAddress, torch.Tensor, torch.Tensor]] = []
        for address, part in chosen:
            weights = self._layout.in_model(address)
            if weights is not None:
                master = self._layout.masters_of(address, part)
                pairs.append((address, weights[part], master.to(weights.dtype)))
        on_host = _on_host([*(p[1] for p in pairs), *(p[2] for p in pairs), *further])
        heres = on_host[len(pairs) :]
        for (address, *_), there, here in zip(pairs, on_host, heres, strict=False):
            unlike = ((there != here) & ~(there.isnan() & here.isnan())).nonzero()
            if len(unlike):
                worst = int(unlike[0])
                raise _written_elsewhere(
                    address.name,
                    f"{float(there[worst]):g}, master weight {float(here[worst]):g}",
                )
        return on_host[2 * len(pairs) :]

    def _written_in_place(self) -> set[str]:
        """Names of weights that torch has counted a write to since the last call."""
        with torch._C.DisableTorchFunctionSubclass():
            now = [each._version for _, each in self._layout.weights]
        before, self._versions = self._versions, now
        if now == before:
            return set()
        versions = zip(self._layout.weights, before, now, strict=False)
        return {name for (name, _), old, new in versions if old != new}

    # torch applies this only while the generator runs, not to the caller's loop.
    @torch.no_grad()
    def read(self) -> Iterator[Fragment]:
        """Yield this rank's fragments, with one flat tensor in memory at a time. Read only."""
        for fragments in self._read_slabs():
            yield from fragments

    def _read_slabs(self) -> Iterator[list[Fragment]]:
        for index, addresses in self._by_slab():
            with self._layout.reading(index) as slab:
                flat = slab.value.detach().view(-1)
                yield [
                    Fragment(address=each, value=flat.narrow(0, each.offset, each.numel), slab=slab)
                    for each in addresses
                ]

    @torch.no_grad()
    def describe(self) -> Iterator[tuple[FragmentAddress, OptimizerStates]]:
        """Yield the address and optimizer states of each of this rank's fragments.

        Use only the names, dtypes and counters of the states: the values may still be on NVMe.
        """
        for index, addresses in self._by_slab():
            states = self._layout.states_at_rest(index)
            if states is not None:
                yield from ((address, states) for address in addresses)
                continue
            with self._layout.reading(index) as slab:
                yield from ((address, slab.states) for address in addresses)

    @contextmanager
    def editing(self) -> Iterator[Iterator[EditableFragment]]:
        """Write fragments in place; on exit, update the model's low-precision weights.

        Collective: every rank must enter and leave, because at stages 1-3 the ranks exchange the
        updated weights. The model's weights are also updated if the block raises an error::

            with master.editing() as fragments:
                for fragment in fragments:
                    fragment.value.copy_(new[fragment.address.name])
        """
        self.settle()
        self._layout.begin_writing()
        fragments = self._editable()
        try:
            yield fragments
        finally:
            fragments.close()
            with torch.no_grad(), self._group.naming("refreshing the model's weights"):
                self._layout.refresh()

    def rounded(self, address: FragmentAddress, values: torch.Tensor) -> torch.Tensor:
        """Return values as they are read from a fragment after they were written to it.

        Args:
            address: The fragment.
            values: fp32; returned themselves if every value can be stored.
        """
        return self._layout.rounded(address, values)

    @torch.no_grad()
    def _editable(self) -> Generator[EditableFragment, None, None]:
        for index, addresses in self._by_slab():
            with self._layout.writing(index) as slab:
                for address in addresses:
                    yield EditableFragment(
                        address=address, value=narrow(slab.value, address), slab=slab
                    )

    def gather(
        self, source: Callable[[Fragment], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full tensors on every rank, with one full parameter in memory at a time.

        Collective: every rank must exhaust the iterator.

        Args:
            source: Function that takes a fragment and returns the tensor to gather in its place,
                such as a state or the same part of an EMA: 1-D, with ``fragment.address.numel``
                elements. Default: ``fragment.value``.

        Yields:
            Name and full fp32 tensor in the parameter's shape, on the CPU.
        """
        self._group.barrier("gathering the weights")
        fragments = self.read()
        pending = next(fragments, None)
        for name, shape in self._layout.order:
            device = torch.device("cpu") if self._replicable else self._device
            full = torch.zeros(math.prod(shape), dtype=torch.float32, device=device)
            while pending is not None and pending.address.name == name:
                address = pending.address
                full[address.start : address.stop].copy_(
                    pending.value if source is None else source(pending)
                )
                pending = next(fragments, None)
            if not self._replicable:
                self._group.sum_(full)
            yield name, full.view(shape).cpu()
        if pending is not None:
            raise EngineError(
                f"parameter {pending.address.name!r} is missing from the order that all ranks use",
                "report this error with the model's class and the plan",
            )

    @property
    def _replicable(self) -> bool:
        return self.replicated or self._group.world_size == 1

    def _by_slab(self) -> Iterator[tuple[int, list[FragmentAddress]]]:
        self.settle()
        current: list[FragmentAddress] = []
        for address in self._layout.addresses:
            if current and address.slab != current[0].slab:
                yield current[0].slab, current
                current = []
            current.append(address)
        if current:
            yield current[0].slab, current


def _on_host(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy 1-D tensors to host memory in fp32; a device with several of them is waited for once."""
    copies = dict[int, torch.Tensor]()
    for device in dict.fromkeys(part.device for part in parts):
        indices = [index for index, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[index] for index in indices]).float().cpu()
        sizes = [len(parts[index]) for index in indices]
        copies |= zip(indices, torch.split(joined, sizes), strict=True)
    return [copies[index] for index in range(len(parts))]


# -- Layouts of engines that partition nothing, and helpers of all layouts.


Named = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(module: torch.nn.Module) -> Named:
    """Return named, non-empty parameters that require gradients; a tied parameter appears once."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        # DeepSpeed omits empty parameters from its groups.
        if p.requires_grad and math.prod(full_shape(p)) > 0
    ]


def require_trainable(module: torch.nn.Module) -> Named:
    """Return the trainable parameters of a model; raise an error if there are none."""
    named = trainable_parameters(module)
    if not named:
        raise EngineError(
            "no parameter requires a gradient",
            "set requires_grad = True for the parameters to train",
            "model",
        )
    return named


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the L2 norm of all gradients as gradient clipping computes it, without clipping."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the parameter's shape before ZeRO-3 partitioning."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class ResidentLayout(MasterLayout):
    """Layout with all flat tensors in memory, for all engines except ZeRO-3 with NVMe offload.

    Args:
        optimizer: Optimizer of the flat tensors.
        slabs: Flat tensors, fp32. A non-contiguous tensor, such as a channels_last one, is read
            and written through contiguous copies.
        addresses: See ``MasterLayout``.
        order: See ``MasterLayout``.
    """

    def __init__(
        self,
        *,
        optimizer: torch.optim.Optimizer | None,
        slabs: list[torch.Tensor],
        addresses: tuple[FragmentAddress, ...],
        order: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        super().__init__(addresses=addresses, order=order)
        self._optimizer = optimizer
        self._slabs = slabs
        for address in addresses:
            check_master(slabs[address.slab], address.name)

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._slabs

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        states = OptimizerStates.of(self._optimizer, key)
        yield Slab(value=key.data.contiguous(), states=states)

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        with self.reading(slab) as resident:
            try:
                yield resident
            finally:
                if not key.is_contiguous():
                    key.data.copy_(resident.value)
                resident.states.write_back()

    @override
    def refresh(self) -> None:
        """Do nothing: the parameters are the master weights."""


class ParameterLayout(ResidentLayout):
    """Layout without partitioning: the plain engine, and DeepSpeed's stage 0 in fp32.

    Args:
        module: The model.
        optimizer: Optimizer of the master weights; ``None`` for a module outside any engine.
    """

    replicated = True

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        named = trainable_parameters(module)
        super().__init__(
            optimizer=optimizer,
            slabs=[parameter for _, parameter in named],
            addresses=tuple(
                whole(name, parameter, slab=index, offset=0)
                for index, (name, parameter) in enumerate(named)
            ),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )


def whole(name: str, parameter: torch.nn.Parameter, *, slab: int, offset: int) -> FragmentAddress:
    """Return the address of an unpartitioned parameter.

    Args:
        name: Dotted name, as in ``named_parameters()``.
        parameter: The parameter.
        slab: Index of the flat tensor that contains the parameter.
        offset: Index of the parameter's first element in that flat tensor.
    """
    return FragmentAddress(
        name=name,
        shape=tuple(parameter.shape),
        start=0,
        numel=parameter.numel(),
        slab=slab,
        offset=offset,
    )


def check_master(tensor: torch.Tensor, name: str) -> None:
    """Raise an error unless a flat tensor is fp32."""
    if tensor.dtype != torch.float32:
        raise EngineError(
            "master weights must be fp32",
            "load the model in float32; the plan's precision sets the forward pass's dtype",
            name,
            str(tensor.dtype),
        )


def _written_elsewhere(name: str, value: str) -> EngineError:
    return EngineError(
        "the model's weights differ from the optimizer's master weights: other code replaced or "
        "changed them, so the next step would undo or ignore the change",
        "write weights through engine.master_weights.editing(), and restore swapped weights "
        "before the next step",
        name,
        value,
    )
