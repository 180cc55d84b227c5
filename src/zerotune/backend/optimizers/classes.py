"""Torch optimizers that DeepSpeed lacks, or supports only at some ZeRO stages.

These optimizers are Lamb, Lion, Muon, and AdamW with 16-bit or 8-bit moments. All of them accept
whole parameters, and all but Lamb ZeRO's flat shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch.optim.adamw import adamw
from typing_extensions import override

from zerotune.backend.accelerator import accelerator_of
from zerotune.backend.fragments import StateFormat
from zerotune.plan.memory.hosted import NOISE_PERIOD

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import MasterLayout


@attrs.frozen(kw_only=True)
class OptimizerPart:
    """This rank's part of one parameter, inside one tensor of the optimizer."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """Index of this part's first element in the flattened parameter."""
    numel: int
    """Number of elements of this part; 0 if another rank has the whole parameter."""
    offset: int
    """Index of this part's first element in the optimizer's tensor."""
    split: bool
    """Whether the parameter is divided among ranks."""

    @property
    def full_numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


class TensorByTensor(torch.optim.Optimizer):
    """Base class of optimizers that update tensors one after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad.to(p.dtype), group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _adam_moments(
        self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, Any]:
        """Update Adam's moments of a tensor with its gradient, and return its states."""
        state: dict[str, Any] = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return state


class Lamb(TensorByTensor):
    """Lamb, from You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).

    The trust ratio needs the norms of whole parameters, so ZeRO's flat shards are refused.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Constant added to the denominator, so that it is not zero.
        weight_decay: Weight decay, added to the update before the trust ratio is computed.
        bias_correction: Whether to correct the moments for their zero initialisation.
        max_coeff: Upper limit of the trust ratio.
        min_coeff: Lower limit of the trust ratio.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self._adam_moments(p, grad, group), group["betas"]
        first = second = 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / first).div_(denominator).add_(p, alpha=group["weight_decay"])
        weight, step = torch.stack((p.norm(), update.norm())).tolist()
        trust = weight / step if weight > 0 and step > 0 else 1.0
        trust = min(max(trust, group["min_coeff"]), group["max_coeff"])
        p.add_(update, alpha=-group["lr"] * trust)


class Lion(TensorByTensor):
    """Lion, from Chen et al. 2023, algorithm 2 (https://arxiv.org/abs/2302.06675).

    The update is elementwise, so ZeRO's flat shards do not change the result.

    Args:
        params: Parameters or groups.
        lr: Learning rate, usually 3 to 10 times smaller than Adam's.
        betas: Weight of the momentum in the update, and decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        momentum = state["exp_avg"]
        update = torch.lerp(grad, momentum, beta1).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)


