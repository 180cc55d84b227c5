"""Buffer sizes from the shapes of the parameters. Everything is counted in elements.

Pure arithmetic; the reasons are the code of DeepSpeed 0.19.8 in ``runtime/zero`` and
``runtime/swap_tensor``.
"""

from __future__ import annotations

import itertools
from typing import Final

from zerotune.plan.facts import ModelFacts, ParameterFacts

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
SMALLEST_SWAP_BYTES: Final = 1024**2
"""``MIN_AIO_BYTES``: a smaller partition never leaves host memory."""


def reduce_bucket(model: ModelFacts | None) -> int:
    """Elements reduced at a time: the default, the model if smaller, the largest tensor if larger.

    A gradient larger than the bucket is reduced on its own, outside the overlapped path.
    """
    if model is None or model.numel == 0:
        return REDUCE_BUCKET
    return max(model.largest, min(REDUCE_BUCKET, model.trainable_numel))


def allgather_bucket(model: ModelFacts | None) -> int:
    """Like ``reduce_bucket``, rounded up to DeepSpeed's ``nccl_start_alignment_factor`` of 2."""
    size = reduce_bucket(model)
    return size + size % 2


def prefetch_bucket(model: ModelFacts | None) -> int:
    """Elements fetched ahead; at least the largest tensor, at most the model."""
    if model is None or model.numel == 0:
        return PREFETCH_BUCKET
    return max(model.largest, min(PREFETCH_BUCKET, model.numel))


def max_live(model: ModelFacts | None) -> int:
    """Elements resident at a time: two prefetch buckets, at least two largest tensors."""
    if model is None or model.numel == 0:
        return MAX_LIVE
    return max(2 * model.largest, min(MAX_LIVE, model.numel))


def persistence_threshold(model: ModelFacts | None) -> tuple[int, int]:
    """The largest threshold that leaves at most 1 % of the elements unpartitioned.

    Returns:
        The threshold (elements) and the elements it leaves unpartitioned.
    """
    if model is None:
        return PERSISTENCE_BLIND, 0
    budget = PERSISTENT_SHARE * model.numel
    threshold = persistent = 0
    sizes = sorted(parameter.numel for parameter in model.parameters)
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


def swappable(
    parameter: ParameterFacts, world_size: int, *, element_bytes: int, block_bytes: int
) -> bool:
    """Whether DeepSpeed swaps this parameter's part to NVMe, or keeps it in host memory."""
    part_bytes = partition(parameter, world_size) * element_bytes
    return part_bytes >= max(SMALLEST_SWAP_BYTES, block_bytes)


def param_buffer_count(
    model: ModelFacts | None,
    world_size: int,
    *,
    ahead: int,
    element_bytes: int,
    block_bytes: int,
) -> int:
    """Buffers for the parameters that can be resident or on their way at once.

    A resident parameter keeps its swap buffer until it is released, and DeepSpeed asserts that
    a free one exists. Consecutive parameters approximate the order of use.

    Args:
        model: The model.
        world_size: Number of ranks.
        ahead: Elements fetched ahead (``stage3_prefetch_bucket_size``).
        element_bytes: Bytes of one element of the model's precision.
        block_bytes: ``aio.block_size``.
    """
    if model is None:
        return PARAM_BUFFERS
    sizes = [
        p.numel
        for p in model.parameters
        if swappable(p, world_size, element_bytes=element_bytes, block_bytes=block_bytes)
    ]
    most = start = inside = 0
    for end, size in enumerate(sizes):
        inside += size
        while inside - sizes[start] > ahead:
            inside -= sizes[start]
            start += 1
        most = max(most, end - start + 1)
    # Two more for the layer in use, two for reads that overtake the order of use.
    return max(PARAM_BUFFERS, min(most + 4, len(sizes) + 1))
