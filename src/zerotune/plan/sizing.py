"""Buffer sizes from the shapes of the parameters. Everything is counted in elements.

Pure arithmetic; the reasons are the code of DeepSpeed 0.19.8 in ``runtime/zero`` and
``runtime/swap_tensor``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from operator import attrgetter
from typing import Final

import attrs

from zerotune.plan.model import BlockFacts, ModelFacts, ParameterFacts

REDUCE_BUCKET: Final = 30_000_000
"""Elements; 60 MB in bf16, doubled by ``overlap_comm``. DeepSpeed's 5e8 costs up to 2.8 GiB."""
PREFETCH_BUCKET: Final = 60_000_000
MAX_LIVE: Final = 120_000_000
PERSISTENCE_LIMIT: Final = 100_000
"""DeepSpeed's default threshold, never exceeded."""
PERSISTENCE_BLIND: Final = 10_000
"""Threshold while no model is known: biases and norms of any diffusion model."""
PERSISTENT_SHARE: Final = 0.01
SUB_GROUP: Final = 100_000_000
SUB_GROUP_NVME: Final = 50_000_000
"""Smaller, because the swap pool pins ``buffer_count`` buffers of the largest sub-group."""
PARAM_BUFFER: Final = 100_000_000
PARAM_BUFFERS: Final = 5
LEAF_CLASSES: Final = frozenset({"BasicTransformerBlock", "ResnetBlock2D"})
"""Blocks that diffusers calls with positional inputs. DeepSpeed sees no others of a leaf module:
called with keywords, its weights are gone in the backward pass (0.19.8)."""
SMALLEST_SWAP_BYTES: Final = 1024**2
"""``MIN_AIO_BYTES``: a smaller partition never leaves host memory."""
_NUMEL: Final = attrgetter("numel")


def reduce_bucket(model: ModelFacts | None) -> int:
    """Elements reduced at a time: the default or what is trained, and the largest trained tensor.

    A gradient larger than the bucket is reduced on its own, outside the overlapped path.
    """
    if model is None or model.trainable_numel == 0:
        return REDUCE_BUCKET
    return max(model.largest_trainable, min(REDUCE_BUCKET, model.trainable_numel))


def allgather_bucket(model: ModelFacts | None) -> int:
    """Like ``reduce_bucket``, rounded up to DeepSpeed's ``nccl_start_alignment_factor`` of 2."""
    size = reduce_bucket(model)
    return size + size % 2


def leaf_blocks(model: ModelFacts | None) -> tuple[BlockFacts, ...]:
    """Blocks worth fetching as a whole: safe to, and no larger than what is fetched ahead."""
    if model is None or len(model.trainable) < len(model.parameters):
        return ()
    return tuple(
        block
        for block in model.blocks
        if block.class_name in LEAF_CLASSES and block.numel <= PREFETCH_BUCKET
    )


def prefetch_bucket(model: ModelFacts | None) -> int:
    """Elements fetched ahead: a block where blocks are known, at least the largest tensor."""
    if model is None or model.numel == 0:
        return PREFETCH_BUCKET
    block = max((block.numel for block in leaf_blocks(model)), default=PREFETCH_BUCKET)
    return max(model.largest, min(block, model.numel))


def max_live(model: ModelFacts | None) -> int:
    """Elements resident at a time: twice what is fetched ahead."""
    if model is None or model.numel == 0:
        return MAX_LIVE
    return max(2 * model.largest, min(2 * prefetch_bucket(model), model.numel))


def persistence_threshold(model: ModelFacts | None) -> tuple[int, int]:
    """The largest threshold that leaves at most 1 % of the elements unpartitioned.

    Returns:
        The threshold (elements) and the elements it leaves unpartitioned.
    """
    if model is None:
        return PERSISTENCE_BLIND, 0
    budget = PERSISTENT_SHARE * model.numel
    threshold = persistent = 0
    sizes = sorted([parameter.numel for parameter in model.parameters])
    for size, equals in itertools.groupby(sizes):
        total = persistent + sum(equals)
        if size > PERSISTENCE_LIMIT or total > budget:
            break
        threshold, persistent = size, total
    return threshold, persistent


def partition(parameter: ParameterFacts, world_size: int) -> int:
    """Elements of one rank's part of ``parameter``, padding included."""
    return -(-parameter.numel // world_size)


def largest_partition(model: ModelFacts, world_size: int) -> ParameterFacts | None:
    """The parameter whose part is largest; ``None`` for a model without parameters."""
    return max(model.parameters, key=lambda p: partition(p, world_size), default=None)


@attrs.frozen(kw_only=True)
class Swapping:
    """Which parts of a model DeepSpeed writes to NVMe, and which stay in host memory."""

    model: ModelFacts
    world_size: int
    element_bytes: int
    """Bytes of one element of the model's precision."""
    block_bytes: int
    """``aio.block_size``."""

    @property
    def smallest(self) -> int:
        """Elements of one rank's part from which it is large enough to leave host memory."""
        return -(-max(SMALLEST_SWAP_BYTES, self.block_bytes) // self.element_bytes)

    def swappable(self, parameter: ParameterFacts) -> bool:
        """Whether one rank's part is large enough to leave host memory."""
        return partition(parameter, self.world_size) >= self.smallest

    @property
    def swapped(self) -> list[ParameterFacts]:
        """The parameters that are written to files."""
        least, parts = self.smallest, self.model.parts(self.world_size)
        every = zip(self.model.parameters, parts, strict=True)
        return [parameter for parameter, part in every if part >= least]

    def happens(self, max_in_cpu: int) -> bool:
        """Whether anything is swapped when ``max_in_cpu`` elements may stay in host memory.

        DeepSpeed counts trainable parameters only against that limit; frozen ones always swap.
        """
        swapped = self.swapped
        if sum(self.model.trainable_parts(self.world_size)) > max_in_cpu:
            return bool(swapped)
        return len([parameter for parameter in swapped if parameter.trainable]) < len(swapped)

    @property
    def largest(self) -> ParameterFacts | None:
        """The largest parameter that is swapped; ``None`` when none is."""
        return max(self.swapped, key=_NUMEL, default=None)

    @property
    def buffers(self) -> int:
        """Buffers for the parameters that are resident at once when nothing is fetched ahead.

        A resident parameter keeps its buffer. Resident are the parameters a module owns itself,
        while it runs, and those of the modules around it.
        """
        owned = Counter([parameter.name.rpartition(".")[0] for parameter in self.swapped])
        most = max([_with_owners(owned, module) for module in owned], default=0)
        return max(PARAM_BUFFERS, most + 2)


def _with_owners(owned: Counter[str], module: str) -> int:
    count = owned[module]
    while module:
        module = module.rpartition(".")[0]
        count += owned[module]
    return count


def sub_groups(model: ModelFacts, world_size: int, sub_group_size: int) -> tuple[int, ...]:
    """Elements of one rank's part of each sub-group: it closes once it reaches its size."""
    groups: list[int] = []
    numel = 0
    for part in model.trainable_parts(world_size):
        numel += part
        if numel >= sub_group_size:
            groups.append(numel)
            numel = 0
    return (*groups, numel) if numel else tuple(groups)


def largest_sub_group(model: ModelFacts, world_size: int, sub_group_size: int) -> int:
    """Most elements of one rank's part of a sub-group: it closes once it reaches its size."""
    parts = model.trainable_parts(world_size)
    return min(sum(parts), sub_group_size + max(parts, default=0))