class Muon(TensorByTensor):
    """Muon, from Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/).

    Groups with ``use_muon`` are updated with the orthogonalised momentum; AdamW updates all other
    groups. As in the authors' code, convolution weights are treated as matrices of shape (out, in x
    height x width). Under ZeRO, matrices that are split over ranks are gathered for the
    orthogonalisation, one matrix at a time. Each rank then applies its part of the result.

    Args:
        params: Groups; each may contain ``use_muon``, ``lr``, ``momentum``, ``weight_decay``,
            ``betas`` and ``eps``.
        lr: Learning rate for groups that do not set ``lr``.
        momentum: Decay rate of the momentum.
        nesterov: Whether to use Nesterov momentum.
        ns_steps: Number of Newton-Schulz iterations.
        betas: Decay rates of Adam's moments.
        eps: Constant added to Adam's denominator, so that it is not zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    _parts: dict[int, list[OptimizerPart]] | None = None
    _group: ProcessGroup | None = None
    _device: torch.device = torch.device("cpu")

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def attach(self, *, layout: MasterLayout, group: ProcessGroup, device: torch.device) -> None:
        """Record which parameter parts each of the optimizer's tensors contains.

        Collective: every rank must call it, after the engine has partitioned the parameters.

        Args:
            layout: Placement of the engine's master weights.
            group: Processes over which the parameters are partitioned.
            device: Device on which the group's collectives run.
        """
        order = layout.order
        index = {name: number for number, (name, _) in enumerate(order)}
        homes = torch.zeros(len(order), 3, dtype=torch.int64)
        for address in layout.addresses:
            whole = address.numel == address.full_numel
            homes[index[address.name]] = torch.tensor([address.slab, 1, int(whole)])
        sharded = group.world_size > 1 and not layout.replicated
        self._group = group if sharded else None
        self._device = device
        totals = self.sum_over_ranks(homes)
        mine = {address.name: address for address in layout.addresses}
        parts: dict[int, list[OptimizerPart]] = {id(tensor): [] for tensor in layout.tensors}
        for number, (name, shape) in enumerate(order):
            slab_sum, holders, wholes = totals[number].tolist()
            tensor = layout.tensors[slab_sum // max(1, holders)]
            # At stage 3 a sub-group's tensors hold a part of each of its parameters.
            own = mine.get(name)
            start, numel, offset = (own.start, own.numel, own.offset) if own else (0, 0, 0)
            parts[id(tensor)].append(
                OptimizerPart(
                    shape=shape, start=start, numel=numel, offset=offset,
                    split=sharded and wholes == 0,
                )
            )  # fmt: skip
        self._parts = parts

    def parts_of(self, tensor: torch.Tensor) -> list[OptimizerPart]:
        """Return the parameter parts in an optimizer's tensor, in the same order on all ranks.

        Args:
            tensor: A tensor of the optimizer's groups.
        """
        described = (self._parts or {}).get(id(tensor))
        if described is not None:
            return described
        shape = tuple(tensor.shape)
        return [OptimizerPart(shape=shape, start=0, numel=tensor.numel(), offset=0, split=False)]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the ranks that share the parameters.

        Args:
            values: A tensor of the same shape on every rank, on any device.
        """
        if self._group is None:
            return values
        # Offloaded shards lie in host memory, where nccl cannot reach them.
        return self._group.sum_(values.to(self._device)).to(values.device)

    def whole(self, flat: torch.Tensor, part: OptimizerPart) -> torch.Tensor | None:
        """Return a parameter's values from ``flat``; gather a split parameter from all ranks.

        Args:
            flat: A tensor laid out like the optimizer's tensor.
            part: The parameter's part in ``flat``.

        Returns:
            A tensor in the parameter's shape; ``None`` if this rank has no part of the parameter.
        """
        own = flat.view(-1).narrow(0, part.offset, part.numel) if part.numel else None
        if not part.split:
            return None if own is None else own.view(part.shape)
        full = torch.zeros(part.full_numel, dtype=flat.dtype, device=flat.device)
        if own is not None:
            full.narrow(0, part.start, part.numel).copy_(own)
        full = self.sum_over_ranks(full)
        return None if own is None else full.view(part.shape)

    @override
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if group["use_muon"]:
            self._update_matrices(p, grad, group)
            return
        state, (beta1, beta2) = self._adam_moments(p, grad, group), group["betas"]
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / first)

    def _update_matrices(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        direction = torch.lerp(grad, momentum, group["momentum"]) if group["nesterov"] else momentum
        flat = p.view(-1).mul_(1 - group["lr"] * group["weight_decay"])
        for part in self.parts_of(p):
            matrix = self.whole(direction, part)
            if matrix is None:
                continue
            update = orthogonalise(matrix.flatten(1), steps=group["ns_steps"]).reshape(-1)
            own = update.narrow(0, part.start, part.numel)
            flat.narrow(0, part.offset, part.numel).add_(own, alpha=-group["lr"])


def orthogonalise(matrix: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """Approximate the nearest orthogonal matrix, with singular values between 0.7 and 1.2.

    The function runs a quintic Newton-Schulz iteration with the coefficients from Jordan et al. As
    in the authors' code, the result is scaled by ``sqrt(max(1, rows / columns))``.

    Args:
        matrix: Matrix of shape (rows, columns).
        steps: Number of iterations.

    Returns:
        A matrix of shape (rows, columns), in the dtype of ``matrix``.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    # bf16 is enough for the iteration and fast on GPUs; CPUs without bf16 units emulate it.
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if tall else x
    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    result: torch.Tensor = (x * scale).to(matrix.dtype)
    return result


# -- AdamW with low-precision moments next to fp32 master weights, first with 16 bits.


_WIDENED: Final = {"cpu": 2**19}
"""Elements converted to fp32 at a time, by device type: on a CPU, as many as fit its cache."""
_WIDENED_ON_DEVICE: Final = 2**22
"""Elements converted to fp32 at a time on a GPU: enough to use it fully, in 64 MiB."""
_WORD: Final = 2**32 - 1


class AdamWStates(torch.optim.Optimizer):
    """Base class of AdamW (https://arxiv.org/abs/1711.05101) with low-precision moments.

    Args:
        params: Parameters or groups, fp32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Constant added to the denominator, so that it is not zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

    adam_w_mode = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)


class AdamWBF16States(AdamWStates):
    """AdamW with moments in bf16.

    The states use 4 bytes per weight instead of 8; weights, gradients and arithmetic are fp32. Each
    chunk of moments is converted to fp32, updated by torch's AdamW and rounded stochastically to
    bf16. Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551) is exact in
    expectation. Rounding to nearest would freeze the second moment, because its relative change per
    step, ``1 - beta2``, is smaller than half a unit in the last place of bf16.

    The noise depends only on the step, the group, and the element's position among the group's
    updated elements. Therefore a resumed run is identical to an uninterrupted one, and replicas
    agree. The update is elementwise, so ZeRO's flat shards do not change the result.
    """

    state_dtype: torch.dtype = torch.bfloat16
    """Dtype of the moments; also used by code that creates them before the first step."""

    @cached_property
    def _noise(self) -> Noise:
        return Noise()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        self._noise.rewind()
        indices = {id(group): index for index, group in enumerate(self._groups)}
        for group in self.param_groups:
            for p in group["params"]:
                # Another rank may have all of a small parameter, which leaves an empty tensor here.
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, group, indices[id(group)])
        return loss

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # DeepSpeed shortens ``param_groups`` to one group per step.
        self._groups = list(self.param_groups)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._groups = list(self.param_groups)

    def _update(
        self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], index: int
    ) -> None:
        state = self.state[p]
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=self.state_dtype)
        taken = int(state.get("step", 0))
        state["step"] = taken + 1
        # Flatten in memory order, which may be channels_last. Only a gradient's order may differ
        # from its weight's; reshape then copies the gradient.
        order = sorted(range(p.dim()), key=p.stride, reverse=True)
        states = (t.permute(order).view(-1) for t in (state["exp_avg"], state["exp_avg_sq"]))
        flat = [p.permute(order).view(-1), grad.permute(order).reshape(-1), *states]
        first, key = self._noise.place(index, p.numel()), noise_key(taken, index)
        size = min(p.numel(), _WIDENED.get(p.device.type, _WIDENED_ON_DEVICE))
        room = [torch.empty(size, device=p.device) for _ in range(2)]
        for start, (weight, slope, *moments) in zip(
            range(0, p.numel(), size),
            zip(*(torch.split(t, size) for t in flat), strict=True),
            strict=True,
        ):
            update_chunk(
                weight, slope, moments, taken=taken, group=group,
                wide=[each[: weight.numel()] for each in room],
                noise=self._noise.of(key, first + start, weight),
            )  # fmt: skip


