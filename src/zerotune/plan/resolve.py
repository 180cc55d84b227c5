"""Fill in the values that a plan leaves open, and render the dict for DeepSpeed.

The module resolves batch sizes, clipping, precision, and every key of ZeRO and ``aio``; rules and
estimates call the same functions. Resolution calls ``prepared``, applies the corrections from
``zerotune.plan.rules``, and calls ``filled``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, NamedTuple

import attrs

from zerotune import platform as machines
from zerotune._util.text import is_number, release_of
from zerotune.decisions import Decision, Log, Severity, precedence
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanError,
    UnresolvedPlanError,
    writes,
)
from zerotune.plan.context import Context, RunFacts, Streaming
from zerotune.plan.facts import UNET_BLOCKS, BlockFacts, ModelFacts, ParameterFacts
from zerotune.plan.optimizer.capability import Situation
from zerotune.plan.optimizer.choose import ChoiceOptions, choose
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.render import automatic_paths
from zerotune.plan.resolved import (
    LEAF_MODULE,
    NO_DEEPSPEED,
    PLAIN_NEEDS,
    STEPPED_PLAINLY,
    Resolved,
    host_obstacle,
)
from zerotune.plan.section import Section, SectionT, evolved, join
from zerotune.plan.sections import (
    FP16_BESIDE,
    PRECISION_SYNONYMS,
    PRECISIONS,
    AioSection,
    Bf16Section,
    Fp16Section,
    OffloadSection,
    ZeroSection,
    only_precision,
)
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO, Choice
from zerotune.platform.facts import CUDA, CUDA_ALLOCATORS, Platform


def overruled(log: Log, key: str, asked: Any, used: Any, stands: str) -> None:
    """Record a warning if the configuration overrides a requested value."""
    if asked not in (None, used):
        log.decide(key, asked, used, f"the configuration's own {stands}", "warning")


# -- The batch triple: train batch = micro batch x accumulation x world size.


TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

_MOST_LISTED = 8
_MOST_RANKS = 1024


@attrs.frozen(kw_only=True)
class Batch:
    """Samples per optimizer step, samples per pass and rank, and passes per optimizer step."""

    train: int
    micro: int
    accumulation: int


def solve_batch(plan: Settings, *, run: RunFacts, world_size: int) -> tuple[Batch, list[Decision]]:
    """Complete the batch sizes of ``plan`` for ``world_size``.

    Numbers in the plan always take precedence. A missing number is computed from the two others,
    else read from ``run``, else from the launcher's file. The default micro batch size is 1.
    """
    solving = _Solving(plan=plan, run=run, world_size=world_size)
    return solving.solved(), solving.decisions


def contradiction(train: int, micro: int, accumulation: int, world_size: int) -> PlanConflictError:
    """Return the error for three batch settings that contradict the world size."""
    valid, rest = divmod(train, micro * accumulation)
    holds = (
        f"these three numbers are consistent at world size {valid}"
        if rest == 0 and valid > 0
        else "no number of processes makes these three numbers consistent"
    )
    changes = {TRAIN: micro * accumulation * world_size}
    if train % (micro * world_size) == 0:
        changes[ACCUMULATION] = train // (micro * world_size)
    if train % (accumulation * world_size) == 0:
        changes[MICRO] = train // (accumulation * world_size)
    words = " or ".join(f"{key} = {value}" for key, value in changes.items())
    return PlanConflictError(
        f"{train} != {micro} ({MICRO}) x {accumulation} ({ACCUMULATION}) x {world_size}"
        f" (world size); {holds}",
        f'at world size {world_size} write {words}, or set {TRAIN} to "{AUTO}"',
        TRAIN,
        train,
        edits=[*({key: value} for key, value in changes.items()), {TRAIN: AUTO}],
    )


@attrs.define(kw_only=True)
class _Solving(Log):
    """Computation of the batch sizes, with its decisions."""

    plan: Settings
    run: RunFacts
    world_size: int

    def solved(self) -> Batch:
        plan, run = self.plan, self.run
        train = _written_number(plan.train_batch_size)
        micro = _written_number(plan.train_micro_batch_size_per_gpu)
        accumulation = _written_number(plan.gradient_accumulation_steps)
        if train is None:
            batch = self._without_train(micro, accumulation)
        elif micro is not None and accumulation is not None:
            batch = Batch(train=train, micro=micro, accumulation=accumulation)
            if train != micro * accumulation * self.world_size:
                raise contradiction(train, micro, accumulation, self.world_size)
        else:
            batch = self._from_train(train, micro, accumulation)
        for key, asked, used in (
            (MICRO, run.micro_batch_size, batch.micro),
            (ACCUMULATION, run.gradient_accumulation_steps, batch.accumulation),
        ):
            overruled(self, key, asked, used, "numbers take precedence over those of the run")
        return batch

    def _without_train(self, micro: int | None, accumulation: int | None) -> Batch:
        if micro is None:
            micro, reason = _number_said(run=self.run.micro_batch_size)
            self.decide(MICRO, self.plan.train_micro_batch_size_per_gpu, micro, reason)
        if accumulation is None:
            accumulation = self._fill_accumulation()
        train = micro * accumulation * self.world_size
        reason = f"micro batch {micro} x accumulation {accumulation} x world size {self.world_size}"
        self.decide(TRAIN, self.plan.train_batch_size, train, reason)
        return Batch(train=train, micro=micro, accumulation=accumulation)

    def _from_train(self, train: int, micro: int | None, accumulation: int | None) -> Batch:
        plan, written_micro = self.plan, self.plan.train_micro_batch_size_per_gpu
        if micro is None and accumulation is None:
            micro = self.run.micro_batch_size
            if micro is None:
                accumulation = self._fill_accumulation()
            else:
                self.decide(MICRO, written_micro, micro, "set by the run")
        if micro is not None:
            accumulation = self._divide(train, micro, MICRO, ACCUMULATION)
            key, written, solved = ACCUMULATION, plan.gradient_accumulation_steps, accumulation
            by = f"micro batch {micro}"
        else:
            accumulation = accumulation or 1
            micro = self._divide(train, accumulation, ACCUMULATION, MICRO)
            key, written, solved = MICRO, written_micro, micro
            by = f"accumulation {accumulation}"
        reason = f"train batch {train} / ({by} x world size {self.world_size})"
        self.decide(key, written, solved, reason)
        return Batch(train=train, micro=micro, accumulation=accumulation)

    def _divide(self, train: int, known: int, known_key: str, wanted: str) -> int:
        shared = known * self.world_size
        quotient, rest = divmod(train, shared)
        if rest == 0 and quotient > 0:
            return quotient
        per_rank, uneven = divmod(train, known)
        most = 0 if uneven else min(per_rank, _MOST_RANKS)
        valid = [str(n) for n in range(1, most + 1) if per_rank % n == 0]
        listed = ", ".join(valid[:_MOST_LISTED])
        holds = f"it works at world size {listed}" if valid else "no world size works"
        nearest = max(1, train // shared) * shared
        raise PlanConflictError(
            f"{train} is not divisible by {known} ({known_key}) x {self.world_size} "
            f"(world size); {holds}",
            f"at world size {self.world_size} write a multiple of {shared}, such as"
            f" {nearest}, or change {known_key} or {wanted}",
            TRAIN,
            train,
            edits=writes(nearest),
        )

    def _fill_accumulation(self) -> int:
        launch = self.plan.launch
        value, reason = _number_said(
            run=self.run.gradient_accumulation_steps,
            launched=_written_number(launch.gradient_accumulation_steps if launch else None),
        )
        self.decide(ACCUMULATION, self.plan.gradient_accumulation_steps, value, reason)
        return value


def _number_said(run: int | None, launched: int | None = None) -> tuple[int, str]:
    for value, who in precedence(run=run, launched=launched):
        return value, f"set by {who}"
    return 1, "no other value is set"


def _written_number(value: Any) -> int | None:
    return None if value in (None, AUTO) else int(value)


# -- How gradients are clipped.


CLIPPING: Final = "gradient_clipping"
DEFAULT_CLIPPING = 1.0


class Clipping(NamedTuple):
    """The maximum gradient norm, and why it has this value."""

    norm: float
    """0: off."""
    reason: str


def clipping_sources(plan: Settings, run: RunFacts) -> list[tuple[Any, str]]:
    """Return all clipping settings with their sources; the first number takes precedence."""
    params = (plan.optimizer.params if plan.optimizer else None) or {}
    said = precedence(
        written=plan.gradient_clipping,
        run=run.gradient_clipping,
        launched=plan.launch.gradient_clipping if plan.launch else None,
    )
    beside = params.get("max_grad_norm")
    return said if beside is None else [*said, (beside, "optimizer.params.max_grad_norm")]


def clipping(plan: Settings, run: RunFacts) -> Clipping:
    """Return the maximum gradient norm, and the reason for the value."""
    for value, who in clipping_sources(plan, run):
        if is_number(value):
            return Clipping(float(value), f"set by {who}")
    return Clipping(DEFAULT_CLIPPING, "1.0 is the default of DeepSpeed 0.19.8 and of accelerate")


# -- The training precision, from the requested precision and the platform.


_RUN_KIND = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)


def decide_precision(
    plan: Settings, *, run: RunFacts, platform: Platform
) -> tuple[str, list[Decision]]:
    """Return the training precision, ``"bf16"``, ``"fp16"`` or ``"fp32"``, with its decisions.

    An enabled precision in the configuration takes precedence. ``"auto"`` becomes the precision of
    the run, else that of the launcher's file, else bf16 if the hardware has bf16 arithmetic, else
    fp32. fp16 is never chosen automatically, because it needs loss scaling.
    """
    written = _enabled(plan)
    launched = plan.launch.mixed_precision if plan.launch else None
    log = Log()
    enabled = next((name for name, state in written.items() if state is True), None)
    said = run.mixed_precision
    if said is not None:
        said, _ = _RUN_KIND.read(said, "run.mixed_precision")
    for asked, who in precedence(run=said, launched=launched):
        if asked == AUTO:
            continue
        if enabled is not None or written.get(asked) is False:
            stands = f"precision takes precedence over that of {who}"
            overruled(log, "precision", asked, enabled or "fp32", stands)
            continue
        log.decide("precision", None, asked, f"requested by {who}")
        return _adapt(asked, who, platform, log), log.decisions
    if enabled is not None:
        return _adapt(enabled, "the configuration", platform, log), log.decisions
    if AUTO not in (*written.values(), launched, run.mixed_precision):
        log.decide(
            "precision", None, "fp32", "no precision is enabled, which DeepSpeed treats as fp32"
        )
        return "fp32", log.decisions
    allowed = written["bf16"] is not False
    best = "bf16" if allowed and platform.bf16 and platform.native_bf16 else "fp32"
    reason = _what_it_computes(platform) if allowed else "the configuration disables bf16"
    log.decide("precision", None, best, reason)
    return best, log.decisions


def _what_it_computes(platform: Platform) -> str:
    who = f"this platform ({platform.accelerator})"
    if platform.bf16 and not platform.native_bf16:
        # Forward and backward on an AVX2 core: 9.5 times slower (linear), 45 times (convolution).
        return (
            f"{who} lacks bf16 arithmetic (AVX512_BF16, AMX), and emulated bf16 is many "
            "times slower than fp32; set bf16.enabled = true to test bf16"
        )
    return f"{who} {'can' if platform.bf16 else 'cannot'} compute in bf16"


_FP16_DEFAULTS: dict[str, Any] = {
    "auto_cast": False,
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}


def _enabled(plan: Settings) -> dict[str, Any]:
    return {
        "bf16": plan.bf16.enabled if plan.bf16 else None,
        "fp16": plan.fp16.enabled if plan.fp16 else None,
    }


def rehearses_in_bf16(platform: Platform) -> bool:
    """Whether bf16 replaces fp16, because the accelerator is a CPU with bf16 but no fp16."""
    return platform.accelerator == "cpu" and platform.bf16 and not platform.fp16


def _adapt(precision: str, who: str, platform: Platform, log: Log) -> str:
    works = {"bf16": platform.bf16, "fp16": platform.fp16, "fp32": True}
    if works[precision]:
        return precision
    if precision == "fp16" and rehearses_in_bf16(platform):
        # A CPU run is a rehearsal of a GPU configuration: bf16 takes the same memory, and
        # DeepSpeed's CPU accelerator refuses fp16 outright.
        log.decide(
            "fp16.enabled",
            True,
            False,
            "DeepSpeed's CPU accelerator does not support fp16 on this machine, so bf16 is "
            "used, which needs the same memory and no loss scaling",
            "warning",
        )
        return "bf16"
    possible = [name for name, can in works.items() if can]
    raise PlanConflictError(
        f"requested by {who}, but this platform ({platform.accelerator}) does not support this "
        "precision",
        f'use {" or ".join(possible)}, or "{AUTO}"',
        f"{precision}.enabled",
        True,
        edits=[*map(only_precision, possible), *writes(AUTO)],
    )


# -- A plan with its context.


@attrs.frozen(kw_only=True)
class Case:
    """A plan and its context, with derived values that are computed once."""

    plan: Settings
    context: Context

    @cached_property
    def batch(self) -> tuple[Batch, list[Decision]]:
        """Result of ``solve_batch``."""
        return solve_batch(self.plan, run=self.context.run, world_size=self.context.world_size)

    @cached_property
    def precision(self) -> tuple[str, list[Decision]]:
        """Result of ``decide_precision``."""
        return decide_precision(self.plan, run=self.context.run, platform=self.context.machine)

    @cached_property
    def trains_in(self) -> str:
        """The training precision, or the requested precision if none can be chosen."""
        if self.context.platform is not None:
            # The rules on precision report contradictory settings.
            with contextlib.suppress(PlanError):
                return self.precision[0]
        return self.plan.precision

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the training precision."""
        return 4 if self.trains_in == "fp32" else 2

    @property
    def rounds_swapped(self) -> bool:
        """Whether DeepSpeed would round fp32 parameters to bf16 when it swaps them."""
        platform = self.context.platform
        return platform is not None and self.trains_in == "fp32" and not platform.fp16

    def swaps_parameters(self, zero: ZeroSection, aio: AioSection | None) -> bool:
        """Whether any parameter is actually swapped from host memory to files."""
        section = zero.offload_param
        if section is None or section.device != "nvme" or self.rounds_swapped:
            return False
        stay = elements(section.max_in_cpu)
        swapping = self.swapping(aio)
        return stay == 0 if swapping is None else swapping.happens(stay)

    def swapping(self, aio: AioSection | None) -> Swapping | None:
        """Return which parameters are swapped; ``None`` if the model is unknown."""
        if self.context.model is None:
            return None
        written = aio.block_size if aio else None
        return Swapping(
            model=self.context.model,
            world_size=self.context.world_size,
            element_bytes=self.element_bytes,
            block_bytes=elements(written) or AIO_BLOCK,
        )


