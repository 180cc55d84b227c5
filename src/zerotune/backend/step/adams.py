"""Fused steps of all Adam variants in host memory: one pass over memory per slab (flat tensor).

``Stepper.begin`` counts a step and records its hyperparameters. It returns a ``SlabStep``, which
updates nothing until it is run. A ``SlabStep`` can be run on ranges of any size and from any
thread.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Final

import attrs
import torch
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from typing_extensions import override

from zerotune.backend.optimizers.classes import (
    AdamW8BitStates,
    AdamWBF16States,
    noise_bits,
    noise_key,
    rounded_by,
    scale_of,
    update_chunk,
)
from zerotune.backend.optimizers.client import STOPPED
from zerotune.backend.step.kernel import (
    AdamNumbers,
    CodedMoment,
    HostStepOp,
    Piece,
    TorchAdamNumbers,
    load_host_step,
)

# -- ``Masters``: the fp32 master weights, stored whole or split.


class Masters(ABC):
    """Flat fp32 master weights in any storage format."""

    holds_weights: ClassVar[bool] = True
    """Whether the model's bf16 weights are a part of what is stored."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Stored tensors by the kernels' argument names: ``weight``, or ``high`` and ``low``."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """Number of elements."""

    @abstractmethod
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        """Return weights in fp32: a view if stored in fp32, otherwise a copy.

        Args:
            part: Elements to read.
        """

    @abstractmethod
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        """Set weights to fp32 values.

        Args:
            values: The values; may be a tensor that ``read`` returned and the caller changed in
                place.
            part: Elements to write.
        """

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return fp32 values as ``read`` would return them after ``write``.

        Args:
            values: The values; returned themselves if every value can be stored.
        """
        return values

    @abstractmethod
    def fetch(self, device: torch.device) -> torch.Tensor:
        """Return the weights in fp32 on a device, where they may be changed before ``store``.

        Args:
            device: The device; on a CPU, the result may be a view.
        """

    @abstractmethod
    def store(self, values: torch.Tensor, add_noise: Callable[[torch.Tensor], None]) -> None:
        """Set weights to fp32 values on a device, without waiting for the copies.

        Args:
            values: The values; may be overwritten.
            add_noise: Function that adds random numbers from 0 to 65,535 to int32 numbers on the
                device, as many as there are values.
        """


@attrs.frozen(eq=False)
class _OneTensor(Masters):
    """Master weights stored in one tensor."""

    weight: torch.Tensor
    """1-D."""

    @property
    @override
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"weight": self.weight}

    @property
    @override
    def numel(self) -> int:
        return self.weight.numel()


class WholeMasters(_OneTensor):
    """Master weights stored in fp32."""

    holds_weights = False

    @override
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        return self.weight[part]

    @override
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        if values.data_ptr() != self.weight[part].data_ptr():
            self.weight[part].copy_(values)

    @override
    def fetch(self, device: torch.device) -> torch.Tensor:
        return moved(self.weight, device)

    @override
    def store(self, values: torch.Tensor, add_noise: Callable[[torch.Tensor], None]) -> None:
        if values.data_ptr() != self.weight.data_ptr():
            move_into(self.weight, values)


