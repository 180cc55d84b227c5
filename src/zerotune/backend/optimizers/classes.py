"""Lamb, Lion and Muon: optimizers that DeepSpeed lacks, or has for some stages only, in torch.

They take whole parameters as well as the flat shards of ZeRO: see ``ShardAware``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from typing_extensions import override

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import MasterLayout


@attrs.frozen(kw_only=True)
class Piece:
    """This rank's part of one parameter, inside one tensor of the optimizer."""

    index: int
    """Number of the parameter, the same on every rank."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of this part in the flattened parameter."""
    numel: int
    """Elements of this part; 0 where another rank has them all."""
    offset: int
    """First element of this part in the optimizer's tensor."""
    split: bool
    """Whether no rank has the whole parameter."""

    @property
    def full_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


class TensorByTensor(torch.optim.Optimizer):
    """Base of optimizers that update one tensor after the other."""

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
        """Adam's states of a tensor, with the gradient taken in."""
        state: dict[str, Any] = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return state


class ShardAware(TensorByTensor):
    """Base of optimizers whose update of one element depends on the whole parameter.

    Before ``attach``, and for tensors nobody described, every tensor is one whole parameter. ZeRO
    steps one group (stages 1, 2) or one sub-group (stage 3) at a time and every rank steps
    them in the same order, so the few collectives made inside ``step`` meet.
    """

    _pieces: dict[int, list[Piece]] | None = None
    _group: ProcessGroup | None = None
    _parameters: int = 0
    _device: torch.device = torch.device("cpu")

    def attach(self, *, layout: MasterLayout, group: ProcessGroup, device: torch.device) -> None:
        """Learn which part of which parameter lies where.

        Collective: every rank must call it, after the engine has partitioned the parameters.

        Args:
            layout: Where the engine keeps its master weights.
            group: The processes that hold them together.
            device: Where these processes exchange tensors.
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
        pieces: dict[int, list[Piece]] = {id(tensor): [] for tensor in layout.tensors}
        for number, (name, shape) in enumerate(order):
            slab_sum, holders, wholes = (int(value) for value in totals[number])
            tensor = layout.tensors[slab_sum // max(1, holders)]
            # At stage 3 a sub-group's tensors hold a part of each of its parameters.
            part = mine.get(name)
            start, numel, offset = (part.start, part.numel, part.offset) if part else (0, 0, 0)
            pieces[id(tensor)].append(
                Piece(
                    index=number, shape=shape, start=start, numel=numel, offset=offset,
                    split=sharded and wholes == 0,
                )
            )  # fmt: skip
        self._pieces = pieces
        self._parameters = len(order)

    def pieces_of(self, tensor: torch.Tensor) -> list[Piece]:
        """What lies in one of the optimizer's tensors, in an order that all ranks share."""
        described = (self._pieces or {}).get(id(tensor))
        if described is not None:
            return described
        return [
            Piece(
                index=0, shape=tuple(tensor.shape), start=0, numel=tensor.numel(), offset=0,
                split=False,
            )
        ]  # fmt: skip

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` summed over the ranks that hold the parameters together."""
        if self._group is None:
            return values
        # Offloaded shards lie in host memory, where nccl cannot reach them.
        return self._group.sum_(values.to(self._device)).to(values.device)

    def whole(self, flat: torch.Tensor, piece: Piece) -> torch.Tensor | None:
        """The whole parameter's part of ``flat``, put together from all ranks if it is split.

        Returns:
            In the parameter's shape; ``None`` where this rank has no part in it.
        """
        part = flat.view(-1).narrow(0, piece.offset, piece.numel) if piece.numel else None
        if not piece.split:
            return None if part is None else part.view(piece.shape)
        full = torch.zeros(piece.full_numel, dtype=flat.dtype, device=flat.device)
        if part is not None:
            full.narrow(0, piece.start, piece.numel).copy_(part)
        full = self.sum_over_ranks(full)
        return None if part is None else full.view(piece.shape)


class Lamb(ShardAware):
    """Lamb of You et al. 2020, algorithm 2 (https://arxiv.org/abs/1904.00962).

    The trust ratio needs the norms of whole parameters, which a flat shard of ZeRO does not have:
    each rank sums the squares of its parts, and one small sum over the ranks makes them whole.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Keeps the denominator off zero.
        weight_decay: Decay, inside the trust ratio.
        bias_correction: Whether the moments are corrected for their start at zero.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
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
        update = self._direction(p, grad, group).view(-1)
        flat, pieces = p.view(-1), self.pieces_of(p)
        squares = torch.zeros(max(1, self._parameters), 2, dtype=torch.float64, device=p.device)
        for piece in pieces:
            for column, values in enumerate((flat, update)):
                part = values.narrow(0, piece.offset, piece.numel)
                # torch's own norm of a float32 tensor sums in blocks; only the few sums of
                # different ranks are added in float64.
                squares[piece.index, column] = part.norm().double().square()
        norms = self.sum_over_ranks(squares).sqrt_()
        for piece in pieces:
            weight, step = (float(value) for value in norms[piece.index])
            trust = weight / step if weight > 0 and step > 0 else 1.0
            trust = min(max(trust, group["min_coeff"]), group["max_coeff"])
            part = flat.narrow(0, piece.offset, piece.numel)
            part.add_(update.narrow(0, piece.offset, piece.numel), alpha=-group["lr"] * trust)

    def _direction(
        self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """Adam's step with the weight decay, before the trust ratio."""
        state, (beta1, beta2) = self._adam_moments(p, grad, group), group["betas"]
        first = second = 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        adam: torch.Tensor = (state["exp_avg"] / first).div_(denominator)
        return adam.add_(p, alpha=group["weight_decay"])


class Lion(TensorByTensor):
    """Lion of Chen et al. 2023, algorithm 2 (https://arxiv.org/abs/2302.06675).

    Works element by element, so ZeRO's flat shards change nothing.

    Args:
        params: Parameters or groups.
        lr: Learning rate, 3 to 10 times smaller than Adam's.
        betas: Weights of the momentum in the update, and of its decay.
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


class Muon(ShardAware):
    """Muon of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/).

    A group with ``use_muon`` is updated by the orthogonalised momentum; convolutions are seen as
    matrices of (out, in x height x width), as its authors do. Other groups get AdamW. Under ZeRO
    a matrix that is split over ranks is put together for the orthogonalisation, one at a time;
    each rank then keeps its own part of the result.

    Args:
        params: Groups; each may hold ``use_muon``, ``lr``, ``momentum``, ``weight_decay``,
            ``betas``, ``eps``.
        lr: Learning rate of groups without one.
        momentum: Decay of the momentum.
        nesterov: Whether the update looks one step ahead.
        ns_steps: Newton-Schulz iterations.
        betas: Decay rates of Adam's moments.
        eps: Keeps Adam's denominator off zero.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.
    """

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
        for piece in self.pieces_of(p):
            matrix = self.whole(direction, piece)
            if matrix is None:
                continue
            update = orthogonalise(matrix.flatten(1), steps=group["ns_steps"]).reshape(-1)
            part = update.narrow(0, piece.start, piece.numel)
            flat.narrow(0, piece.offset, piece.numel).add_(part, alpha=-group["lr"])


def orthogonalise(matrix: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix, roughly: singular values come to lie between 0.7 and 1.2.

    A quintic Newton-Schulz iteration with the coefficients of Jordan et al.; then scaled by
    ``sqrt(max(1, rows / columns))`` as in their code.

    Args:
        matrix: (rows, columns).
        steps: Iterations.

    Returns:
        (rows, columns), in the dtype of ``matrix``.
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