# -- Buffer sizes from the shapes of the parameters, counted in elements.
#
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

    def swappable(self, parameter: ParameterFacts) -> bool:
        """Whether the partition of ``parameter`` is large enough to be swapped."""
        return partition(parameter, self.world_size) >= self.smallest

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


# -- Every behaviour key of ``zero_optimization`` and ``aio``, written explicitly.
#
# DeepSpeed's defaults change between releases, so an unset key would depend on the installed
# version. A value in the plan takes precedence, unless the platform does not support it.


_DEEPSPEED_DEFAULT: Final = (
    "the default of DeepSpeed 0.19.8, set explicitly because defaults change"
)

_ALL = (1, 2, 3)
_LOW = (1, 2)
_HIGH = (3,)


@attrs.define(kw_only=True)
class Filler(Log):
    """Fills in the unset keys of a plan, and records a decision for each."""

    case: Case
    """The plan before the rules' corrections; no correction changes batch sizes or precision."""
    stage: int
    aio: AioSection | None = None
    """As it is written."""

    @property
    def model(self) -> ModelFacts | None:
        """The model; ``None`` if unknown."""
        return self.case.context.model

    @property
    def accelerator(self) -> str:
        """The machine's."""
        return self.case.context.machine.accelerator

    def fill(
        self, section: SectionT, path: str, name: str, chosen: Any, reason: str | None = None
    ) -> SectionT:
        """Set a key that is unset or "auto"; without a reason, to DeepSpeed's default."""
        written = getattr(section, name)
        if written is not None and written != AUTO:
            return section
        why = _DEEPSPEED_DEFAULT if reason is None else reason
        self.decide(join(path, name), written, chosen, why, is_default=reason is None)
        return evolved(section, **{name: chosen})

    def force(
        self,
        section: SectionT,
        path: str,
        name: str,
        value: Any,
        reason: str,
        *,
        severity: Severity = "note",
    ) -> SectionT:
        """Set the key ``name`` to ``value``, which the plan needs to run, and record a decision."""
        written = getattr(section, name)
        if written == value:
            return section
        self.decide(join(path, name), written, value, reason, severity)
        return evolved(section, **{name: value})

    def drop(
        self, section: SectionT, path: str, name: str, reason: str, *, severity: Severity = "note"
    ) -> SectionT:
        """Remove the key ``name``, which has no effect, and record a decision."""
        written = getattr(section, name)
        if written is None:
            return section
        before = written.to_dict() if isinstance(written, Section) else written
        self.decide(join(path, name), before, None, reason, severity)
        return evolved(section, **{name: None})

    def _fill_precision(self, plan: Settings) -> tuple[Bf16Section, Fp16Section]:
        """Return the ``bf16`` and ``fp16`` sections with every key set."""
        precision, _ = self.case.precision
        bf16 = attrs.evolve(plan.bf16 or Bf16Section(), enabled=precision == "bf16")
        fp16 = attrs.evolve(plan.fp16 or Fp16Section(), enabled=precision == "fp16")
        launched = plan.launch.mixed_precision if plan.launch else None
        if launched == "fp16" and plan.fp16 is None and _enabled(plan)["bf16"] is not True:
            fp16 = attrs.evolve(fp16, auto_cast=FP16_BESIDE.auto_cast)
            why = "accelerate casts the inputs if only mixed_precision requests fp16"
            self.decide("fp16.auto_cast", None, FP16_BESIDE.auto_cast, why)
        for name in (
            "immediate_grad_update",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        ):
            bf16 = self._quiet_fill(bf16, "bf16", name, False)
        bf16 = self._quiet_fill(bf16, "bf16", "check_grad_overflow", True)
        for name, value in _FP16_DEFAULTS.items():
            fp16 = self._quiet_fill(fp16, "fp16", name, value)
        return bf16, fp16

    def _quiet_fill(self, section: Any, path: str, name: str, value: Any) -> Any:
        # The keys of a disabled precision are written too, without decisions.
        if section.enabled:
            return self.fill(section, path, name, value)
        if getattr(section, name) in (None, AUTO):
            return attrs.evolve(section, **{name: value})
        return section

    def _without_lossy_swapping(self, zero: ZeroSection) -> ZeroSection:
        """Move fp32 parameters from NVMe to host memory if DeepSpeed would round them to bf16.

        Found in the code and in runs of DeepSpeed 0.19.8: on an accelerator without fp16,
        ``zero.Init`` swaps through bf16 buffers whatever the model's dtype is (``_set_dtype`` lacks
        parentheses). The forward pass then fails, or, with ``max_in_cpu``, silently uses rounded
        weights.
        """
        section = zero.offload_param
        if section is None or section.device != "nvme":
            return zero
        swapping = self.case.swapping(self.aio)
        if not self.case.rounds_swapped:
            return zero
        if swapping is not None and swapping.largest is None:
            return zero
        kept = self.force(
            section,
            "zero_optimization.offload_param",
            "device",
            "cpu",
            "on an accelerator without fp16, DeepSpeed 0.19.8 rounds fp32 parameters to "
            "bf16 when it swaps them to NVMe; the parameters stay in host memory instead",
            severity="warning",
        )
        return attrs.evolve(zero, offload_param=kept)

    def _fill_nvme_param(
        self, section: OffloadSection, path: str, zero: ZeroSection
    ) -> OffloadSection:
        """Return ``offload_param`` on NVMe with every key set."""
        swapping = self.case.swapping(self.aio)
        need, what = swapping.buffer_need(zero) if swapping else (0, "")
        written = section.buffer_size
        if isinstance(written, int) and written < need:
            raise InvalidValueError(
                f"is smaller than {what} = {need} elements; buffer_size counts elements, not bytes",
                f'write at least {need}, or "{AUTO}"',
                f"{path}.buffer_size",
                written,
                edits=writes(need, AUTO),
            )
        size, why = need, f"elements of {what}"
        if swapping is None:
            size, why = PARAM_BUFFER, "elements; no model was given, so this is DeepSpeed's default"
        elif not need:
            size = max(1, *swapping.model.parts(swapping.world_size), 1)
            why = "elements; no parameter of this model is large enough to be swapped"
        section = self.fill(section, path, "buffer_size", size, why)
        count = section.buffer_count
        least = swapping.gathered(recomputed=False) if swapping else 0
        if swapping is not None and isinstance(count, int) and count < least:
            raise InvalidValueError(
                f"is smaller than {least}, the number of weights that a single module needs at "
                "once",
                f'write at least {swapping.buffers}, or "{AUTO}"',
                f"{path}.buffer_count",
                count,
                edits=writes(swapping.buffers, AUTO),
            )
        section = self.fill(
            section,
            path,
            "buffer_count",
            swapping.buffers if swapping else PARAM_BUFFERS,
            "one buffer for each weight that is gathered at once, which are all weights of a block "
            "while it is recomputed, and two spare buffers",
        )
        section = self.fill(
            section,
            path,
            "max_in_cpu",
            0,
            "DeepSpeed's default of 1e9 would keep smaller models in host memory instead of "
            "on NVMe",
        )
        return self._without_auto_path(section, path)

    def _fill_nvme_optimizer(self, section: OffloadSection, path: str) -> OffloadSection:
        """Return ``offload_optimizer`` on NVMe with every key set."""
        for name in ("pipeline_read", "pipeline_write", "fast_init"):
            section = self.fill(section, path, name, False)
        why = "one buffer each for weight, gradient and two moments of every resident sub-group"
        section = self.fill(section, path, "buffer_count", optimizer_buffers(section), why)
        return self._without_auto_path(section, path)

    def _without_auto_path(self, section: OffloadSection, path: str) -> OffloadSection:
        if section.nvme_path == AUTO:
            return self.drop(section, path, "nvme_path", "each run creates a temporary folder")
        return section

    def _overlap(self, zero: ZeroSection) -> tuple[bool, str]:
        if self.accelerator == "cpu":
            return False, "the CPU accelerator has no streams for overlap"
        offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
        if self.stage == 3 or offloads:
            return (
                True,
                "without overlap, gradients are reduced and copied on the compute stream",
            )
        return False, "overlap doubles the bucket, and helps only if gradients are communicated"

    def _persistence(self, _zero: ZeroSection) -> tuple[int, str]:
        threshold, persistent = persistence_threshold(self.model)
        model = self.model
        if model is None:
            return threshold, "no model was given; biases and norms stay unpartitioned"
        share = persistent / model.numel if model.numel else 0.0
        return threshold, (
            f"leaves {persistent:,} of {model.numel:,} elements unpartitioned ({share:.2%};"
            f" the limit is {PERSISTENT_SHARE:.0%})"
        )

    def _sub_group(self, zero: ZeroSection) -> tuple[int, str]:
        if zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme":
            return SUB_GROUP_NVME, (
                "the swap pool page-locks several buffers, each as large as the largest sub-group"
            )
        return SUB_GROUP, "limits the temporary memory of the optimizer step"

    def _fill_zero(self, zero: ZeroSection) -> ZeroSection:
        """Return ``zero`` with every key that has an effect at this stage, and no others.

        Offload sections without effect must already have been removed.
        """
        path = "zero_optimization"
        zero = attrs.evolve(zero, stage=self.stage)
        if self.stage == 3:
            zero = self._without_lossy_swapping(zero)
            if self.case.swaps_parameters(zero, self.aio):
                zero = self.fill(zero, path, "stage3_prefetch_bucket_size", 0, NO_PREFETCH)
        for name, (stages, chosen) in _CHOICES.items():
            if self.stage not in stages:
                zero = self.drop(zero, path, name, f"the key has no effect at stage {self.stage}")
            else:
                zero = self.fill(zero, path, name, *chosen(self, zero))
        zero = self._with_leaf_modules(zero)
        for name in ("offload_optimizer", "offload_param"):
            section: OffloadSection | None = getattr(zero, name)
            if section is not None:
                filled = self._fill_offload(section, f"{path}.{name}", zero)
                zero = evolved(zero, **{name: filled})
        return zero

    def _with_leaf_modules(self, zero: ZeroSection) -> ZeroSection:
        key = f"zero_optimization.{LEAF_MODULE}"
        written = zero.extra.get(LEAF_MODULE)
        model = self.model
        if written is not None or self.stage != 3 or model is None:
            return zero
        blocks = leaf_blocks(model)
        if not blocks or self.case.swaps_parameters(zero, self.aio):
            return zero
        value = {"classes": [block.class_name for block in blocks]}
        count = sum(block.count for block in blocks)
        self.decide(
            key, None, value, f"{count} blocks are fetched as a whole instead of layer by layer"
        )
        return evolved(zero, extra={**zero.extra, LEAF_MODULE: value})

    def _fill_offload(
        self, section: OffloadSection, path: str, zero: ZeroSection
    ) -> OffloadSection:
        parameters = path.endswith("offload_param")
        if self.accelerator == "cpu":
            section = self.force(
                section,
                path,
                "pin_memory",
                False,
                "the CPU accelerator needs no pinned memory",
            )
        else:
            section = self.fill(section, path, "pin_memory", True)
        if not parameters:
            section = self.fill(section, path, "ratio", 1.0)
        if section.device == "nvme":
            if parameters:
                return self._fill_nvme_param(section, path, zero)
            return self._fill_nvme_optimizer(section, path)
        for name in (
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        ):
            section = self.drop(
                section, path, name, 'the key has an effect only with device "nvme"'
            )
        return section

    def _fill_aio(self) -> AioSection:
        """Return the ``aio`` section with every key set."""
        path = "aio"
        section = self.aio or AioSection()
        if self.accelerator != CUDA:
            section = self.force(section, path, "use_gds", False, "GPUDirect storage requires CUDA")
        defaults = {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
        for name, value in defaults.items():
            section = self.fill(section, path, name, value)
        return section

    def filled_in(self, plan: Settings) -> Settings:
        """Return ``plan`` with every key set."""
        context = self.case.context
        batch, why = self.case.batch
        self.decisions.extend(why)
        norm, reason = clipping(plan, context.run)
        written = plan.gradient_clipping
        if written is None or isinstance(written, str):
            self.decide(CLIPPING, written, norm, reason)
        else:
            stands = "number takes precedence over that of the run"
            overruled(self, CLIPPING, context.run.gradient_clipping, written, stands)
        bf16, fp16 = self._fill_precision(plan)
        zero, aio = None if context.uses_deepspeed else plan.zero_optimization, None
        if context.uses_deepspeed:
            zero = self._fill_zero(plan.zero_optimization or ZeroSection())
            swaps = any(
                section is not None and section.device == "nvme"
                for section in (zero.offload_param, zero.offload_optimizer)
            )
            aio = self._fill_aio() if swaps or plan.aio else None
        plan = evolved(
            plan,
            **{TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
            gradient_clipping=norm,
            bf16=bf16,
            fp16=fp16,
            zero_optimization=zero,
            aio=aio,
        )
        plan = self.fill(plan, "", "wall_clock_breakdown", False)
        if plan.steps_per_print == AUTO:
            plan = self.drop(plan, "", "steps_per_print", "zerotune reports progress itself")
        for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
            if getattr(plan, name) == AUTO:
                plan = self.drop(plan, "", name, "determined by the optimizer")
        for path in automatic_paths(attrs.evolve(plan, optimizer=None, scheduler=None).to_dict()):
            raise UnresolvedPlanError(
                "zerotune has no automatic value for this key", "write a value", path, AUTO
            )
        return plan


_Choose = Callable[[Filler, ZeroSection], tuple[Any, str | None]]


def _always(value: Any) -> _Choose:
    return lambda _filler, _zero: (value, None)


def _sized(what: Callable[[ModelFacts | None], int], why: str) -> _Choose:
    def choose(filler: Filler, _zero: ZeroSection) -> tuple[int, str]:
        known = "" if filler.model else "; no model was given, so a general size is used"
        return what(filler.model), why + known

    return choose


_BUCKET_WHY = "at least the size of the largest tensor, at most the size of all trainable tensors"

_CHOICES: dict[str, tuple[tuple[int, ...], _Choose]] = {
    "overlap_comm": (_ALL, Filler._overlap),
    "contiguous_gradients": (_ALL, _always(True)),
    "reduce_scatter": (_ALL, _always(True)),
    "reduce_bucket_size": (_ALL, _sized(reduce_bucket, _BUCKET_WHY)),
    "allgather_partitions": (_LOW, _always(True)),
    "allgather_bucket_size": (_LOW, _sized(allgather_bucket, _BUCKET_WHY)),
    "use_multi_rank_bucket_allreduce": (_LOW, _always(True)),
    "round_robin_gradients": (_LOW, _always(False)),
    "ignore_unused_parameters": (_LOW, _always(True)),
    "load_from_fp32_weights": (_ALL, _always(True)),
    "elastic_checkpoint": (_ALL, _always(False)),
    "sub_group_size": (_HIGH, Filler._sub_group),
    "stage3_prefetch_bucket_size": (
        _HIGH,
        _sized(prefetch_bucket, "the size of one block, but at least that of the largest tensor"),
    ),
    "stage3_param_persistence_threshold": (_HIGH, Filler._persistence),
    "stage3_model_persistence_threshold": (_HIGH, _always(sys.maxsize)),
    "stage3_max_live_parameters": (
        _HIGH,
        _sized(max_live, "twice the prefetch size; each element uses two bytes of device memory"),
    ),
    "stage3_max_reuse_distance": (
        _HIGH,
        lambda _filler, _zero: (0, "a parameter kept for reuse needs device memory"),
    ),
    "stage3_gather_16bit_weights_on_model_save": (
        _HIGH,
        lambda _filler, _zero: (False, f"zerotune exports without gathering; {_DEEPSPEED_DEFAULT}"),
    ),
    "stage3_module_granularity_threshold": (_HIGH, _always(0)),
    "memory_efficient_linear": (_HIGH, _always(True)),
    "zero_hpz_partition_size": (_HIGH, _always(1)),
    "zero_quantized_weights": (_HIGH, _always(False)),
    "zero_quantized_nontrainable_weights": (_HIGH, _always(False)),
    "zero_quantized_gradients": (_HIGH, _always(False)),
}
"""Stages where each key has an effect, and how its value is chosen."""


def stages_of(name: str) -> tuple[int, ...]:
    """Return the ZeRO stages at which a key has an effect; empty for an unknown key."""
    return _CHOICES[name][0] if name in _CHOICES else _OFFLOAD_STAGES.get(name, ())


_OFFLOAD_STAGES = {"offload_optimizer": _ALL, "offload_param": _HIGH}


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


# -- The steps of resolution: remove unused sections, then fill in every key.


def prepared(requested: Settings, context: Context, log: Log) -> Case:
    """Return the context, and the plan without the sections that the engine does not use.

    Args:
        requested: The plan.
        context: Context of the run; a missing platform is detected.
        log: Log that receives decisions.
    """
    platform = context.platform
    if platform is None:
        platform = machines.detect_platform()
    uses_deepspeed = platform.deepspeed.available and context.uses_deepspeed
    if not uses_deepspeed:
        asked = not context.uses_deepspeed
        requested = _for_plain_engine(requested, platform, asked=asked, log=log)
    context = attrs.evolve(context, platform=platform, uses_deepspeed=uses_deepspeed)
    return Case(plan=requested, context=context)


def filled(
    requested: Settings,
    plan: Settings,
    case: Case,
    log: Log,
    options: ChoiceOptions,
    *,
    by_weight: bool,
) -> Resolved:
    """Return the resolved plan with every key set, and its optimizer and schedule.

    Args:
        requested: The plan as the user wrote it.
        plan: The plan after ``prepared`` and corrections.
        case: The plan and context before the rules' corrections; no correction changes batch sizes
            or precision.
        log: Earlier decisions.
        options: How to choose the optimizer.
        by_weight: Whether the optimizer updates one weight at a time, on the device.
    """
    context = case.context
    precision, why = case.precision
    if not context.uses_deepspeed:
        plan = _without_unknown_host_optimizer(plan, log)
    filler = Filler(
        case=case, stage=int(plan.stage), aio=plan.aio, decisions=[*log.decisions, *why]
    )
    plan = filler.filled_in(plan)
    situation = Situation.of(plan, context, precision, by_weight=by_weight)
    chosen = choose(plan, situation, run=context.run, model=context.model, options=options)
    return (requested.resolved_as or Resolved)(
        requested=requested,
        plan=plan,
        platform=context.machine,
        world_size=context.world_size,
        model=context.model,
        run=context.run,
        uses_deepspeed=context.uses_deepspeed,
        precision=precision,
        optimizer=chosen.optimizer,
        scheduler=chosen.scheduler,
        decisions=[*filler.decisions, *chosen.decisions],
    )


def with_engine(resolved: Resolved) -> Resolved:
    """Record the requested engine; if it cannot run the plan, choose another with the reason."""
    if resolved.update is not None:
        resolved = _with_update(resolved)
    obstacle, asked = host_obstacle(resolved), resolved.streamed
    if not asked:
        if resolved.engine is None:
            return resolved
        if not resolved.uses_deepspeed:
            reason = "requested" if resolved.engine == "host" else NO_DEEPSPEED
            return resolved.with_engine(None if obstacle else "host", obstacle or reason)
        if resolved.engine == "host" and obstacle is not None:
            return resolved.with_engine("deepspeed", obstacle)
        return resolved.with_engine(resolved.engine, "requested")
    if obstacle is not None:
        return attrs.evolve(resolved.without_streaming(obstacle), engine=None)
    resolved = attrs.evolve(resolved, engine="host")
    if not isinstance(asked, Streaming) or not asked.split_masters or resolved.precision == "bf16":
        return resolved
    decision = Decision(
        "streamed.split_masters",
        True,
        False,
        f"master weights can be split only with bf16 weights, not with {resolved.precision}",
    )
    return attrs.evolve(
        resolved,
        streamed=attrs.evolve(asked, split_masters=False),
        decisions=(*resolved.decisions, decision),
    )


def _with_update(resolved: Resolved) -> Resolved:
    """Record the update on the device; if the host engine cannot run it, the update on the host."""
    hosted = attrs.evolve(resolved, engine=resolved.engine or "host")
    obstacle = host_obstacle(hosted)
    if not resolved.uses_deepspeed:
        obstacle = NO_DEEPSPEED
    elif obstacle is None and resolved.precision != "bf16":
        obstacle = f"the plan trains in {resolved.precision}, and not in bf16"
    if obstacle is not None:
        return resolved.with_update_on_host(obstacle)
    decision = Decision(
        "update",
        "host",
        "device",
        f"requested, with {hosted.masters} master weights; the optimizer's own code updates "
        "one weight at a time, and its states stay in host memory",
    )
    return attrs.evolve(hosted, decisions=(*hosted.decisions, decision))


def _for_plain_engine(plan: Settings, platform: Platform, *, asked: bool, log: Log) -> Settings:
    support = platform.deepspeed
    reasons = ("DeepSpeed is disabled",) if asked else (support.reason, support.fix)
    why = "; ".join(filter(None, reasons))
    zero = plan.zero_optimization
    host = _host_optimizer(zero, platform)
    dropped: dict[str, Any] = {}
    if zero is not None:
        for name in ("offload_optimizer", "offload_param"):
            section: OffloadSection | None = getattr(zero, name)
            if host is not None and name == "offload_optimizer":
                continue
            if section is not None and section.device not in (None, "none"):
                dropped[f"zero_optimization.{name}"] = section.to_dict()
        left = zero if host is None else attrs.evolve(zero, offload_optimizer=None)
        if host is None or left.to_dict() not in ({}, {"stage": 0}):
            dropped["zero_optimization"] = left.to_dict()
    if plan.aio is not None:
        dropped["aio"] = plan.aio.to_dict()
    if not dropped and not asked:
        dropped["engine"] = "deepspeed"
    for key, value in dropped.items():
        log.decide(key, value, "plain" if key == "engine" else None, why, "warning")
    if host is not None:
        log.decide(
            _HOST_OPTIMIZER,
            host.device,
            host.device,
            "the host engine needs no DeepSpeed; the ranks of a machine share one copy of "
            "the master weights and moments",
        )
    return attrs.evolve(
        plan,
        zero_optimization=None if host is None else ZeroSection(offload_optimizer=host),
        aio=None,
        zero_allow_untested_optimizer=None,
        zero_force_ds_cpu_optimizer=None,
    )


_HOST_OPTIMIZER = "zero_optimization.offload_optimizer"


def _host_optimizer(zero: ZeroSection | None, platform: Platform) -> OffloadSection | None:
    """Return the offload section for the plain engine, if the optimizer is in host memory."""
    section = None if zero is None else zero.offload_optimizer
    # On macOS host and device share one memory.
    if section is None or section.device != "cpu" or platform.accelerator == "mps":
        return None
    on_device = platform.accelerator != "cpu"
    pin = section.pin_memory if isinstance(section.pin_memory, bool) else on_device
    return OffloadSection(device="cpu", pin_memory=pin and on_device)


def _without_unknown_host_optimizer(plan: Settings, log: Log) -> Settings:
    zero, name = plan.zero_optimization, entry_of(plan.optimizer_name).name
    if zero is None or zero.offload_optimizer is None or name in STEPPED_PLAINLY:
        return plan
    log.decide(
        _HOST_OPTIMIZER,
        zero.offload_optimizer.device,
        None,
        f"{PLAIN_NEEDS}, so the states of {name} stay on the device",
        "warning",
    )
    return attrs.evolve(plan, zero_optimization=None)


def without_inactive_offload(plan: Settings) -> Settings:
    """Return ``plan`` without the sections that offload nothing."""
    zero = plan.zero_optimization
    if zero is None:
        return plan
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadSection | None = getattr(zero, name)
        if section is not None and section.device == "none":
            zero = evolved(zero, **{name: None})
    return attrs.evolve(plan, zero_optimization=zero)