def noise_key(taken: int, group: int) -> int:
    """Return the 32-bit seed of the random bits for one step of one group.

    Args:
        taken: Number of steps before this one.
        group: Index of the group.
    """
    return _mixed(_mixed(taken + 1) ^ (group + 1) * 0x9E3779B9 & _WORD)


def noise_bits(key: int, positions: torch.Tensor) -> torch.Tensor:
    """Return each element's random bits, equal to the output of ``drawn`` in ``host_step.cpp``.

    Args:
        key: Result of ``noise_key``.
        positions: Positions of the elements in their group, int32; overwritten.

    Returns:
        ``positions``: the low 16 bits are for the first moment, the high 16 bits for the second.
    """
    x = positions.bitwise_and_(NOISE_PERIOD - 1).bitwise_xor_(_signed(key))
    # As ``_mixed``, whose shifts fill with zeros; products of int32 wrap.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(_FACTORS[0])
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(_FACTORS[1])
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


_FACTORS: Final = (0x7FEB352D, 0x846CA68B)


def _mixed(x: int) -> int:
    """Chris Wellons' "lowbias32" (https://github.com/skeeto/hash-prospector)."""
    x = (x ^ x >> 16) * _FACTORS[0] & _WORD
    x = (x ^ x >> 15) * _FACTORS[1] & _WORD
    return x ^ x >> 16


