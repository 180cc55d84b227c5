"""Buffer sizes from the shapes of the parameters, counted in elements."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any, Final

import attrs

from zerotune._util.text import release_of
from zerotune.plan.facts import UNET_BLOCKS, BlockFacts, ModelFacts, ParameterFacts
from zerotune.plan.sections import (
    OffloadSection,
    ZeroSection,
)
from zerotune.platform.facts import CUDA_ALLOCATORS, Platform

# The sizes follow from the code of DeepSpeed 0.19.8, ``runtime/zero`` and ``runtime/swap_tensor``.

REDUCE_BUCKET: Final = 30_000_000
"""Default size of the reduce bucket in elements. In bf16 the bucket uses 60 MB, and with
``overlap_comm`` 120 MB. DeepSpeed's default of 5e8 uses up to 2.8 GiB."""


PREFETCH_BUCKET: Final = 60_000_000


MAX_LIVE: Final = 120_000_000


PERSISTENCE_LIMIT: Final = 100_000
"""Maximum persistence threshold; equal to DeepSpeed's default threshold."""


PERSISTENCE_BLIND: Final = 10_000
"""Persistence threshold for an unknown model. It exceeds the size of the biases and norm weights of
any diffusion model."""


PERSISTENT_SHARE: Final = 0.01


SUB_GROUP: Final = 100_000_000


SUB_GROUP_NVME: Final = 50_000_000
"""Sub-group size with NVMe offload; small, because the swap pool pins ``buffer_count`` buffers of
this size."""


PARAM_BUFFER: Final = 100_000_000


PARAM_BUFFERS: Final = 5


LEAF_CLASSES: Final = UNET_BLOCKS
"""Classes of blocks that diffusers calls with positional inputs. DeepSpeed 0.19.8 handles only the
positional inputs of a leaf module: if a block gets keyword inputs, its weights are missing in the
backward pass."""


SMALLEST_SWAP_BYTES: Final = 1024**2
"""DeepSpeed's ``MIN_AIO_BYTES``: smaller partitions never leave host memory."""


_NUMEL: Final = attrgetter("numel")


def reduce_bucket(model: ModelFacts | None) -> int:
    """Return the size of the reduce bucket in elements: at least the largest trained tensor.

    DeepSpeed reduces a gradient larger than the bucket separately and without overlap.
    """
    if model is None or model.trainable_numel == 0:
        return REDUCE_BUCKET
    return max(model.largest_trainable, min(REDUCE_BUCKET, model.trainable_numel))


def allgather_bucket(model: ModelFacts | None) -> int:
    """Return ``reduce_bucket`` rounded up to a multiple of 2 (``nccl_start_alignment_factor``)."""
    size = reduce_bucket(model)
    return size + size % 2


def leaf_blocks(model: ModelFacts | None) -> tuple[BlockFacts, ...]:
    """Return the blocks that fit in the prefetch bucket, so that stage 3 can fetch each whole."""
    if model is None or len(model.trainable) < len(model.parameters):
        return ()
    return tuple(
        block
        for block in model.blocks
        if block.class_name in LEAF_CLASSES and block.numel <= PREFETCH_BUCKET
    )


def prefetch_bucket(model: ModelFacts | None) -> int:
    """Return the prefetch size in elements: that of the largest leaf block or tensor."""
    if model is None or model.numel == 0:
        return PREFETCH_BUCKET
    block = max((block.numel for block in leaf_blocks(model)), default=PREFETCH_BUCKET)
    return max(model.largest, min(block, model.numel))


def max_live(model: ModelFacts | None) -> int:
    """Return the maximum number of elements resident at a time: twice the prefetch size."""
    if model is None or model.numel == 0:
        return MAX_LIVE
    return max(2 * model.largest, min(2 * prefetch_bucket(model), model.numel))


