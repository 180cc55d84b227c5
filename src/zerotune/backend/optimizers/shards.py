"""What an optimizer needs that must see whole parameters although ZeRO hands it flat shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.master_weights import FragmentAddress, MasterLayout


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


class ShardAware(torch.optim.Optimizer):
    """Base of optimizers whose update of one element depends on the whole parameter.

    Before ``attach``, and for tensors nobody described, every tensor is one whole parameter. ZeRO
    steps one group (stages 1, 2) or one sub-group (stage 3) at a time and every rank steps
    them in the same order, so the few collectives made inside ``step`` meet.
    """

    _pieces: dict[int, list[Piece]] | None = None
    _group: ProcessGroup | None = None
    _parameters: int = 0
    _device: torch.device = torch.device("cpu")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one tensor, which has a gradient."""
        raise NotImplementedError

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
            pieces[id(tensor)].append(
                _piece(number, shape, mine.get(name), split=sharded and wholes == 0)
            )
        self._pieces = pieces
        self._parameters = len(order)

    def pieces_of(self, tensor: torch.Tensor) -> list[Piece]:
        """What lies in one of the optimizer's tensors, in an order that all ranks share."""
        known = None if self._pieces is None else self._pieces.get(id(tensor))
        if known is not None:
            return known
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
        own = flat.view(-1).narrow(0, piece.offset, piece.numel) if piece.numel else None
        if not piece.split:
            return None if own is None else own.view(piece.shape)
        full = torch.zeros(piece.full_numel, dtype=flat.dtype, device=flat.device)
        if own is not None:
            full.narrow(0, piece.start, piece.numel).copy_(own)
        full = self.sum_over_ranks(full)
        return None if own is None else full.view(piece.shape)


def _piece(
    index: int, shape: tuple[int, ...], address: FragmentAddress | None, *, split: bool
) -> Piece:
    return Piece(
        index=index,
        shape=shape,
        start=0 if address is None else address.start,
        numel=0 if address is None else address.numel,
        offset=0 if address is None else address.offset,
        split=split,
    )
