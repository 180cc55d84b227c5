"""The steps of an Adam in host memory, whoever wrote it, each slab in one pass over memory."""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import attrs
import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from typing_extensions import override

from zerotune.backend.ops.host_step import AdamNumbers, Average, HostStepOp, TorchAdamNumbers
from zerotune.backend.optimizers.adamw_bf16_states import (
    AdamWBF16States,
    Noise,
    TensorNoise,
    update_chunk,
)

_VECTOR: Final = 16
"""Elements of the widest vectors; what is left over, DeepSpeed and torch update one by one."""
TORCH_ADAMS: Final = (torch.optim.Adam, torch.optim.AdamW)


class BetaPowers:
    """Powers of the betas as DeepSpeedCPUAdam's op keeps them: running products, each rounded.

    A resumed run must ``at`` every step again that an uninterrupted one took.

    Args:
        beta1: Of the optimizer's defaults.
        beta2: Of the optimizer's defaults.
    """

    def __init__(self, *, beta1: float, beta2: float) -> None:
        self._betas = _fp32(beta1), _fp32(beta2)
        self._step = 0
        self._powers = 1.0, 1.0

    def at(self, step: int, beta1: float, beta2: float) -> tuple[float, float]:
        """Both betas to the power of ``step``, in fp32; the counter moves there."""
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