def persistence_threshold(model: ModelFacts | None) -> tuple[int, int]:
    """Return the largest persistence threshold that leaves at most 1 % of elements unpartitioned.

    Returns:
        The threshold, and the number of unpartitioned elements.
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
    """Return the number of elements of ``parameter`` that each rank stores, including padding."""
    return -(-parameter.numel // world_size)


@attrs.frozen(kw_only=True)
class Swapping:
    """The parameters that DeepSpeed swaps to NVMe, and those that stay in host memory."""

    model: ModelFacts
    world_size: int
    element_bytes: int
    """Bytes of one element in the model's precision."""
    block_bytes: int
    """``aio.block_size``."""

    @property
    def smallest(self) -> int:
        """Number of elements of the smallest partition that DeepSpeed swaps."""
        return -(-max(SMALLEST_SWAP_BYTES, self.block_bytes) // self.element_bytes)

    @property
    def swapped(self) -> list[ParameterFacts]:
        """Parameters that DeepSpeed swaps to files."""
        least, parts = self.smallest, self.model.parts(self.world_size)
        every = zip(self.model.parameters, parts, strict=True)
        return [parameter for parameter, part in every if part >= least]

    def happens(self, max_in_cpu: int) -> bool:
        """Whether anything is swapped if ``max_in_cpu`` elements may stay in host memory.

        DeepSpeed applies ``max_in_cpu`` only to trainable parameters, and always swaps frozen
        parameters.

        Args:
            max_in_cpu: Value of ``offload_param.max_in_cpu`` in elements.
        """
        swapped = self.swapped
        if sum(self.model.trainable_parts(self.world_size)) > max_in_cpu:
            return bool(swapped)
        return len([parameter for parameter in swapped if parameter.trainable]) < len(swapped)

    @property
    def largest(self) -> ParameterFacts | None:
        """The largest swapped parameter; ``None`` if no parameter is swapped."""
        return max(self.swapped, key=_NUMEL, default=None)

    def gathered(self, *, recomputed: bool) -> int:
        """Return the maximum number of swapped weights that are gathered at once.

        Args:
            recomputed: Whether gradient checkpointing recomputes the model's repeated blocks.
        """
        blocks = self.model.units if recomputed else ()
        return max(map(len, gathered_together(self.swapped, blocks)), default=0)

    @property
    def buffers(self) -> int:
        """Number of swap buffers for the weights that are gathered at once, and two spare ones."""
        return max(PARAM_BUFFERS, 2 + self.gathered(recomputed=True))

    def buffer_need(self, zero: ZeroSection) -> tuple[int, str]:
        """Return the minimum swap buffer size in elements, with a reason; 0 if none is needed."""
        largest, ranks = self.largest, self.world_size
        if largest is None:
            return 0, ""
        part = partition(largest, ranks)
        optimizer = zero.offload_optimizer
        if optimizer is None or optimizer.device != "nvme" or optimizer.fast_init is not True:
            shape = " x ".join(str(size) for size in largest.shape) or "a scalar"
            shared = f" shared by {ranks} ranks" if ranks > 1 else ""
            return part, f"the largest partition, {largest.name} ({shape}){shared}"
        group = largest_sub_group(self.model, ranks, elements(zero.sub_group_size))
        return max(part, group), (
            "the largest sub-group, because fast_init of offload_optimizer passes whole sub-groups"
            f" (sub_group_size {zero.sub_group_size}) through these buffers"
        )


def gathered_together(
    weights: Collection[ParameterFacts], blocks: Collection[str]
) -> list[list[ParameterFacts]]:
    """Return the groups of weights that stage 3 gathers at once.

    While a module runs, its direct weights and those of the modules around it are gathered. While a
    block is recomputed, all its weights are, until their gradients have come.

    Args:
        weights: Partitioned weights.
        blocks: Dotted names of the modules that gradient checkpointing recomputes.
    """
    inside = frozenset(blocks)
    direct: dict[str, list[ParameterFacts]] = {}
    for weight in weights:
        module = weight.name.rpartition(".")[0]
        owner = next((each for each in _and_parents(module) if each in inside), module)
        direct.setdefault(owner, []).append(weight)
    return [
        [weight for each in _and_parents(module) for weight in direct.get(each, ())]
        for module in direct
    ]


def _and_parents(module: str) -> Iterator[str]:
    """Yield a module's dotted name, and those of all modules around it; the model's is empty."""
    yield module
    while module:
        module = module.rpartition(".")[0]
        yield module


def sub_groups(model: ModelFacts, world_size: int, sub_group_size: int) -> tuple[int, ...]:
    """Return the number of elements in each sub-group of one rank (about ``sub_group_size``)."""
    groups: list[int] = []
    numel = 0
    for part in model.trainable_parts(world_size):
        numel += part
        if numel >= sub_group_size:
            groups.append(numel)
            numel = 0
    return (*groups, numel) if numel else tuple(groups)


def largest_sub_group(model: ModelFacts, world_size: int, sub_group_size: int) -> int:
    """Return the number of elements of the largest sub-group on one rank."""
    parts = model.trainable_parts(world_size)
    return min(sum(parts), sub_group_size + max(parts, default=0))


# -- Sizes of swap pools for NVMe offload.

OPTIMIZER_BUFFERS = 4
"""Number of swap buffers per sub-group, for master weights, gradients and Adam's two moments."""


AIO_BLOCK = 1_048_576


NO_PREFETCH: Final = (
    "DeepSpeed 0.19.8 fails when it prefetches parameters from NVMe (a layer is queued "
    "twice when the backward pass begins)"
)
"""The error occurs in ``__prefetch_nvme_param_partitions``: the second step fails with "already
assigned swap buffer", or the pool runs out ("Not enough buffers")."""


def optimizer_buffers(section: OffloadSection) -> int:
    """Return the number of swap buffers that Adam needs with several sub-groups.

    In runs with DeepSpeed 0.19.8, 8 buffers sufficed for ``pipeline_read`` alone. With
    ``pipeline_read`` and ``pipeline_write``, 8 buffers failed and 12 sufficed.
    """
    overlapped = (section.pipeline_read is True) + (section.pipeline_write is True)
    return OPTIMIZER_BUFFERS * (1 + overlapped)


def elements(value: Any) -> int:
    """Return ``value`` if it is a number of elements; 0 if it is unset or "auto"."""
    return value if isinstance(value, int) else 0


# -- Rounding of page-locked host memory.
#
# torch rounds each page-locked block up to a power of two, so that 9.6 GiB use 16. Newer releases
# have a setting for the size above which blocks are not rounded
# (``pinned_max_round_threshold_mb``), which the backend sets before an engine starts.

SETTING: Final = "pinned_max_round_threshold_mb"
"""Key of ``PYTORCH_ALLOC_CONF``: size in MiB above which blocks are not rounded."""


THRESHOLD: Final = 1
"""Value of ``SETTING`` in MiB; smaller blocks are still rounded, so that torch can reuse them."""


OLDEST_TORCH: Final = (2, 13)
"""Oldest torch release known to have the setting; the backend also tries it on older releases."""


def pins_exactly(platform: Platform) -> bool:
    """Whether torch page-locks blocks at their exact size on ``platform``.

    Args:
        platform: The machine; an unknown torch version counts as current.
    """
    if platform.accelerator not in CUDA_ALLOCATORS:
        return True
    version = platform.versions.get("torch")
    return version is None or release_of(version) >= OLDEST_TORCH