@attrs.frozen(kw_only=True, eq=False)
class SplitMasters(Masters):
    """Master weights split into the model's bf16 weights and 16 low bits; saves 2 bytes per weight.

    A low half above 0x8000 means that the bf16 weight was rounded up. A low half of exactly 0x8000
    is a tie, which is rounded to even; if the tie is rounded up, 0x8001 is stored. One master
    weight in 2 ** 17 is a tie that is rounded up, and grows by one unit in the last place; all
    others are exact.
    """

    high: torch.Tensor
    """bf16, 1-D: the fp32 weights rounded to nearest."""
    low: torch.Tensor
    """int16, 1-D: the low 16 bits of the fp32 weights."""

    @property
    @override
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"high": self.high, "low": self.low}

    @property
    @override
    def numel(self) -> int:
        return self.low.numel()

    @override
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        return load_host_step().join(high=self.high[part], low=self.low[part])

    @override
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        load_host_step().split(values, high=self.high[part], low=self.low[part])

    @override
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.int32)
        return (bits + ((bits & 0x1FFFF) == 0x18000).int()).view(torch.float32)

    @override
    def fetch(self, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self.read()
        bits = moved(self.high, device).view(torch.int16).int() << 16
        low = moved(self.low, device).int()
        # Only the low half of a tie that was not rounded up is 0x8000.
        return bits.add_(torch.where(low == -0x8000, 0x8000, low)).view(torch.float32)

    @override
    def store(self, values: torch.Tensor, add_noise: Callable[[torch.Tensor], None]) -> None:
        if values.device.type == "cpu":
            self.write(values)
            return
        high = values.bfloat16()
        low = values.view(torch.int32) - (high.view(torch.int16).int() << 16)
        move_into(self.high, high)
        move_into(self.low, torch.where(low == -0x8000, -0x7FFF, low).to(torch.int16))


class StochasticMasters(_OneTensor):
    """Master weights that are only the model's bf16 weights, rounded at random in every update."""

    @override
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        return self.weight[part].float()

    @override
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        self.weight[part].copy_(values)

    @override
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values.bfloat16().float()

    @override
    def fetch(self, device: torch.device) -> torch.Tensor:
        return moved(self.weight, device).float()

    @override
    def store(self, values: torch.Tensor, add_noise: Callable[[torch.Tensor], None]) -> None:
        move_into(self.weight, rounded_by(values, add_noise).contiguous())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device; on a CPU, the tensor itself.

    Args:
        tensor: The tensor.
        device: The device.
    """
    return tensor.to(device, non_blocking=tensor.is_pinned())


def move_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor to host memory, without waiting for the copy if the memory is page-locked.

    Args:
        target: The host memory.
        source: The tensor.
    """
    target.copy_(source, non_blocking=target.is_pinned())


# -- Steps of each Adam.


VECTOR: Final = 16
"""Number of elements in the widest SIMD vector; DeepSpeed updates the rest with scalar code."""
TORCH_VECTOR: Final = 8
"""Number of elements in a vector of torch's fused AdamW, which is compiled for AVX2 at most."""
_ADAM_MOMENTS: Final = ("exp_avg", "exp_avg_sq")

Vectors = Callable[[Sequence[Piece]], None]
Tail = Callable[[slice, torch.Tensor], None]
Places = Sequence[tuple[int, int]]
"""For each contiguous run of elements: its start in the slab and its start in the group."""


@attrs.frozen(kw_only=True, eq=False)
class SlabStep:
    """A step that has begun on one slab; the slab's elements may be updated in any order.

    All tensors are flat and have the same length.
    """

    masters: Masters
    out: torch.Tensor | None
    """Output tensor for the weights in the model's dtype."""
    vectors: Vectors
    """Update whole SIMD vectors of elements and their EMAs, and cast the weights to ``out``."""
    tail: Tail
    """Update the remaining elements in fp32, with the same FMAs as DeepSpeed's or torch's build."""
    whole: int | None = None
    """Index of the first element for ``tail``; default: the first after the last whole vector."""
    taken: int
    """Number of steps before this one."""
    _after: Callable[[int], SlabStep] | None = attrs.field(default=None, alias="after")

    def after(self, taken: int) -> SlabStep:
        """Return the step of weights that have taken another number of steps.

        Args:
            taken: Number of steps of these weights before this one.
        """
        return self if taken == self.taken or self._after is None else self._after(taken)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update ranges of elements; each element must be updated exactly once per step.

        Args:
            pieces: The ranges, with the EMAs to be updated as well.
        """
        whole = self.masters.numel // VECTOR * VECTOR if self.whole is None else self.whole
        ends = [p.start if p.is_single else max(p.start, min(p.stop, whole)) for p in pieces]
        vectors = [
            piece if end == piece.stop else attrs.evolve(piece, stop=end)
            for piece, end in zip(pieces, ends, strict=True)
            if piece.start < end
        ]
        if vectors:
            self.vectors(vectors)
        for piece, end in zip(pieces, ends, strict=True):
            if end < piece.stop:
                self._run_tail(piece, slice(end, piece.stop))

    def _run_tail(self, piece: Piece, last: slice) -> None:
        weight = self.masters.read(last)
        self.tail(last, weight)
        self.masters.write(weight, last)
        # As stored, since an EMA that is added after this step reads no other.
        weight = self.masters.read(last) if piece.emas else weight
        for ema in piece.emas:
            ema.tensor[last.start - piece.start :].lerp_(weight, ema.weight)
        if self.out is not None:
            self.out[last].copy_(weight)


def no_step(masters: Masters, out: torch.Tensor | None = None, taken: int = 0) -> SlabStep:
    """Return a step that leaves a slab's weights unchanged, but updates EMAs and ``out``.

    Args:
        masters: The master weights.
        out: See ``SlabStep.out``; receives the weights even though no weight changes.
        taken: See ``SlabStep.taken``.
    """

    def update_emas(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if out is None and not piece.emas:
                continue
            weight = masters.read(slice(piece.start, piece.stop))
            for ema in piece.emas:
                ema.tensor[: piece.stop - piece.start].lerp_(weight, ema.weight)
            if out is not None:
                out[piece.start : piece.stop].copy_(weight)

    return SlabStep(
        masters=masters,
        out=out,
        vectors=update_emas,
        tail=lambda _part, _weight: None,
        whole=masters.numel,
        taken=taken,
    )


@attrs.frozen(kw_only=True, eq=False)
class _Begun:
    """Tensors and hyperparameters of one step of a slab."""

    flat: Mapping[str, Any]
    """Flat tensors by name: weights, both moments, ``gradient``, and ``out`` (may be ``None``)."""
    group: Mapping[str, Any]
    index: int
    """Index of the group."""
    places: Places
    """See ``Stepper.begin``."""
    state: Mapping[str, Any]
    """The optimizer's state of the slab."""
    taken: int
    """Number of steps before this one."""
    factor: float
    is_late: bool = False
    """Whether these weights have missed steps of their slab."""

    def scaled_gradient(self, part: slice) -> torch.Tensor:
        """Return the gradient of some elements in fp32, multiplied by ``factor``.

        Args:
            part: The elements.
        """
        gradient: torch.Tensor = self.flat["gradient"][part].float() * self.factor
        return gradient


class Stepper(ABC):
    """Begin the steps of an optimizer in host memory, using its groups and states."""

    _state_dtype: torch.dtype = torch.float32
    _has_tail: bool = True
    """Whether elements that fill no vector need the FMAs of a different compiler."""

    def __init__(self, *, op: HostStepOp, adam: Any) -> None:
        self._op = op
        self._adam = adam

    def replay(self, steps: int) -> None:  # noqa: B027 - most count in each tensor's own state
        """Restore internal counters after a resume.

        Args:
            steps: Number of steps before the resume.
        """

    def begin(
        self,
        slab: torch.Tensor,
        *,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: float,
        out: torch.Tensor | None,
        masters: Masters,
        places: Places,
    ) -> SlabStep:
        """Count a step of a slab and record its hyperparameters, without updating anything yet.

        Args:
            slab: Flat tensor that is a key of the optimizer's states.
            gradient: The slab's gradient, of any dtype that the op supports.
            group: The slab's parameter group.
            factor: Multiplier for the gradient.
            out: See ``SlabStep.out``.
            masters: The fp32 weights.
            places: Positions of the slab's elements in the group.
        """
        state = self._adam.state[slab]
        self._create_states(state, slab)
        out = None if out is None else out.data.view(-1)
        index = next(i for i, each in enumerate(self._adam.param_groups) if each is group)
        if group.get(STOPPED):
            return no_step(masters, out, self._count(state))
        flat = {
            **masters.tensors,
            **{name: state[name].view(-1) for name in _ADAM_MOMENTS},
            "gradient": gradient.data.view(-1),
            "out": out,
        }
        begun = _Begun(
            flat=flat, group=dict(group), index=index, taken=self._count(state), factor=factor,
            places=places, state=state,
        )  # fmt: skip

        # A step that contained a reference to itself would keep views of the weights.
        after = partial(self._late, begun, masters, out)
        whole = None if self._has_tail else masters.numel
        return self._slab_step(begun, masters, out, whole=whole, after=after)

    def _late(
        self, begun: _Begun, masters: Masters, out: torch.Tensor | None, taken: int
    ) -> SlabStep:
        late = attrs.evolve(begun, taken=taken, is_late=True)
        # DeepSpeed's op, which updates the tail, has one step counter for all weights.
        return self._slab_step(late, masters, out, whole=masters.numel)

    def _slab_step(
        self, begun: _Begun, masters: Masters, out: torch.Tensor | None, **more: Any
    ) -> SlabStep:
        vectors, tail = self._update(begun)
        return SlabStep(
            masters=masters, out=out, vectors=vectors, tail=tail, taken=begun.taken, **more
        )

    def _create_states(self, state: dict[str, Any], slab: torch.Tensor) -> None:
        """Create the moments before the first step."""
        for name in _ADAM_MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(slab.data, dtype=self._state_dtype)

    def _count(self, state: dict[str, Any]) -> int:
        """Count a step, and return the number of earlier steps."""
        taken = int(state.get("step", 0))
        state["step"] = taken + 1
        return taken

    @abstractmethod
    def _update(self, begun: _Begun) -> tuple[Vectors, Tail]:
        """Return the functions that update whole vectors and the remaining elements."""


class HostBF16Adam(Stepper):
    """Stepper whose results are bit-identical to those of ``AdamWBF16States.step``."""

    _state_dtype = torch.bfloat16

    @override
    def _update(self, begun: _Begun) -> tuple[Vectors, Tail]:
        numbers, key = _torch_numbers(begun), noise_key(begun.taken, begun.index)

        def runs(part: slice) -> Iterator[tuple[slice, int]]:
            """Yield runs of consecutive positions in a part, each run with its first position."""
            for (start, place), (stop, _) in pairwise([*begun.places, (part.stop, 0)]):
                if part.start < stop and start < part.stop:
                    first = max(start, part.start)
                    yield slice(first, min(stop, part.stop)), place + first - start

        def vectors(pieces: Sequence[Piece]) -> None:
            parts = [
                attrs.evolve(
                    piece,
                    start=each.start,
                    stop=each.stop,
                    position=place,
                    emas=[
                        attrs.evolve(ema, tensor=ema.tensor[each.start - piece.start :])
                        for ema in piece.emas
                    ],
                )
                for piece in pieces
                for each, place in runs(slice(piece.start, piece.stop))
            ]
            self._op.step(numbers, parts, noise=key, **begun.flat)

        def tail(part: slice, weight: torch.Tensor) -> None:
            for each, place in runs(part):
                count = each.stop - each.start
                bits = noise_bits(key, torch.arange(place, place + count).int())
                update_chunk(
                    weight[each.start - part.start :][:count], begun.scaled_gradient(each),
                    [begun.flat[name][each] for name in _ADAM_MOMENTS],
                    noise=[bits & 0xFFFF, bits >> 16 & 0xFFFF],
                    taken=begun.taken, group=begun.group,
                    wide=[torch.empty(count) for _ in range(2)],
                )  # fmt: skip

        return vectors, tail


class Host8BitAdam(Stepper):
    """Stepper of ``AdamW8BitStates``, which also decodes and encodes the moments.

    Every part starts at a block boundary.
    """

    formats = AdamW8BitStates.formats
    create_states = staticmethod(AdamW8BitStates.create_states)
    _has_tail = False

    def decode_states(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the moments in fp32, 1-D, by name; empty before the first step.

        Args:
            state: The optimizer's state dict for one tensor.
        """
        return {
            name: self._op.decode(_coded(state, name)) for name in _ADAM_MOMENTS if name in state
        }

    def encode_states(
        self, state: MutableMapping[str, Any], numbers: Mapping[str, torch.Tensor]
    ) -> None:
        """Set the moments; encoding the result of ``decode_states`` changes no number.

        Args:
            state: The optimizer's state dict for one tensor; changed in place.
            numbers: Moments in fp32, 1-D, by name.
        """
        for name, moment in numbers.items():
            self._op.encode(moment, into=_coded(state, name))

    @override
    def _create_states(self, state: dict[str, Any], slab: torch.Tensor) -> None:
        self.create_states(state, slab.numel())

    @override
    def _update(self, begun: _Begun) -> tuple[Vectors, Tail]:
        numbers, key = _torch_numbers(begun), noise_key(begun.taken, begun.index)

        def vectors(pieces: Sequence[Piece]) -> None:
            moments = {name: _coded(begun.state, name) for name in _ADAM_MOMENTS}
            self._op.step(numbers, pieces, noise=key, **{**begun.flat, **moments})

        return vectors, lambda _part, _weight: None


def _coded(state: Mapping[str, Any], name: str) -> CodedMoment:
    """A moment's codes and scales."""
    return CodedMoment(codes=state[name], scales=state[scale_of(name)], signed=name == "exp_avg")


class HostTorchAdam(Stepper):
    """Stepper whose results are bit-identical to the fused ``torch.optim.Adam`` or ``AdamW``.

    Results of torch's for-loop implementation differ, because its square roots are not correctly
    rounded.
    """

    @override
    def _count(self, state: dict[str, Any]) -> int:
        step = state.setdefault("step", torch.tensor(0.0))
        taken = int(step)
        step += 1
        return taken

    @override
    def _update(self, begun: _Begun) -> tuple[Vectors, Tail]:
        flat, group = begun.flat, begun.group
        decoupled, (beta1, beta2) = isinstance(self._adam, torch.optim.AdamW), group["betas"]
        numbers = _torch_numbers(begun, decoupled=decoupled)
        update = torch_adamw if decoupled else torch_adam

        def tail(part: slice, weight: torch.Tensor) -> None:
            update(
                [weight], [begun.scaled_gradient(part)],
                [flat["exp_avg"][part]], [flat["exp_avg_sq"][part]], [],
                [torch.full((), float(begun.taken))],
                fused=True, foreach=False, amsgrad=False, maximize=False,
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip

        return lambda pieces: self._op.step(numbers, pieces, **flat), tail


class HostAdam(Stepper):
    """Stepper whose results are bit-identical to those of ``DeepSpeedCPUAdam``."""

    def __init__(self, *, op: HostStepOp, adam: Any) -> None:
        super().__init__(op=op, adam=adam)
        self._powers = BetaPowers(*adam.defaults["betas"])
        self._scalar = threading.Lock()

    @override
    def replay(self, steps: int) -> None:
        for step, beta1, beta2 in taken_steps(self._adam, steps):
            self._powers.at(step, beta1, beta2)

    @override
    def _update(self, begun: _Begun) -> tuple[Vectors, Tail]:
        adam, numbers = self._adam, self._numbers(begun)
        flat, group = begun.flat, begun.group

        def tail(part: slice, weight: torch.Tensor) -> None:
            gradient = begun.scaled_gradient(part)
            # DeepSpeed's op has one step counter for all threads.
            with self._scalar:
                adam.ds_opt_adam.adam_update(
                    adam.opt_id, begun.taken + 1, group["lr"], *group["betas"], group["eps"],
                    group["weight_decay"], group["bias_correction"],
                    weight, gradient, *(flat[name][part] for name in _ADAM_MOMENTS),
                )  # fmt: skip

        return lambda pieces: self._op.step(numbers, pieces, **flat), tail

    def _numbers(self, begun: _Begun) -> AdamNumbers:
        """The step's numbers, rounded as in DeepSpeed's op, so that results are bit-identical."""
        group = begun.group
        beta1, beta2 = (_fp32(beta) for beta in group["betas"])
        lr, decay = _fp32(group["lr"]), _fp32(group["weight_decay"])
        first = inverse_root = 1.0
        # The running products are those of weights that miss no step.
        products = BetaPowers(*group["betas"]) if begun.is_late else self._powers
        powers = products.at(begun.taken + 1, *group["betas"])
        if group["bias_correction"]:
            first = _fp32(1.0 - powers[0])
            inverse_root = _fp32(1.0 / _fp32(math.sqrt(_fp32(1.0 - powers[1]))))
        decoupled = bool(self._adam.adam_w_mode)
        return AdamNumbers(
            factor=begun.factor,
            beta1=beta1,
            beta2=beta2,
            one_minus_beta1=_fp32(1.0 - beta1),
            one_minus_beta2=_fp32(1.0 - beta2),
            inverse_root=inverse_root,
            eps=_fp32(group["eps"]),
            step_size=_fp32(-lr / first),
            decay=_fp32(-lr * decay) if decoupled else decay,
            decays=0 if decay <= 0 else (1 if decoupled else 2),
        )


def stepper_of(adam: torch.optim.Optimizer) -> type[Stepper]:
    """Return the stepper class for DeepSpeed's, zerotune's or torch's Adam.

    Args:
        adam: The optimizer.
    """
    if isinstance(adam, AdamWBF16States):
        return HostBF16Adam
    if isinstance(adam, AdamW8BitStates):
        return Host8BitAdam
    return HostAdam if type(adam).__name__ == "DeepSpeedCPUAdam" else HostTorchAdam


def taken_steps(adam: torch.optim.Optimizer, steps: int) -> Iterator[tuple[int, float, float]]:
    """Yield the steps that an Adam's powers of the betas depend on, each with its betas.

    Args:
        adam: The optimizer.
        steps: Number of steps that it has taken.
    """
    betas = list(dict.fromkeys(tuple(group["betas"]) for group in adam.param_groups))
    # If the groups' betas differ, the powers are recomputed at every change of group.
    for step in range(1 if len(betas) == 1 else max(steps, 1), steps + 1):
        for beta1, beta2 in betas:
            yield step, beta1, beta2


class BetaPowers:
    """Powers of the betas, computed as rounded running products, as in DeepSpeedCPUAdam's op.

    After a resume, call ``at`` for each past step.
    """

    def __init__(self, beta1: float, beta2: float) -> None:
        self._betas = _fp32(beta1), _fp32(beta2)
        self._step = 0
        self._powers = 1.0, 1.0

    def at(self, step: int, beta1: float, beta2: float) -> tuple[float, float]:
        """Return both betas raised to the power ``step``, in fp32, and remember the step.

        Args:
            step: Step number, starting at 1.
            beta1: Decay rate of the first moment.
            beta2: Decay rate of the second moment.
        """
        betas = _fp32(beta1), _fp32(beta2)
        if betas == self._betas and step == self._step:
            return self._powers
        if betas == self._betas and step == self._step + 1:
            first, second = self._powers
            self._powers = _fp32(first * betas[0]), _fp32(second * betas[1])
        else:
            self._powers = _fp32(math.pow(betas[0], step)), _fp32(math.pow(betas[1], step))
        self._betas, self._step = betas, step
        return self._powers


def _torch_numbers(begun: _Begun, *, decoupled: bool = True) -> TorchAdamNumbers:
    group, step = begun.group, begun.taken + 1
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    return TorchAdamNumbers(
        factor=begun.factor,
        decay=1.0 - lr * decay if decoupled else 1.0,
        l2=0.0 if decoupled else decay,
        first=1.0 - beta1,
        beta2=beta2,
        second=1.0 - beta2,
        root=math.sqrt(1.0 - math.pow(beta2, step)),
        eps=group["eps"],
        step_size=-lr / (1.0 - math.pow(beta1, step)),
    )


# -- Whether this build of torch rounds like the op: different compilers choose different FMAs.


def torch_rounds_alike(op: HostStepOp) -> bool:
    """Return whether ``AdamWBF16States`` rounds exactly like the compiled kernels.

    Args:
        op: The compiled op.
    """
    generator = torch.Generator().manual_seed(0)
    numel, group = 64 * VECTOR, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    group["weight_decay"] = 0.01
    weight, gradient = (torch.randn(numel, generator=generator) for _ in range(2))
    moments = torch.rand(2, numel, generator=generator).bfloat16() * 1e-3
    bits = noise_bits(noise_key(6, 0), torch.arange(numel, dtype=torch.int32))
    theirs = [weight.clone(), *moments.clone()]
    update_chunk(
        theirs[0], gradient, theirs[1:], wide=torch.empty(2, numel).unbind(),
        noise=[bits & 0xFFFF, bits >> 16 & 0xFFFF], taken=6, group=group,
    )  # fmt: skip
    flat = {
        "weight": weight,
        **dict(zip(_ADAM_MOMENTS, moments, strict=True)),
        "gradient": gradient,
    }
    begun = _Begun(flat=flat, group=group, index=0, taken=6, factor=1.0, places=[(0, 0)], state={})
    op.step(_torch_numbers(begun), [Piece(0, numel)], noise=noise_key(6, 0), **flat)
    return all(map(torch.equal, theirs, (weight, *moments)))


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value
