# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""The sections of a DeepSpeed configuration as frozen values.

Attribute names are DeepSpeed's own key names; ``None`` means "not written"; ``extra`` keeps the
keys that DeepSpeed knows and zerotune does not model. The settings and their ranges are those of
``deepspeed/runtime/{config,zero/config,zero/offload_config,precision_config}.py`` 0.19.8.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import attrs

from zerotune.decisions import Rejected
from zerotune.errors import Edits
from zerotune.plan.keys import (
    AIO,
    BF16,
    FP16,
    MISSPELT_ZERO,
    OFFLOAD,
    OPTIMIZER,
    ZERO,
    ZERO_ALIASES,
)
from zerotune.plan.launch_settings import LAUNCH_SETTINGS
from zerotune.plan.section import Nested, Section, extra_keys, setting
from zerotune.plan.values import NULL, Auto, Boolean, Choice, Folder, Free, Integer, Number, Text
from zerotune.platform.facts import CUDA


def only_precision(name: str) -> Edits:
    """Return the edits that train in one precision.

    Args:
        name: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    """
    return {f"{one}.enabled": one == name for one in ("bf16", "fp16")}


OFFLOAD_DEVICES = ("none", "cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")

_PARAM_ONLY = ("buffer_size", "max_in_cpu")
_OPTIMIZER_ONLY = ("ratio", "fast_init", "pipeline_read", "pipeline_write")

_DEVICE_SYNONYMS = {
    "no": "none",
    "off": "none",
    "false": "none",
    "gpu": "none",
    CUDA: "none",
    "disk": "nvme",
    "ssd": "nvme",
}
PRECISION_SYNONYMS = {
    "no": "fp32",
    "none": "fp32",
    "float32": "fp32",
    "full": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}

# Settings that DeepSpeed validates, unlike those at the top level: null is not "unset" there.
_Integer = functools.partial(Integer, rejected=NULL)
_Number = functools.partial(Number, rejected=NULL)
_Boolean = functools.partial(Boolean, rejected=NULL)


@attrs.frozen(kw_only=True)
class OffloadSection(Section):
    """``offload_param`` or ``offload_optimizer``: where a partition is stored between uses."""

    passed_through: ClassVar[frozenset[str]] = OFFLOAD

    device: str | None = setting(
        Choice(
            choices=(*OFFLOAD_DEVICES, "auto"),
            synonyms=_DEVICE_SYNONYMS,
            respelt=Rejected("DeepSpeed rejects this spelling"),
            null="none",
        )
    )
    """``"none"``, ``"cpu"`` (host memory) or ``"nvme"`` (files; stage 3 only)."""
    nvme_path: str | None = setting(Folder())
    """Folder for the swap files; if unset or ``"auto"``, each run creates a temporary folder."""
    buffer_count: int | Auto | None = setting(_Integer(minimum=1))
    """Number of buffers in the swap pool."""
    buffer_size: int | Auto | None = setting(_Integer(minimum=1))
    """Size of each buffer in the parameter swap pool, in elements (not bytes)."""
    pin_memory: bool | Auto | None = setting(_Boolean())
    """Page-lock the host buffers, as asynchronous copies to a GPU require."""
    ratio: float | Auto | None = setting(_Number(maximum=1.0))
    """Fraction of the optimizer states to offload; stage 3 only."""
    fast_init: bool | Auto | None = setting(_Boolean())
    """Create the optimizer's NVMe files from the parameters' files."""
    pipeline_read: bool | Auto | None = setting(_Boolean())
    """Read the next sub-group from NVMe while the current one is updated."""
    pipeline_write: bool | Auto | None = setting(_Boolean())
    """Write the previous sub-group to NVMe while the current one is updated."""
    max_in_cpu: int | Auto | None = setting(_Integer())
    """Number of parameter elements that stay in host memory despite NVMe offload."""
    extra: Mapping[str, Any] = extra_keys()


def pins(section: OffloadSection | None) -> bool:
    """Whether an offload section uses page-locked buffers; ``"auto"`` counts as false."""
    return section is not None and section.pin_memory is True


