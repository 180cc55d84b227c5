"""The fp32 weights the optimizer updates: one view, whatever engine holds them.

Under ZeRO no rank holds all master weights, and under NVMe offload not even its own share is in
memory. Everything that must read or write them (EMA, checkpoints, export, verification) is
written on ``MasterWeights`` and never looks inside DeepSpeed.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final, Protocol
from weakref import WeakSet

import attrs
import torch
from typing_extensions import override

from zerotune.backend.distributed import ProcessGroup
from zerotune.errors import EngineError, UnsupportedEngineError

_OF_ADAM: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
_BEGIN_AT: Final[Mapping[str, float]] = {"mu_product": 1.0}
"""NAdam's product of momenta (``torch/optim/nadam.py``); whatever else is kept begins at zero."""


class OptimizerStates:
    """States, counters and other things an optimizer keeps for one tensor.

    Everything is looked up when it is asked for: an EMA, which asks for nothing, pays nothing.

    Args:
        optimizer: A ``torch.optim.Optimizer``, DeepSpeed's included; ``None`` for weights that
            nothing optimizes.
        key: The tensor, as the optimizer's groups hold it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, key: torch.Tensor) -> None:
        self._optimizer = optimizer
        self._key = key
        self._copies: dict[str, torch.Tensor] = {}
        self._coder: Any = optimizer if hasattr(optimizer, "decode_states") else None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """States with one element per weight, by name; empty before the first step.

        fp32, unless the optimizer keeps them in fewer bits (``AdamWBF16States``). Of a tensor that
        is not contiguous, or whose states are codes of one byte (``AdamW8BitStates``), they are
        copies, which ``write_back`` brings to the optimizer.
        """
        if self._coder is not None:
            if not self._copies:
                self._copies = self._coder.decode_states(self._state)
            return self._copies
        return {
            name: value if value.is_contiguous() else self._copy(name, value)
            for name, value in self._state_tensors()
            if value.numel() == self._key.numel()
            # Codes of low-bit optimizers (uint8, or a class that hides them) have the weights' size
            # too, and mean nothing without the scales of their blocks.
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.is_floating_point()
        }

    def write_back(self) -> None:
        """Have the optimizer's states be what was written to their copies."""
        if self._coder is not None:
            self._coder.encode_states(self._writable, self._copies)
            return
        for name, copy in self._copies.items():
            self._state[name].copy_(copy)

    def _copy(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._copies:
            self._copies[name] = value.contiguous()
        return self._copies[name]

    @property
    def scalars(self) -> dict[str, float]:
        """Single numbers that accompany the weights, such as NAdam's ``mu_product``."""
        return {
            name: float(value)
            for name, value in self._state_tensors()
            if value.numel() == 1 != self._key.numel() and self._coder is None
        }

    @property
    def others(self) -> tuple[str, ...]:
        """Names of what cannot be divided like the weights, such as Adafactor's row sums."""
        if self._coder is not None:
            return ()
        covered = {"step", *self.tensors, *self.scalars}
        return tuple(
            name for name, value in self._state.items() if name not in covered and value is not None
        )

    @property
    def described_on_nvme(self) -> bool:
        """Whether the other properties hold while DeepSpeed has emptied all tensors.

        It empties counters that are tensors too, and then nothing tells one from a state.
        """
        counted = not isinstance(self._state.get("step"), torch.Tensor)
        return counted and self._state.keys() <= _OF_ADAM and len(self.tensors) in (0, 2)

    @property
    def step(self) -> int | None:
        """Updates counted; ``None`` where the optimizer does not count.

        FusedAdam keeps one counter per group, on the last tensor of the group that had a
        gradient, while all of them are updated together; the largest is the true one.
        """
        if self._optimizer is None:
            return None
        peers: list[torch.Tensor] = [self._key]
        if not self._counts_each:
            for group in self._optimizer.param_groups:
                if any(self._key is other for other in group["params"]):
                    peers = group["params"]
        states = (self._optimizer.state.get(peer, {}) for peer in peers)
        steps = [int(state["step"]) for state in states if "step" in state]
        return max(steps, default=None)

    def create(self, names: tuple[str, ...]) -> None:
        """Make zero-filled states, as the optimizer itself would at its first step."""
        state, dtype = self._writable, getattr(self._optimizer, "state_dtype", None)
        if self._coder is not None:
            self._coder.create_states(state, self._key.numel())
            state.setdefault("step", 0)
            return
        if dtype is None and not self._key.is_floating_point():
            # Low halves of split master weights.
            dtype = torch.float32
        for name in names:
            state.setdefault(name, torch.zeros_like(self._key.data, dtype=dtype))
        state.setdefault("step", self._counter(0))

    def set_step(self, step: int) -> None:
        """Set the counter."""
        state = self._writable
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = self._counter(step)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the single numbers that accompany the weights."""
        state = self._writable
        for name, value in scalars.items():
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            else:
                state[name] = _scalar(value)

    def begin_scalars_anew(self) -> None:
        """Set single numbers to what they are before the first update, where that is not zero."""
        for name in _BEGIN_AT.keys() & self._state.keys():
            self._state[name].fill_(_BEGIN_AT[name])

    @property
    def _state(self) -> Mapping[str, Any]:
        return {} if self._optimizer is None else self._optimizer.state.get(self._key, {})

    def _state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                yield name, value

    @property
    def _writable(self) -> dict[str, Any]:
        if self._optimizer is None:
            raise EngineError(
                "a plain module has no optimizer whose states could be set",
                key="master_weights",
                fix="use the engine's master weights",
            )
        state: dict[str, Any] = self._optimizer.state[self._key]
        return state

    @property
    def _counts_each(self) -> bool:
        return type(self._optimizer).__module__.startswith("torch.optim")

    def _counter(self, step: int) -> Any:
        return _scalar(step) if self._counts_each else step


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float32)


_COMPARED_PARAMETERS: Final = 4
_COMPARED_ELEMENTS: Final = 64
"""What one look at the model's weights compares, which costs a few small copies."""


@attrs.frozen(kw_only=True)
class FragmentAddress:
    """Where one rank's part of one parameter lies."""

    name: str
    """Dotted name as ``named_parameters()`` gives it."""
    shape: tuple[int, ...]
    """Full, unpartitioned shape of the parameter."""
    start: int
    """First element of this part in the flattened parameter."""
    numel: int
    """Elements of this part, padding left out."""
    slab: int
    """Index of the flat tensor that holds it."""
    offset: int
    """First element of this part in that flat tensor."""

    @property
    def stop(self) -> int:
        """One past the last element in the flattened parameter."""
        return self.start + self.numel

    @property
    def full_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """``name[start:stop]``: what this part is called wherever tensors are stored by name."""
        return f"{self.name}[{self.start}:{self.stop}]"


@attrs.frozen(kw_only=True, eq=False)
class Slab:
    """A flat fp32 tensor with what the optimizer keeps for it."""

    value: torch.Tensor
    """fp32; any shape, contiguous."""
    states: OptimizerStates


@attrs.frozen(kw_only=True, eq=False)
class Fragment:
    """One rank's part of one parameter, in memory now.

    The tensors are views: valid only until the iteration moves on.
    """

    address: FragmentAddress
    value: torch.Tensor
    """fp32, 1-D, ``address.numel`` elements."""
    _slab: Slab = attrs.field(alias="slab")

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """Optimizer states by name (``exp_avg``, ``exp_avg_sq``, …), 1-D, as long as ``value``.

        Empty before the first step.
        """
        states = self._slab.states.tensors
        return {name: _narrow(state, self.address) for name, state in states.items()}

    @property
    def step(self) -> int | None:
        """Updates this fragment has seen; ``None`` where the optimizer does not count."""
        return self._slab.states.step

    @property
    def scalars(self) -> Mapping[str, float]:
        """Single numbers the optimizer keeps beside the weights, by name."""
        return self._slab.states.scalars

    @property
    def other_states(self) -> tuple[str, ...]:
        """Names of states that cannot be divided like the weights, and so are not in ``states``."""
        return self._slab.states.others


@attrs.frozen(kw_only=True, eq=False)
class EditableFragment(Fragment):
    """A fragment that may be written in place, and whose states may be created."""

    def ensure_states(self, names: tuple[str, ...]) -> Mapping[str, torch.Tensor]:
        """The states, created as zeros when the optimizer has not stepped yet.

        States are made for the whole slab at once; the views returned are this fragment's.
        """
        if not set(names) <= set(self._slab.states.tensors):
            self._slab.states.create(names)
        return self.states

    def set_step(self, step: int) -> None:
        """Set the update counter of the slab this fragment lies in."""
        self._slab.states.set_step(step)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the single numbers of the slab this fragment lies in."""
        self._slab.states.set_scalars(scalars)

    def begin_scalars_anew(self) -> None:
        """Set them to what they are before the first update."""
        self._slab.states.begin_scalars_anew()


@attrs.frozen(kw_only=True, eq=False)
class Follower:
    """An average that moves towards the weights: ``tensor.lerp_(weights, weight)``."""

    tensors: Mapping[str, torch.Tensor]
    """By the fragments' keys, as long as they are: fp32, 1-D, contiguous, on the CPU."""
    weight: float


class Average(Protocol):
    """An average of the weights that can be asked for by name."""

    name: str

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every trained parameter. Collective."""
        ...


class MasterLayout(ABC):
    """How one kind of engine lays out its master weights.

    Args:
        addresses: This rank's fragments, ordered by slab.
        order: Name and full shape of every trainable parameter, in an order that all ranks share
            and that never leaves a slab and comes back.
    """

    replicated: bool = False
    """Every rank holds everything (no partitioning)."""

    def __init__(
        self,
        *,
        addresses: tuple[FragmentAddress, ...],
        order: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> None:
        self.addresses = addresses
        self.order = order
        self.edited = False
        """Somebody else wrote master weights, which the model follows with the next step."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that changes the flat tensors; ``None`` if unknown."""
        return None

    @property
    def swapped_out(self) -> bool:
        """Whether some of the flat tensors lie on NVMe."""
        return False

    @property
    @abstractmethod
    def tensors(self) -> Sequence[torch.Tensor]:
        """The flat tensors as the optimizer's groups hold them; their data may lie on NVMe."""

    def masters_of(self, address: FragmentAddress, part: slice) -> torch.Tensor:
        """Some fp32 weights of a fragment that is in memory, 1-D; not to be written."""
        return _narrow(self.tensors[address.slab].reshape(-1), address)[part]

    def settle(self) -> None:  # noqa: B027 - most layouts have no such steps
        """Return once a step under way has written every weight and state."""

    def follow(self, followers: Sequence[Follower]) -> bool:  # noqa: ARG002 - of a step under way
        """Have averages move with a step under way; whether there is one they can move with."""
        return False

    def expect(self, followers: Sequence[Follower]) -> None:  # noqa: B027 - of most layouts
        """See ``MasterWeights.expect``."""

    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:  # noqa: ARG002
        """What the model computes with of a fragment, 1-D.

        ``None`` where that is the master weight itself, or one of both is not in memory.
        """
        return None

    def states_at_rest(self, slab: int) -> OptimizerStates | None:  # noqa: ARG002 - of most layouts
        """States of a slab of which names, dtypes and counters can be read where the slab lies.

        ``None``: only once it is in memory.
        """
        return None

    @abstractmethod
    def reading(self, slab: int) -> AbstractContextManager[Slab]:
        """Bring a slab into memory to read it."""

    @abstractmethod
    def writing(self, slab: int) -> AbstractContextManager[Slab]:
        """Bring a slab into memory; what is written to it stays."""

    @abstractmethod
    def refresh(self) -> None:
        """Recompute the low-precision weights of the model from the master weights.

        Collective: every rank must call it.
        """


class _Untracked(AbstractContextManager[Slab]):
    """Enters and leaves a context without gradients, but lets the block keep its own mode.

    ``torch.no_grad`` around a ``yield`` would reach into the caller's loop, and two interleaved
    iterations would leave gradients switched off.
    """

    def __init__(self, context: AbstractContextManager[Slab]) -> None:
        self._context = context

    @override
    def __enter__(self) -> Slab:
        with torch.no_grad():
            return self._context.__enter__()

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        with torch.no_grad():
            return self._context.__exit__(kind, error, traceback)


class MasterWeights:
    """Read, write and gather the fp32 master weights of an engine.

    Works the same for plain training, ZeRO 0-3, with optimizer states on the GPU, in host RAM
    or on NVMe (one sub-group in memory at a time). Only trainable parameters have master
    weights.
    """

    def __init__(self, *, layout: MasterLayout, group: ProcessGroup, device: torch.device) -> None:
        self._layout = layout
        self._group = group
        self._device = device
        self._before_edit: list[Callable[[], None]] = []
        self.averages: WeakSet[Average] = WeakSet()
        """Averages that were attached to these weights, as long as somebody holds them."""

    @property
    def addresses(self) -> tuple[FragmentAddress, ...]:
        """This rank's fragments, in the order ``read`` yields them. Cheap; reads no weights."""
        return self._layout.addresses

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every trainable parameter by name, in an order all ranks share."""
        return dict(self._layout.order)

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all fragments (no partitioning)."""
        return self._layout.replicated

    @property
    def group(self) -> ProcessGroup:
        """The processes that hold the weights together."""
        return self._group

    @property
    def device(self) -> torch.device:
        """Where the engine trains; the master weights may lie elsewhere."""
        return self._device

    @property
    def numel(self) -> int:
        """Elements this rank owns."""
        return sum(address.numel for address in self.addresses)

    def settle(self) -> None:
        """Return once a step under way has written every weight and state.

        What is read or written through zerotune waits by itself; this is for those who look at
        DeepSpeed's own buffers.
        """
        self._layout.settle()

    def expect(self, followers: Sequence[Follower]) -> None:
        """Have averages move with the next step, where that begins in the backward pass.

        Elsewhere nothing happens. Once the step is applied, ``follow`` must be given the same.
        """
        self._layout.expect(followers)

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages move with a step under way, which has every weight in its hands anyway.

        Whoever looks at them must ``settle`` first.

        Args:
            followers: None at all tells that there may be some after the next step.

        Returns:
            Whether they will move; ``False`` where no step is under way.
        """
        return self._layout.follow(followers)

    @torch.no_grad()
    def check_model(self, sample: int) -> None:
        """Compare some weights of the model with the master weights they are rounded from.

        The model follows no longer where its weights were replaced or written by somebody else,
        which the optimizer would not see. A few elements of a few parameters are compared.

        Args:
            sample: Which: another number, other weights. Not collective.
        """
        self.settle()
        if self._layout.edited:
            self._layout.edited = False
            return
        chance = random.Random(sample)  # noqa: S311 - a sample, and no secret
        addresses = self._layout.addresses
        pairs: list[tuple[FragmentAddress, torch.Tensor, torch.Tensor]] = []
        for address in chance.sample(addresses, min(_COMPARED_PARAMETERS, len(addresses))):
            weights = self._layout.in_model(address)
            if weights is not None:
                start = chance.randrange(max(1, address.numel - _COMPARED_ELEMENTS))
                part = slice(start, min(start + _COMPARED_ELEMENTS, address.numel))
                master = self._layout.masters_of(address, part)
                pairs.append((address, weights[part], master.to(weights.dtype)))
        if not pairs:
            return
        # As one tensor each, so that a device is waited for once.
        model = torch.cat([weights.float() for _, weights, _ in pairs]).cpu()
        masters = torch.cat([master.float() for _, _, master in pairs]).cpu()
        if torch.equal(model, masters):
            return
        at = 0
        for address, weights, _ in pairs:
            part = slice(at, at + len(weights))
            there, here = model[part], masters[part]
            at = part.stop
            alike = (there == here) | (there.isnan() & here.isnan())
            if not alike.all():
                worst = int((~alike).nonzero()[0])
                raise EngineError(
                    "the model's weights are no longer those that the optimizer steps: somebody "
                    "replaced or wrote them, and the next step would undo or miss that",
                    key=address.name,
                    value=f"{float(there[worst]):g}, master weight {float(here[worst]):g}",
                    fix="write weights through engine.master_weights.editing(), and put back what "
                    "was swapped in before the next step",
                )

    def read(self) -> Iterator[Fragment]:
        """This rank's fragments, one slab in memory at a time. Not to be written."""
        for index, addresses in self._by_slab():
            with _Untracked(self._layout.reading(index)) as slab:
                for address in addresses:
                    yield Fragment(address=address, value=_narrow(slab.value, address), slab=slab)

    def describe(self) -> Iterator[tuple[FragmentAddress, OptimizerStates]]:
        """This rank's fragments without their numbers: only names, dtypes and counters of states.

        Brings in from NVMe only slabs whose states cannot be described where they lie.
        """
        for index, addresses in self._by_slab():
            states = self._layout.states_at_rest(index)
            if states is not None:
                yield from ((address, states) for address in addresses)
                continue
            with _Untracked(self._layout.reading(index)) as slab:
                yield from ((address, slab.states) for address in addresses)

    @contextmanager
    def editing(self) -> Iterator[Iterator[EditableFragment]]:
        """Write fragments in place; leaving refreshes the model's low-precision weights.

        Collective: every rank must enter and leave, because at stages 1-3 the refreshed weights
        are exchanged. They are refreshed also when the block raises, so that the model never
        disagrees with its master weights::

            with master.editing() as fragments:
                for fragment in fragments:
                    fragment.value.copy_(new[fragment.address.name])
        """
        for call in self._before_edit:
            call()
        self.settle()
        fragments = self._editable()
        try:
            yield fragments
        finally:
            fragments.close()
            with torch.no_grad(), self._group.naming("refreshing the model's weights"):
                self._layout.refresh()

    def _editable(self) -> Generator[EditableFragment, None, None]:
        for index, addresses in self._by_slab():
            with _Untracked(self._layout.writing(index)) as slab:
                for address in addresses:
                    yield EditableFragment(
                        address=address, value=_narrow(slab.value, address), slab=slab
                    )

    def before_change(
        self, call: Callable[[], None], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], None]:
        """Have ``call`` called before every optimizer step and every edit made through this view.

        At stage 3 an optimizer steps once per sub-group, and ``call`` is called as often.

        Args:
            call: Takes nothing; what it raises stops the step.
            optimizer: What changes the weights, for a bare module; engines know theirs. A
                wrapper that has the real one as ``optimizer``, as accelerate's, will do.

        Returns:
            A function that ends it.
        """
        if self._layout.swapped_out:
            raise UnsupportedEngineError(
                "master weights on NVMe move in and out at any time",
                key="offload_optimizer.device",
                value="nvme",
                fix="read them right after the optimizer's step",
            )
        known = self._layout.optimizer or getattr(optimizer, "optimizer", optimizer)
        if not isinstance(known, torch.optim.Optimizer):
            raise UnsupportedEngineError(
                "it is unknown what changes these weights",
                key="optimizer",
                value=optimizer,
                fix="give the engine instead of its module, or the optimizer that steps",
            )
        handle = known.register_step_pre_hook(lambda *_: call())
        self._before_edit.append(call)

        def end() -> None:
            handle.remove()
            self._before_edit.remove(call)

        return end

    def gather(
        self, source: Callable[[Fragment], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors on every rank, one parameter in memory at a time.

        Collective: every rank must exhaust it.

        Args:
            source: What to gather of a fragment: ``fragment.value`` when not given; a state, or
                the matching part of an EMA shadow. 1-D, ``fragment.address.numel`` elements.

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
                f"parameter {pending.address.name!r} is out of the shared order",
                fix="report this with the model's class and the plan",
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


def _narrow(flat: torch.Tensor, address: FragmentAddress) -> torch.Tensor:
    return flat.detach().view(-1).narrow(0, address.offset, address.numel)


# -- Where engines that partition nothing keep them, and what all layouts share.


Named = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(module: torch.nn.Module) -> Named:
    """Names and parameters that require a gradient and have elements; a tied one counts once."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        # DeepSpeed leaves one without elements out of its groups: there is nothing to train.
        if p.requires_grad and math.prod(full_shape(p)) > 0
    ]


def require_trainable(module: torch.nn.Module) -> Named:
    """The trainable parameters of a model; there must be some."""
    named = trainable_parameters(module)
    if not named:
        raise EngineError("no parameter requires a gradient", key="model", fix="unfreeze some")
    return named


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradients of whole parameters; as clipping computes it, which alters them."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape before ZeRO-3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class ResidentLayout(MasterLayout):
    """Slabs that always lie in memory: all engines but ZeRO-3 with NVMe.

    Args:
        optimizer: What steps them.
        slabs: fp32. One that is not contiguous, as in channels_last, is read and written through
            copies, since its fragments are numbered as if it were.
        addresses: As for ``MasterLayout``.
        order: As for ``MasterLayout``.
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
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._slabs

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        key = self._slabs[slab]
        states = OptimizerStates(self._optimizer, key)
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
        """The parameters are the master weights."""


UNDER_WAY: Final = "zerotune_step"
"""Attribute of a ZeRO wrapper or an optimizer: what may leave a step under way, with ``settle`` and
``follow``."""


class SteppedLayout(MasterLayout):
    """Of a ZeRO wrapper, or an optimizer, whose steps may be under way when they return."""

    _wrapper: Any

    @override
    def settle(self) -> None:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        if stepping is not None:
            stepping.settle()

    @override
    def follow(self, followers: Sequence[Follower]) -> bool:
        stepping = getattr(self._wrapper, UNDER_WAY, None)
        return stepping is not None and bool(stepping.follow(followers))


class ParameterLayout(SteppedLayout, ResidentLayout):
    """The parameters are the master weights: the plain engine, and stage 0 in fp32.

    Without an optimizer: a module nobody trains through an engine.

    Args:
        module: The model.
        optimizer: What steps the master weights.
        masters: Where these are not the parameters themselves: one for each of them.
    """

    replicated = True

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        masters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._wrapper = optimizer
        named = trainable_parameters(module)
        self._pairs = list(zip(masters or (), (p for _, p in named), strict=masters is not None))
        super().__init__(
            optimizer=optimizer,
            slabs=[parameter for _, parameter in named] if masters is None else list(masters),
            addresses=tuple(
                whole(name, parameter, slab=index, offset=0)
                for index, (name, parameter) in enumerate(named)
            ),
            order=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        )

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        return self._pairs[address.slab][1].data.reshape(-1) if self._pairs else None

    @override
    def refresh(self) -> None:
        for master, parameter in self._pairs:
            parameter.data.copy_(master.data)


def whole(name: str, parameter: torch.nn.Parameter, *, slab: int, offset: int) -> FragmentAddress:
    """The address of a parameter that one rank holds whole."""
    return FragmentAddress(
        name=name,
        shape=tuple(parameter.shape),
        start=0,
        numel=parameter.numel(),
        slab=slab,
        offset=offset,
    )


def check_master(tensor: torch.Tensor, name: str) -> None:
    """Refuse a slab that is not fp32."""
    if tensor.dtype != torch.float32:
        raise EngineError(
            "master weights are fp32",
            key=name,
            value=str(tensor.dtype),
            fix="load the model in float32; the plan's precision decides what the forward uses",
        )
