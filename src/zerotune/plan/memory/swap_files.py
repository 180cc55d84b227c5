"""Number and size of DeepSpeed's swap files, which a lease reserves and an estimate counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import attrs

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


def swap_files(resolved: Resolved, model: ModelFacts) -> dict[str, SwapFiles]:
    """Return the swap files of one rank, as DeepSpeed 0.19.8 writes them (``runtime/swap_tensor``).

    Tensors smaller than 1 MiB or smaller than an aio block stay in memory. Each parameter's
    partition is one file. Each sub-group of the optimizer has one file for its master weights and
    one for each state. The gradients of each parameter form a separate file. Sizes are rounded up
    to a multiple of 1024 bytes times the number of aio threads.

    Args:
        resolved: The plan.
        model: The model's facts.

    Returns:
        The files by component: ``"weights"`` in the model's precision; ``"master weights"``,
        ``"optimizer states"`` and ``"gradients"`` in fp32.
    """
    aio, zero, ranks = resolved.plan.aio, resolved.plan.zero_optimization, resolved.world_size
    block: Any = (aio and aio.block_size) or AIO_BLOCK
    threads: Any = (aio and aio.intra_op_parallelism) or 1
    group: Any = (zero and zero.sub_group_size) or SUB_GROUP_NVME
    least, unit = max(SMALLEST_SWAP_BYTES, block), _ALIGNMENT * threads

    def files(numels: Iterable[int], element: int) -> SwapFiles:
        sizes = [element * numel for numel in numels]
        swapped = [-(-size // unit) * unit for size in sizes if size >= least]
        stays = sum([size for size in sizes if size < least])
        return SwapFiles(nbytes=sum(swapped), count=len(swapped), stays=stays)

    choice, masters = resolved.optimizer, files(sub_groups(model, ranks, group), 4)
    states = math.ceil(entry_of(choice.name).states_per_weight(choice.params))
    return {
        "weights": files(model.parts(ranks), 4 if resolved.precision == "fp32" else 2),
        "master weights": masters,
        "optimizer states": masters.times(states),
        "gradients": files(model.trainable_parts(ranks), 4),
    }
