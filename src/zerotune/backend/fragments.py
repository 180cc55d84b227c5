"""Fragments: the parts of master weights that this rank updates, with their optimizer states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import attrs
import torch

from zerotune.errors import EngineError

_OF_ADAM: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})

_BEGIN_AT: Final[Mapping[str, float]] = {"mu_product": 1.0}
"""NAdam's product of momenta (``torch/optim/nadam.py``); all other states start at zero."""


@attrs.frozen(kw_only=True)
class StateFormat:
    """How an optimizer stores a state, and how a checkpoint stores it."""

    dtype: str = "float32"
    block: int = 1
    """Number of weights per element: 1, or above 1 for the scales of coded states."""
    codebook: str = ""
    """Name of the codebook if the elements are codes; the scales are a state of their own."""
    whole: bool = False
    """Whether each parameter's state has its own dtype and shape, and belongs to the whole
    parameter, such as Adafactor's row sums."""

    def shape_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the state of a parameter with the given shape."""
        return shape if self.block == 1 else (-(-math.prod(shape) // self.block),)


class OptimizerStates:
    """Optimizer states and step counters of one tensor.

    Each property reads the optimizer's state on access.

    Args:
        optimizer: A ``torch.optim.Optimizer`` or a DeepSpeed optimizer; ``None`` for weights
            without an optimizer.
        key: The tensor object that is in the optimizer's parameter groups.
        coder: If the states are codes, the ``Stepper`` that creates, decodes and encodes them.
        counts: Number of updates of the fragments that have missed some, by key; ``None`` if all
            fragments are always updated.
    """

    _of_packages: ClassVar[dict[str, type[OptimizerStates]]] = {}

    def __init_subclass__(cls, *, package: str) -> None:
        cls._of_packages[package] = cls

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None, key: torch.Tensor) -> OptimizerStates:
        """Return the states of a tensor, read as the optimizer's package stores them.

        Args:
            optimizer: The optimizer, as for the constructor.
            key: The tensor object that is in the optimizer's parameter groups.
        """
        package = type(optimizer).__module__.partition(".")[0]
        return cls._of_packages.get(package, cls)(optimizer, key)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        key: torch.Tensor,
        *,
        coder: Any = None,
        counts: dict[str, int] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._key = key
        self._copies: dict[str, torch.Tensor] = {}
        self._coder = coder
        self._counts = counts

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """States with one element per weight, by name; empty before the first step.

        States are fp32, unless the optimizer stores fewer bits (``AdamWBF16States``). For a
        non-contiguous tensor, or one with one-byte states (``AdamW8BitStates``), the values are
        copies; ``write_back`` writes them back to the optimizer.
        """
        if self._coder is not None:
            if not self._copies:
                self._copies = self._coder.decode_states(self._state)
            return self._copies
        return {
            name: value if value.is_contiguous() else self._copy(name, value)
            for name, value in self._state_tensors()
            if value.numel() == self._key.numel()
            # Not the codes of low-bit optimizers (uint8, or a class that hides them): there are as
            # many codes as weights, but codes mean nothing without their blocks' scales.
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.is_floating_point()
        }

    @property
    def formats(self) -> dict[str, StateFormat]:
        """Format of every tensor in ``stored``, by name."""
        if self._coder is not None:
            return {name: each for name, each in self._coder.formats.items() if name in self._state}
        return {
            name: StateFormat(dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        }

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The states as the optimizer stores them: like ``tensors``, or codes and their scales."""
        if self._coder is None:
            return self.tensors
        if self._copies:
            self.write_back()
            self._copies = {}
        return {name: self._state[name] for name in self.formats}

    def write_back(self) -> None:
        """Write the copies from ``tensors`` to the optimizer's states."""
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
        """One-element states, such as NAdam's ``mu_product``, by name."""
        return {
            name: float(value)
            for name, value in self._state_tensors()
            if value.numel() == 1 != self._key.numel() and value.dim() < 2 and self._coder is None
        }

    def whole_of(self, address: FragmentAddress) -> dict[str, torch.Tensor]:
        """Return states that cannot be sharded like the weights; empty if the weights are sharded.

        Args:
            address: The fragment that these are the states of.
        """
        if not address.numel == address.full_numel == self._key.numel():
            return {}
        found = ((name, self._state[name]) for name in self.others)
        return {name: value for name, value in found if type(value) is torch.Tensor}

    def set_whole(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the states that cannot be sharded like the weights.

        Args:
            states: The states by name; without any, the optimizer creates all states anew.
        """
        others = self.others
        if others and not states:
            self._writable.clear()
        for name in others:
            self._writable.pop(name, None)
        for name, value in states.items():
            self._writable[name] = value

    @property
    def others(self) -> tuple[str, ...]:
        """Names of states that cannot be sharded like the weights, such as Adafactor's row sums."""
        covered = {"step", *self.formats, *self.scalars}
        return tuple(
            name for name, value in self._state.items() if name not in covered and value is not None
        )

    @property
    def described_on_nvme(self) -> bool:
        """Whether the other properties are correct while the tensors are on NVMe.

        Swapped tensors are empty, so a step counter stored as a tensor would look like a state.
        """
        counted = not isinstance(self._state.get("step"), torch.Tensor)
        return counted and self._state.keys() <= _OF_ADAM and len(self.tensors) in (0, 2)

    @property
    def counts_each(self) -> bool:
        """Whether each fragment has a step counter of its own."""
        return self._counts is not None

    def step_of(self, key: str) -> int | None:
        """Return the number of a fragment's updates; ``None`` if the optimizer has no step counter.

        FusedAdam stores a group's counter only on the group's last tensor that has a gradient. The
        method therefore returns the group's largest counter.

        Args:
            key: Key of the fragment.
        """
        if self._optimizer is None:
            return None
        if self._counts and key in self._counts:
            return self._counts[key]
        peers: list[torch.Tensor] = [self._key]
        if not self._counts_each:
            for group in self._optimizer.param_groups:
                if any(self._key is other for other in group["params"]):
                    peers = group["params"]
        states = (self._optimizer.state.get(peer, {}) for peer in peers)
        steps = [int(state["step"]) for state in states if "step" in state]
        return max(steps, default=None)

    def create(self, names: tuple[str, ...]) -> None:
        """Create zero-filled states, as the optimizer does at its first step.

        Args:
            names: Names of the states to create.
        """
        state, dtype = self._writable, getattr(self._optimizer, "state_dtype", None)
        if self._coder is not None:
            self._coder.create_states(state, self._key.numel())
            state.setdefault("step", 0)
            return
        if dtype is None and self._key.dtype != torch.float32:
            # The tensor contains the low halves of split master weights, or bf16 weights.
            dtype = torch.float32
        for name in names:
            state.setdefault(name, torch.zeros_like(self._key.data, dtype=dtype))
        state.setdefault("step", self._counter(0))

    def set_step(self, step: int, *, key: str, largest: int) -> None:
        """Set a fragment's step counter.

        Args:
            step: Number of the fragment's updates.
            key: Key of the fragment.
            largest: Largest number of updates of all fragments so far, for all of them if the
                optimizer does not count for each.
        """
        if self._counts is not None:
            # Only fragments that have missed steps count for themselves.
            self._counts.pop(key, None)
            if step != largest:
                self._counts[key] = step
        state, step = self._writable, largest
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = self._counter(step)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set one-element states, by name."""
        state = self._writable
        for name, value in scalars.items():
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(value)
            else:
                state[name] = _scalar(value)

    def begin_scalars_anew(self) -> None:
        """Reset one-element states to their initial value if that value is not zero."""
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
                "use the engine's master weights",
                "master_weights",
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


@attrs.frozen(kw_only=True)
class FragmentAddress:
    """Location of one rank's part of one parameter."""

    name: str
    """Dotted name, as in ``named_parameters()``."""
    shape: tuple[int, ...]
    """Full, unpartitioned shape of the parameter."""
    start: int
    """Index of this part's first element in the flattened parameter."""
    numel: int
    """Number of elements of this part, without padding."""
    slab: int
    """Index of the flat tensor that contains this part."""
    offset: int
    """Index of this part's first element in the flat tensor."""

    @property
    def stop(self) -> int:
        """Index one past this part's last element in the flattened parameter."""
        return self.start + self.numel

    @property
    def full_numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """``name[start:stop]``, the key under which this part is stored."""
        return f"{self.name}[{self.start}:{self.stop}]"


@attrs.frozen(kw_only=True, eq=False)
class Slab:
    """A flat fp32 tensor with its optimizer states."""

    value: torch.Tensor
    """fp32; any shape, contiguous."""
    states: OptimizerStates


@attrs.frozen(kw_only=True, eq=False)
class Fragment:
    """One rank's part of one parameter, loaded into memory.

    The tensors are views that are valid only until the next fragment is read.
    """

    address: FragmentAddress
    value: torch.Tensor
    """fp32, 1-D, ``address.numel`` elements."""
    _slab: Slab = attrs.field(alias="slab")

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """Optimizer states by name (``exp_avg``, ``exp_avg_sq``, …), 1-D, as long as ``value``.

        The mapping is empty before the first step.
        """
        states = self._slab.states.tensors
        return {name: narrow(state, self.address) for name, state in states.items()}

    @property
    def formats(self) -> Mapping[str, StateFormat]:
        """Format of every tensor in ``stored``, by name."""
        return self._slab.states.formats

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        """Like ``states``, but coded states are their codes and their blocks' scales."""
        formats, states = self.formats, self._slab.states.stored
        return {n: narrow(state, self.address, formats[n].block) for n, state in states.items()}

    @property
    def whole(self) -> Mapping[str, torch.Tensor]:
        """States that belong to the whole parameter, in their own shapes, by name."""
        return self._slab.states.whole_of(self.address)

    @property
    def step(self) -> int | None:
        """Number of updates of this fragment; ``None`` if the optimizer has no step counter."""
        return self._slab.states.step_of(self.address.key)

    @property
    def scalars(self) -> Mapping[str, float]:
        """One-element states, such as NAdam's ``mu_product``, by name."""
        return self._slab.states.scalars


@attrs.frozen(kw_only=True, eq=False)
class EditableFragment(Fragment):
    """A fragment with writable weights and states, whose missing states can be created."""

    @property
    def slab_states(self) -> OptimizerStates:
        """States of the whole flat tensor that contains this fragment."""
        return self._slab.states

    def ensure_states(self, names: tuple[str, ...]) -> None:
        """If any of the states is missing, create zeros for the whole flat tensor.

        Args:
            names: States that must exist.
        """
        if not set(names) <= set(self._slab.states.formats):
            self._slab.states.create(names)

    def set_step(self, step: int, *, largest: int | None = None) -> None:
        """Set the step counter of this fragment, or of the flat tensor that contains it.

        Args:
            step: Number of updates of this fragment.
            largest: Largest number of updates of the flat tensor's fragments so far; default: this
                fragment's.
        """
        largest = step if largest is None else largest
        self._slab.states.set_step(step, key=self.address.key, largest=largest)


def narrow(flat: torch.Tensor, address: FragmentAddress, block: int = 1) -> torch.Tensor:
    """Return a fragment's elements of a flat tensor, or of its state.

    Args:
        flat: The flat tensor, or a state of it.
        address: Place of the fragment in the flat tensor.
        block: Number of weights per element of the state.
    """
    return flat.detach().view(-1).narrow(0, address.offset // block, -(-address.numel // block))
