"""Number and size of DeepSpeed's swap files, which a lease reserves and an estimate counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs

from zerotune._util.text import is_integer
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.resolve.sizes import AIO_BLOCK, SMALLEST_SWAP_BYTES, SUB_GROUP_NVME, sub_groups
from zerotune.plan.resolved import Resolved

_ALIGNMENT: Final = 1024
"""``AIO_ALIGNED_BYTES``: alignment of each thread's share of a swap file."""


@attrs.frozen(kw_only=True)
class SwapFiles:
    """Number and size of the swap files that a rank writes for one kind of data."""

    nbytes: int = 0
    count: int = 0
    stays: int = 0
    """Bytes of tensors that are too small to swap."""

    def __add__(self, other: SwapFiles) -> SwapFiles:
        return SwapFiles(
            nbytes=self.nbytes + other.nbytes,
            count=self.count + other.count,
            stays=self.stays + other.stays,
        )

    def times(self, factor: int) -> SwapFiles:
        """Return number and sizes, multiplied by ``factor``."""
        return SwapFiles(
            nbytes=self.nbytes * factor, count=self.count * factor, stays=self.stays * factor
        )


@attrs.frozen(kw_only=True)
class SwapCounter:
    """Swap files of one rank, as DeepSpeed 0.19.8 writes them (``runtime/swap_tensor``).

    Tensors smaller than 1 MiB or smaller than an aio block stay in memory. Each parameter's
    partition is one file. Each sub-group of the optimizer has one file for its master weights and
    one for each state. The gradients of each parameter form a separate file. Sizes are rounded up
    to a multiple of 1024 bytes times the number of aio threads.
    """

    resolved: Resolved
    model: ModelFacts

    def _files(self, numels: Iterable[int], element: int) -> SwapFiles:
        aio = self.resolved.plan.aio
        block, threads = (aio.block_size, aio.intra_op_parallelism) if aio else (None, None)
        least = max(SMALLEST_SWAP_BYTES, block if is_integer(block) and block else AIO_BLOCK)
        unit = _ALIGNMENT * (threads if is_integer(threads) and threads else 1)
        sizes = [element * numel for numel in numels]
        swapped = [-(-size // unit) * unit for size in sizes if size >= least]
        stays = sum([size for size in sizes if size < least])
        return SwapFiles(nbytes=sum(swapped), count=len(swapped), stays=stays)

    @property
    def weights(self) -> SwapFiles:
        """Weights in the model's precision."""
        element = 4 if self.resolved.precision == "fp32" else 2
        return self._files(self.model.parts(self.resolved.world_size), element)

    @property
    def masters(self) -> SwapFiles:
        """Master weights."""
        zero = self.resolved.plan.zero_optimization
        size = None if zero is None else zero.sub_group_size
        limit = size if is_integer(size) else SUB_GROUP_NVME
        return self._files(sub_groups(self.model, self.resolved.world_size, limit), 4)

    @property
    def states(self) -> SwapFiles:
        """States of the optimizer."""
        choice = self.resolved.optimizer
        states = entry_of(choice.name).states_per_weight(choice.params)
        return self.masters.times(math.ceil(states))

    @property
    def gradients(self) -> SwapFiles:
        """Gradients in fp32."""
        return self._files(self.model.trainable_parts(self.resolved.world_size), 4)