def _signed(word: int) -> int:
    """Return the number of the same 32 bits in two's complement."""
    return word - 2**32 if word >= 2**31 else word


class Noise:
    """Random bits for stochastic rounding, and the positions of a step's tensors in these bits."""

    def __init__(self) -> None:
        self._drawn: tuple[torch.device, int] | None = None
        self._bits = torch.empty(0, dtype=torch.int32)
        self._next: dict[int, int] = {}

    def rewind(self) -> None:
        """Restart at the first tensor of each group."""
        self._next.clear()

    def place(self, group: int, numel: int) -> int:
        """Return where a group's next tensor starts, as a position among the group's elements.

        Args:
            group: Index of the group.
            numel: Number of elements of the next tensor.
        """
        start = self._next.get(group, 0)
        self._next[group] = start + numel
        return start

    def of(self, key: int, start: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return, for each moment, one random int32 from 0 to 65,535 per element of ``like``.

        Args:
            key: Result of ``noise_key``.
            start: Position of the first element in its group.
            like: Tensor that gives the number of elements and the device.
        """
        start %= NOISE_PERIOD
        stop = start + like.numel()
        if self._drawn != (like.device, key) or self._bits.numel() < stop:
            size = min(NOISE_PERIOD, 2 ** (stop - 1).bit_length())
            at = torch.arange(size, dtype=torch.int32, device=like.device)
            # Repeat the bits, so that every request is one contiguous slice.
            self._bits = noise_bits(key, at).repeat(-(-stop // size))
            self._drawn = like.device, key
        bits = self._bits[start:stop]
        return [bits & 0xFFFF, bits >> 16 & 0xFFFF]


def update_chunk(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    *,
    wide: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    taken: int,
    group: Mapping[str, Any],
) -> None:
    """Convert the moments to fp32, run torch's AdamW, and round the moments back to bf16.

    Args:
        weight: Weights, fp32, 1-D.
        grad: Gradient, fp32.
        moments: First and second moment, bf16.
        wide: Two fp32 buffers for the moments.
        noise: One int32 tensor of random numbers from 0 to 65,535 for each moment.
        taken: Number of steps before this one.
        group: The optimizer's group, with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
    """
    exact = [room.copy_(moment) for room, moment in zip(wide, moments, strict=True)]
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [grad], [exact[0]], [exact[1]], [],
        [torch.full((), float(taken), device=weight.device)],
        fused=accelerator_of(weight.device).fuses_adam,
        foreach=False, amsgrad=False, maximize=False,
        lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
        weight_decay=group["weight_decay"],
    )  # fmt: skip
    for each, bits, moment in zip(exact, noise, moments, strict=True):
        round_stochastically(each, bits, into=moment)


def round_stochastically(exact: torch.Tensor, bits: torch.Tensor, *, into: torch.Tensor) -> None:
    """Round each fp32 number randomly to one of the two nearest bf16 numbers; exact in expectation.

    Args:
        exact: fp32 numbers, 1-D; overwritten. Infinity and NaN are kept.
        bits: Uniform random int32 numbers from 0 to 65,535, in the shape of ``exact``.
        into: bf16 tensor in the shape of ``exact``; receives the result.
    """
    into.copy_(rounded_by(exact, lambda words: words.add_(bits)))


def rounded_by(exact: torch.Tensor, add: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Round as ``round_stochastically``; return the result as a view of ``exact``.

    Args:
        exact: fp32 numbers, 1-D; overwritten. Infinity and NaN are kept.
        add: Function that adds uniform random numbers from 0 to 65,535 to int32 numbers.
    """
    # CUDA's usual NaN has all bits but the sign set, so a carry would turn it into -0; math.nan has
    # room for the carry.
    exact.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    # bf16 is the upper half of an fp32 number: a random carry out of the lower half rounds it away
    # from zero.
    add(exact.view(torch.int32))
    return exact.view(torch.bfloat16)[1::2]


# -- AdamW with one-byte moments.


BLOCK: Final = 256
"""Number of codes that share a scale."""
CODEBOOKS: Final[Mapping[str, bool]] = {"e4m3": True, "e5m3": False}
"""Names of the codebooks in checkpoints, and whether a codebook is signed."""
_MOMENTS: Final[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether a moment can be negative."""


@cache
def codebook(*, signed: bool) -> torch.Tensor:
    """Return the values of the 256 codes, as fractions of the largest magnitude in a block.

    A code is a floating-point number with 3 bits of mantissa: with a sign and 4 bits of exponent
    from ``2 ** -15``, or without a sign and with 5 bits of exponent from ``2 ** -31``. The lowest
    signed code is 0; no unsigned code is, so that no denominator is 0 where a first moment is not.

    Args:
        signed: Whether the codebook contains negative values.
    """
    codes = torch.arange(256)
    magnitudes = codes % 128 if signed else codes
    exponents = magnitudes // 8 - (15 if signed else 31)
    values = torch.ldexp(1 + magnitudes % 8 / 8, exponents)
    if not signed:
        return values
    return torch.where(magnitudes > 0, values, 0.0) * torch.where(codes < 128, 1.0, -1.0)


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the fp32 numbers that codes represent.

    Args:
        codes: Codes, uint8, 1-D.
        scales: One fp32 scale per block of 256 codes.
        signed: Whether the codes can be negative.
    """
    values = torch.index_select(codebook(signed=signed), 0, codes.int())
    return values.mul_(scales.repeat_interleave(BLOCK)[: codes.numel()])


def scale_of(moment: str) -> str:
    """Return the name of the state that contains the block scales of a moment."""
    return f"{moment}_scale"


class AdamW8BitStates(AdamWStates):
    """AdamW with one-byte moments; weights must be contiguous.

    The states use 2.03 bytes per weight instead of 8: one code per moment (``codebook``), and one
    fp32 scale per block of 256 codes. As in bitsandbytes' AdamW8bit
    (https://arxiv.org/abs/2110.02861), a step decodes the moments, updates them in fp32 and encodes
    them again; floating-point codes are found without look-ups.

    The class has no ``step``: the streaming engine runs the update as one fused C++ kernel
    (``Host8BitAdam``). Without streaming, use bitsandbytes instead.
    """

    formats: Final[Mapping[str, StateFormat]] = {
        **{
            name: StateFormat(dtype="uint8", codebook=book)
            for name, book in zip(_MOMENTS, CODEBOOKS, strict=True)
        },
        **{scale_of(name): StateFormat(block=BLOCK) for name in _MOMENTS},
    }

    @staticmethod
    def create_states(state: MutableMapping[str, Any], numel: int) -> None:
        """Create the states before the first step; all moments are zero.

        Args:
            state: The optimizer's state dict for one tensor; the moments and scales are added in
                place.
            numel: Number of elements of the tensor.
        """
        for name in _MOMENTS:
            if name not in state:
                state[name] = torch.zeros(numel, dtype=torch.uint8)
                state[scale_of(name)] = torch.zeros(-(-numel // BLOCK))