@attrs.frozen(kw_only=True)
class ZeroSection(Section):
    """``zero_optimization``: what is partitioned over the ranks, and how the ranks communicate."""

    passed_through: ClassVar[frozenset[str]] = ZERO
    aliases: ClassVar[Mapping[str, str]] = ZERO_ALIASES
    unread: ClassVar[frozenset[str]] = MISSPELT_ZERO

    stage: int | Auto | None = setting(_Integer(maximum=3))
    """What is partitioned: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    offload_param: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_OPTIMIZER_ONLY, "offload_optimizer"))
    )
    """Where parameters are stored between uses; stage 3 only."""
    offload_optimizer: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_PARAM_ONLY, "offload_param"))
    )
    """Where optimizer states and master weights are stored and updated."""
    overlap_comm: bool | Auto | None = setting(Boolean())
    """Reduce gradients on a second stream during the backward pass; doubles the bucket memory."""
    contiguous_gradients: bool | Auto | None = setting(_Boolean())
    """Copy gradients into one buffer as they are produced."""
    reduce_scatter: bool | Auto | None = setting(_Boolean())
    """Reduce each gradient only to the rank that owns it."""
    reduce_bucket_size: int | Auto | None = setting(_Integer(minimum=1))
    """Elements reduced at a time."""
    allgather_partitions: bool | Auto | None = setting(_Boolean())
    """Gather updated parameters with all-gather instead of broadcasts."""
    allgather_bucket_size: int | Auto | None = setting(_Integer())
    """Maximum number of elements gathered at a time (stages 1 and 2)."""
    use_multi_rank_bucket_allreduce: bool | Auto | None = setting(_Boolean())
    """Combine the buckets of several owners in one reduction (stages 1 and 2)."""
    round_robin_gradients: bool | Auto | None = setting(_Boolean())
    """Distribute the copying of gradients to host memory over the ranks (stages 1 and 2)."""
    ignore_unused_parameters: bool | Auto | None = setting(_Boolean())
    """Accept parameters that receive no gradient (stage 2)."""
    load_from_fp32_weights: bool | Auto | None = setting(_Boolean())
    """Initialise the master weights from a checkpoint's fp32 copy."""
    elastic_checkpoint: bool | Auto | None = setting(_Boolean())
    """Use the legacy format of DeepSpeed's own checkpoints."""
    sub_group_size: int | Auto | None = setting(_Integer())
    """Elements that the optimizer updates at a time (stage 3); 0: one parameter at a time."""
    stage3_prefetch_bucket_size: int | Auto | None = setting(_Integer())
    """Maximum number of elements to prefetch."""
    stage3_param_persistence_threshold: int | Auto | None = setting(_Integer())
    """Parameters of at most this many elements are never partitioned."""
    stage3_model_persistence_threshold: int | Auto | None = setting(_Integer())
    """Maximum total number of elements in unpartitioned parameters."""
    stage3_max_live_parameters: int | Auto | None = setting(_Integer())
    """Maximum number of elements that are gathered at a time."""
    stage3_max_reuse_distance: int | Auto | None = setting(_Integer())
    """Keep a gathered parameter that is used again within this many elements."""
    stage3_gather_16bit_weights_on_model_save: bool | Auto | None = setting(_Boolean())
    """Gather the weights for DeepSpeed's ``save_16bit_model``."""
    stage3_module_granularity_threshold: int | Auto | None = setting(_Integer())
    """Fetch a module as a whole if it has fewer parameters per submodule than this; 0: never."""
    memory_efficient_linear: bool | Auto | None = setting(_Boolean())
    """Use DeepSpeed's memory-efficient version of ``torch.nn.functional.linear`` (stage 3)."""
    zero_hpz_partition_size: int | Auto | None = setting(_Integer())
    """Number of ranks in ZeRO++'s secondary partition; 1: off."""
    zero_quantized_weights: bool | Auto | None = setting(_Boolean())
    """ZeRO++: gather quantized weights."""
    zero_quantized_nontrainable_weights: bool | Auto | None = setting(_Boolean())
    """ZeRO++: store frozen weights in quantized form."""
    zero_quantized_gradients: bool | Auto | None = setting(_Boolean())
    """ZeRO++: reduce quantized gradients."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Bf16Section(Section):
    """``bf16``: bfloat16 weights with fp32 master weights."""

    passed_through: ClassVar[frozenset[str]] = BF16

    enabled: bool | Auto | None = setting(_Boolean())
    immediate_grad_update: bool | Auto | None = setting(_Boolean())
    """Add gradients to the master gradients as they are produced."""
    check_grad_overflow: bool | Auto | None = setting(_Boolean())
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: bool | Auto | None = setting(_Boolean())
    """Keep master weights and gradients in bf16 too."""
    bf16_optimizer_states: bool | Auto | None = setting(_Boolean())
    """Keep optimizer states in bf16 too."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Fp16Section(Section):
    """``fp16``: float16 weights with fp32 master weights and loss scaling."""

    passed_through: ClassVar[frozenset[str]] = FP16

    enabled: bool | Auto | None = setting(_Boolean())
    auto_cast: bool | Auto | None = setting(_Boolean())
    """Cast the model's inputs to fp16."""
    loss_scale: float | Auto | None = setting(_Number(remark="0 means dynamic"))
    """Fixed loss scale; 0: dynamic."""
    initial_scale_power: int | Auto | None = setting(_Integer())
    """Base-2 exponent of the initial dynamic loss scale."""
    loss_scale_window: int | Auto | None = setting(_Integer())
    """Number of steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int | Auto | None = setting(_Integer())
    """Number of overflows tolerated before the loss scale is halved."""
    consecutive_hysteresis: bool | Auto | None = setting(_Boolean())
    """Restore the full hysteresis after each step without overflow."""
    min_loss_scale: int | Auto | None = setting(_Integer())
    """Minimum of the dynamic loss scale."""
    fp16_master_weights_and_grads: bool | Auto | None = setting(_Boolean())
    """Keep master weights and gradients in fp16 too."""
    extra: Mapping[str, Any] = extra_keys()


FP16_BESIDE: Final = Fp16Section(auto_cast=True)
"""``fp16`` section that accelerate adds for ``mixed_precision`` if the configuration has none."""


@attrs.frozen(kw_only=True)
class OptimizerSection(Section):
    """``optimizer`` as written; ``zerotune.optim`` resolves it."""

    passed_through: ClassVar[frozenset[str]] = OPTIMIZER
    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class SchedulerSection(Section):
    """``scheduler`` as written; ``zerotune.optim`` resolves it."""

    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class AioSection(Section):
    """``aio``: how swap files are read and written."""

    passed_through: ClassVar[frozenset[str]] = AIO
    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}
    unread: ClassVar[frozenset[str]] = frozenset(aliases)

    block_size: int | Auto | None = setting(Integer(minimum=1))
    """Bytes of one request."""
    queue_depth: int | Auto | None = setting(Integer(minimum=1))
    """Number of I/O requests in flight per thread."""
    intra_op_parallelism: int | Auto | None = setting(Integer(minimum=1))
    """Number of threads that read or write one tensor in parallel."""
    single_submit: bool | Auto | None = setting(Boolean())
    """Submit requests one by one."""
    overlap_events: bool | Auto | None = setting(Boolean())
    """Submit the next requests while others complete."""
    use_gds: bool | Auto | None = setting(Boolean())
    """GPUDirect storage; CUDA only."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class LaunchSection(Section):
    """Launch settings from an accelerate YAML or a trainer's file; never passed to DeepSpeed."""

    passed_through: ClassVar[frozenset[str]] = frozenset(LAUNCH_SETTINGS)
    aliases: ClassVar[Mapping[str, str]] = {"max_grad_norm": "gradient_clipping"}

    distributed_type: str | None = setting(Text())
    mixed_precision: str | None = setting(
        Choice(
            choices=(*PRECISIONS, "fp8", "auto"), synonyms=PRECISION_SYNONYMS, unoffered=("fp8",)
        )
    )
    """Precision that the launcher's file requests; used if the configuration does not set one."""
    num_processes: int | None = setting(Integer(minimum=-1, auto=False))
    """World size that the launcher's file requests."""
    num_machines: int | None = setting(Integer(minimum=1, auto=False))
    machine_rank: int | None = setting(Integer(auto=False))
    main_process_ip: str | None = setting(Text(empty=True))
    main_process_port: int | None = setting(Integer(maximum=65535, auto=False))
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1))
    """Micro batches per optimizer step, set outside the DeepSpeed configuration."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Maximum gradient norm, set outside the DeepSpeed configuration."""
    zero3_init_flag: bool | None = setting(Boolean(auto=False))
    """Build the model inside ``deepspeed.zero.Init``; stage 3 only."""
    deepspeed_config_file: str | None = setting(Text())
    """File that contains the DeepSpeed configuration."""
    offload_param_path: str | None = setting(Folder())
    """Swap folder for parameters; takes precedence over DeepSpeed's ``nvme_path``."""
    offload_optimizer_path: str | None = setting(Folder())
    """Swap folder for optimizer states, if it differs from that for parameters."""
    deepspeed_moe_layer_cls_names: str | None = setting(Text(empty=True))
    extra: Mapping[str, Any] = extra_keys()