@attrs.frozen(kw_only=True, eq=False)
class SlabStep(ABC):
    """One step of one slab, begun but not yet taken: any part of it may be run at any time."""

    op: HostStepOp
    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    out: torch.Tensor | None
    """Where the weights go in their own dtype; as long as the others."""

    def run(self, start: int, stop: int, averages: Sequence[Average] = ()) -> None:
        """Update elements ``start`` to ``stop``, each exactly once a step.

        Args:
            start: First element.
            stop: One past the last.
            averages: Shadows of exactly these elements.
        """
        middle = max(start, min(stop, self.weight.numel() // _VECTOR * _VECTOR))
        if start < middle:
            self._run_vectors(slice(start, middle), averages)
        if middle < stop:
            self._run_tail(slice(middle, stop), averages, skipped=middle - start)

    def _run_tail(self, part: slice, averages: Sequence[Average], *, skipped: int) -> None:
        """The last elements, one by one: there the compiler of the other op chose the fmas."""
        weight = self.weight[part]
        self._update_tail(part)
        for average in averages:
            average.shadow[skipped:].lerp_(weight, average.weight)
        if self.out is not None:
            self.out[part].copy_(weight)

    @abstractmethod
    def _run_vectors(self, part: slice, averages: Sequence[Average]) -> None:
        """Elements of which there are whole vectors."""

    @abstractmethod
    def _update_tail(self, part: slice) -> None:
        """Weights and moments of the last elements."""

    def _streams(self, part: slice) -> dict[str, Any]:
        return {
            "weight": self.weight[part],
            "exp_avg": self.exp_avg[part],
            "exp_avg_sq": self.exp_avg_sq[part],
            "gradient": self.gradient[part],
            "out": None if self.out is None else self.out[part],
        }


@attrs.frozen(kw_only=True, eq=False)
class AdamSlabStep(SlabStep):
    """As DeepSpeedCPUAdam."""

    numbers: AdamNumbers
    scalar: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """The optimizer itself: weights, gradient in fp32, and both moments, updated in place."""

    @override
    def _run_vectors(self, part: slice, averages: Sequence[Average]) -> None:
        self.op.adam(numbers=self.numbers, averages=averages, **self._streams(part))

    @override
    def _update_tail(self, part: slice) -> None:
        gradient = self.gradient[part].float() * self.numbers.factor
        self.scalar(self.weight[part], gradient, self.exp_avg[part], self.exp_avg_sq[part])


@attrs.frozen(kw_only=True, eq=False)
class BF16SlabStep(SlabStep):
    """As AdamWBF16States."""

    numbers: TorchAdamNumbers
    noise: TensorNoise
    taken: int
    """Steps before this one."""
    group: Mapping[str, Any]

    @override
    def _run_vectors(self, part: slice, averages: Sequence[Average]) -> None:
        for start, stop in self._chunks(part):
            inside = slice(start - part.start, stop - part.start)
            self.op.adam_bf16(
                numbers=self.numbers,
                noise=(self.noise.of(0, start, stop), self.noise.of(1, start, stop)),
                averages=[attrs.evolve(each, shadow=each.shadow[inside]) for each in averages],
                **self._streams(slice(start, stop)),
            )

    @override
    def _update_tail(self, part: slice) -> None:
        for start, stop in self._chunks(part):
            inside = slice(start, stop)
            update_chunk(
                self.weight[inside],
                self.gradient[inside].float() * self.numbers.factor,
                (self.exp_avg[inside], self.exp_avg_sq[inside]),
                wide=[torch.empty(stop - start) for _ in range(2)],
                noise=[self.noise.of(moment, start, stop) for moment in range(2)],
                taken=self.taken,
                group=self.group,
            )

    def _chunks(self, part: slice) -> Iterator[tuple[int, int]]:
        """The part, cut where its random bits are."""
        size, start = self.noise.size, part.start
        while start < part.stop:
            stop = min(part.stop, (start // size + 1) * size)
            yield start, stop
            start = stop


@attrs.frozen(kw_only=True, eq=False)
class TorchSlabStep(SlabStep):
    """As torch's fused Adam and AdamW."""

    numbers: TorchAdamNumbers
    taken: int
    """Steps before this one."""
    group: Mapping[str, Any]
    decoupled: bool

    @override
    def _run_vectors(self, part: slice, averages: Sequence[Average]) -> None:
        self.op.adam_torch(numbers=self.numbers, averages=averages, **self._streams(part))

    @override
    def _update_tail(self, part: slice) -> None:
        (beta1, beta2), update = self.group["betas"], adamw if self.decoupled else adam
        update(
            [self.weight[part]], [self.gradient[part].float() * self.numbers.factor],
            [self.exp_avg[part]], [self.exp_avg_sq[part]], [],
            [torch.full((), float(self.taken))],
            fused=True, foreach=False, amsgrad=False, maximize=False,
            lr=self.group["lr"], beta1=beta1, beta2=beta2, eps=self.group["eps"],
            weight_decay=self.group["weight_decay"],
        )  # fmt: skip


@attrs.frozen(kw_only=True, eq=False)
class NoStep(SlabStep):
    """Of a slab that got no gradient, which torch leaves as it is; averages still follow it."""

    @classmethod
    def of(cls, slab: torch.Tensor, *, op: HostStepOp) -> NoStep:
        """Args as ``Stepper.begin``'s."""
        flat = slab.data.view(-1)
        return cls(op=op, weight=flat, exp_avg=flat, exp_avg_sq=flat, gradient=flat, out=None)

    @override
    def run(self, start: int, stop: int, averages: Sequence[Average] = ()) -> None:
        for average in averages:
            average.shadow.lerp_(self.weight[start:stop], average.weight)

    @override
    def _run_vectors(self, part: slice, averages: Sequence[Average]) -> None:
        raise AssertionError("nothing is updated")

    _update_tail = _run_vectors  # type: ignore[assignment]


class Stepper(Protocol):
    """Begins the steps of an optimizer in host memory."""

    def rewind(self, numels: Sequence[int]) -> None:
        """Before the first slab of a call of the optimizer's ``step``.

        Args:
            numels: Of the slabs that it is about to step.
        """
        ...

    def replay(self, steps: int) -> None:
        """Go through the steps that were taken before, as another process did."""
        ...

    def begin(
        self,
        slab: torch.Tensor,
        *,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: float,
        out: torch.Tensor | None,
    ) -> SlabStep:
        """Count a step of a slab and settle its numbers; nothing is updated yet.

        Args:
            slab: fp32, flat; a key of the optimizer's states.
            gradient: Its gradient, of any dtype the op knows.
            group: Its group.
            factor: What its gradient is multiplied by.
            out: As ``SlabStep.out``.
        """
        ...


class HostBF16Adam:
    """Steps for an AdamWBF16States, bit for bit what it does itself.

    Args:
        op: The compiled functions.
        adam: The optimizer.
    """

    def __init__(self, *, op: HostStepOp, adam: AdamWBF16States) -> None:
        self._op = op
        self._adam = adam
        self._noise = Noise()

    def rewind(self, numels: Sequence[int]) -> None:
        """As ``Stepper.rewind``."""
        self._noise.rewind(max(numels, default=0))

    def replay(self, steps: int) -> None:
        """What it rounds by is told by each tensor's own counter."""

    def begin(
        self,
        slab: torch.Tensor,
        *,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: float,
        out: torch.Tensor | None,
    ) -> SlabStep:
        """As ``Stepper.begin``."""
        state = _with_moments(self._adam, slab, self._adam.state_dtype)
        taken = int(state.get("step", 0))
        state["step"] = taken + 1
        return BF16SlabStep(
            op=self._op,
            numbers=_torch_numbers(group, taken + 1, factor),
            weight=slab.data.view(-1),
            exp_avg=state["exp_avg"].view(-1),
            exp_avg_sq=state["exp_avg_sq"].view(-1),
            gradient=gradient.data.view(-1),
            out=None if out is None else out.data.view(-1),
            noise=self._noise.take(slab, seed=taken),
            taken=taken,
            group=dict(group),
        )


def _with_moments(
    adam: torch.optim.Optimizer, slab: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """An optimizer's state of a slab, whose moments are 0 where it has none yet."""
    state: dict[str, Any] = adam.state[slab]
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(slab.data, dtype=dtype)
    return state


def _torch_numbers(
    group: Mapping[str, Any], step: int, factor: float, *, decoupled: bool = True
) -> TorchAdamNumbers:
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    return TorchAdamNumbers(
        factor=factor,
        decay=1.0 - lr * decay if decoupled else 1.0,
        l2=0.0 if decoupled else decay,
        first=1.0 - beta1,
        beta2=beta2,
        second=1.0 - beta2,
        root=math.sqrt(1.0 - math.pow(beta2, step)),
        eps=group["eps"],
        step_size=-lr / (1.0 - math.pow(beta1, step)),
    )


def torch_rounds_alike(op: HostStepOp) -> bool:
    """Whether this build of torch rounds as the op does; other compilers choose other fmas."""
    generator = torch.Generator().manual_seed(0)
    numel, group = 64 * _VECTOR, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    group["weight_decay"] = 0.01
    weight, gradient = (torch.randn(numel, generator=generator) for _ in range(2))
    moments = torch.rand(2, numel, generator=generator).bfloat16() * 1e-3
    noise = torch.randint(0, 2**16, (2, numel), dtype=torch.int32, generator=generator)
    theirs = [weight.clone(), *moments.clone()]
    update_chunk(
        theirs[0], gradient, theirs[1:], wide=torch.empty(2, numel).unbind(), noise=noise.unbind(),
        taken=6, group=group,
    )  # fmt: skip
    op.adam_bf16(
        weight=weight, exp_avg=moments[0], exp_avg_sq=moments[1], gradient=gradient,
        noise=(noise[0], noise[1]), numbers=_torch_numbers(group, 7, 1.0),
    )  # fmt: skip
    return all(map(torch.equal, theirs, (weight, *moments)))


def torch_rounds_alike_in_fp32(op: HostStepOp) -> bool:
    """Whether this build's fused Adam and AdamW round as the op does."""
    generator = torch.Generator().manual_seed(0)
    for kind in TORCH_ADAMS:
        start, *gradients = torch.randn(4, 64 * _VECTOR + 5, generator=generator).unbind()
        theirs, mine = (torch.nn.Parameter(start.clone()) for _ in range(2))
        fused = kind([theirs], lr=1e-3, weight_decay=0.01, fused=True)
        stepped = kind([mine], lr=1e-3, weight_decay=0.01)
        stepper, group = HostTorchAdam(op=op, adam=stepped), stepped.param_groups[0]
        for gradient in gradients:
            theirs.grad = gradient * 0.3
            fused.step()
            stepper.begin(mine, gradient=gradient, group=group, factor=0.3, out=None).run(
                0, mine.numel()
            )
        if not torch.equal(theirs.data, mine.data):
            return False
    return True


class HostTorchAdam:
    """Steps for a ``torch.optim.Adam`` or ``AdamW`` in host memory, bit for bit its fused ones.

    torch's loop over tensors takes a square root that is not rounded to the nearest number; its
    fused step, which this equals, does.

    Args:
        op: The compiled functions.
        adam: The optimizer.
    """

    def __init__(self, *, op: HostStepOp, adam: torch.optim.Optimizer) -> None:
        self._op = op
        self._adam = adam

    @staticmethod
    def obstacle(adam: torch.optim.Optimizer) -> str | None:
        """Why this optimizer does more than such a step, if so."""
        if type(adam) not in TORCH_ADAMS:
            return f"{type(adam).__name__} is neither Adam nor AdamW"
        names = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
        found = [name for group in adam.param_groups for name in names if group.get(name)]
        return f"{found[0]} was asked for" if found else None

    def rewind(self, numels: Sequence[int]) -> None:
        """A slab's step knows nothing of the others'."""

    def replay(self, steps: int) -> None:
        """Each tensor has a counter of its own."""

    def begin(
        self,
        slab: torch.Tensor,
        *,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: float,
        out: torch.Tensor | None,
    ) -> SlabStep:
        """As ``Stepper.begin``."""
        state = _with_moments(self._adam, slab, slab.dtype)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        taken = int(state["step"])
        state["step"] += 1
        decoupled = isinstance(self._adam, torch.optim.AdamW)
        return TorchSlabStep(
            op=self._op,
            numbers=_torch_numbers(group, taken + 1, factor, decoupled=decoupled),
            weight=slab.data.view(-1),
            exp_avg=state["exp_avg"].view(-1),
            exp_avg_sq=state["exp_avg_sq"].view(-1),
            gradient=gradient.data.view(-1),
            out=None if out is None else out.data.view(-1),
            taken=taken,
            group=dict(group),
            decoupled=decoupled,
        )


class HostAdam:
    """Steps for a DeepSpeedCPUAdam, whose groups, states and counters stay its own.

    Bit for bit what it does itself to a gradient multiplied by ``factor``.

    Args:
        op: The compiled functions.
        adam: The optimizer.
    """

    def __init__(self, *, op: HostStepOp, adam: Any) -> None:
        self._op = op
        self._adam = adam
        beta1, beta2 = adam.defaults["betas"]
        self._powers = BetaPowers(beta1=beta1, beta2=beta2)
        self._scalar = threading.Lock()

    def rewind(self, numels: Sequence[int]) -> None:
        """A slab's step knows nothing of the others'."""

    def replay(self, steps: int) -> None:
        """As ``Stepper.replay``."""
        betas = list(dict.fromkeys(tuple(group["betas"]) for group in self._adam.param_groups))
        # Where groups differ, each change from one to the next begins anew.
        for step in range(1 if len(betas) == 1 else steps, steps + 1):
            for beta1, beta2 in betas:
                self._powers.at(step, beta1, beta2)

    def begin(
        self,
        slab: torch.Tensor,
        *,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        factor: float,
        out: torch.Tensor | None,
    ) -> SlabStep:
        """As ``Stepper.begin``."""
        adam, state = self._adam, self._adam.state[slab]
        state["step"] = state.get("step", 0) + 1
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(slab.data, dtype=torch.float32)
        return AdamSlabStep(
            op=self._op,
            numbers=self._numbers(group, state["step"], factor),
            weight=slab.data.view(-1),
            exp_avg=state["exp_avg"].view(-1),
            exp_avg_sq=state["exp_avg_sq"].view(-1),
            gradient=gradient.data.view(-1),
            out=None if out is None else out.data.view(-1),
            scalar=partial(
                self._update_by_itself,
                adam.opt_id,
                state["step"],
                group["lr"],
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                group["bias_correction"],
            ),
        )

    def _update_by_itself(self, *arguments: Any) -> None:
        # It counts steps in a place that all threads share.
        with self._scalar:
            self._adam.ds_opt_adam.adam_update(*arguments)

    def _numbers(self, group: Mapping[str, Any], step: int, factor: float) -> AdamNumbers:
        """Rounded where the op rounds, so that not even the last bit differs."""
        beta1, beta2 = (_fp32(beta) for beta in group["betas"])
        lr, decay = _fp32(group["lr"]), _fp32(group["weight_decay"])
        first = inverse_root = 1.0
        powers = self._powers.at(step, *group["betas"])
        if group["bias_correction"]:
            first = _fp32(1.0 - powers[0])
            inverse_root = _fp32(1.0 / _fp32(math.sqrt(_fp32(1.0 - powers[1]))))
        decoupled = bool(self._adam.adam_w_mode)
        return AdamNumbers(
            factor=factor,
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


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value
