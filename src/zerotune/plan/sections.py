# ruff: noqa: RUF009  (`setting` and `extra_keys` return attrs.field, as RUF009 cannot see)
"""The sections of a DeepSpeed configuration as frozen values.

Attribute names are DeepSpeed's own key names; ``None`` means "not written"; ``extra`` keeps the
keys that DeepSpeed knows and zerotune does not model. The settings and their ranges are those
of ``deepspeed/runtime/{config,zero/config,zero/offload_config,precision_config}.py`` 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from zerotune.plan import known_keys
from zerotune.plan.kinds import Auto, Boolean, Choice, Folder, Free, Integer, Number, Text
from zerotune.plan.section import Nested, Section, extra_keys, setting

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")

_PARAM_ONLY = ("buffer_size", "max_in_cpu")
_OPTIMIZER_ONLY = ("ratio", "fast_init", "pipeline_read", "pipeline_write")

_DEVICE_SYNONYMS = {
    "no": "none",
    "off": "none",
    "false": "none",
    "gpu": "none",
    "cuda": "none",
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


@attrs.frozen(kw_only=True)
class OffloadSection(Section):
    """``offload_param`` or ``offload_optimizer``: where a partition waits while not in use."""

    passed_through: ClassVar[frozenset[str]] = known_keys.OFFLOAD

    device: str | None = setting(
        Choice(choices=(*OFFLOAD_DEVICES, "auto"), synonyms=_DEVICE_SYNONYMS, null="none")
    )
    """``"none"``, ``"cpu"`` (host memory) or ``"nvme"`` (files; stage 3 only)."""
    nvme_path: str | None = setting(Folder())
    """Folder for the swap files; left out or ``"auto"``: a leased folder."""
    buffer_count: int | Auto | None = setting(Integer(minimum=1))
    """Buffers of the swap pool."""
    buffer_size: int | Auto | None = setting(Integer(minimum=1))
    """Elements, not bytes, of one buffer of the parameter swap pool."""
    pin_memory: bool | Auto | None = setting(Boolean())
    """Page-lock the host buffers, which an asynchronous copy to a GPU needs."""
    ratio: float | Auto | None = setting(Number(maximum=1.0))
    """Share of the optimizer that is offloaded, stage 3 only."""
    fast_init: bool | Auto | None = setting(Boolean())
    """Create the optimizer's NVMe files from the parameters' files."""
    pipeline_read: bool | Auto | None = setting(Boolean())
    """Read the next sub-group from NVMe while this one is computed."""
    pipeline_write: bool | Auto | None = setting(Boolean())
    """Write the previous sub-group to NVMe while this one is computed."""
    max_in_cpu: int | Auto | None = setting(Integer())
    """Parameter elements that stay in host memory although NVMe offload is on."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class ZeroSection(Section):
    """``zero_optimization``: what is partitioned over the ranks, and how it travels."""

    passed_through: ClassVar[frozenset[str]] = known_keys.ZERO
    aliases: ClassVar[Mapping[str, str]] = known_keys.ZERO_ALIASES

    stage: int | Auto | None = setting(Integer(maximum=3))
    """0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are partitioned."""
    offload_param: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_OPTIMIZER_ONLY, "offload_optimizer"))
    )
    """Where parameters wait; stage 3 only."""
    offload_optimizer: OffloadSection | None = setting(
        Nested(OffloadSection, without=dict.fromkeys(_PARAM_ONLY, "offload_param"))
    )
    """Where optimizer states and master weights live, and the CPU that updates them."""
    overlap_comm: bool | Auto | None = setting(Boolean())
    """Reduce gradients on a second stream during the backward pass; doubles the bucket."""
    contiguous_gradients: bool | Auto | None = setting(Boolean())
    """Copy gradients into one buffer as they appear."""
    reduce_scatter: bool | Auto | None = setting(Boolean())
    """Reduce each gradient to its owner only."""
    reduce_bucket_size: int | Auto | None = setting(Integer(minimum=1))
    """Elements reduced at a time."""
    allgather_partitions: bool | Auto | None = setting(Boolean())
    """Collect updated parameters by all-gather and not by broadcasts."""
    allgather_bucket_size: int | Auto | None = setting(Integer())
    """Elements gathered at a time, stages 1 and 2."""
    use_multi_rank_bucket_allreduce: bool | Auto | None = setting(Boolean())
    """Combine the buckets of several owners in one reduction, stages 1 and 2."""
    round_robin_gradients: bool | Auto | None = setting(Boolean())
    """Spread the copies of gradients to host memory over the ranks, stages 1 and 2."""
    ignore_unused_parameters: bool | Auto | None = setting(Boolean())
    """Accept parameters that get no gradient, stage 2."""
    load_from_fp32_weights: bool | Auto | None = setting(Boolean())
    """Start the master weights from a checkpoint's fp32 copy."""
    elastic_checkpoint: bool | Auto | None = setting(Boolean())
    """Legacy format of DeepSpeed's own checkpoints."""
    sub_group_size: int | Auto | None = setting(Integer(minimum=1))
    """Elements the optimizer updates at a time, stage 3."""
    stage3_prefetch_bucket_size: int | Auto | None = setting(Integer())
    """Elements fetched ahead of their use."""
    stage3_param_persistence_threshold: int | Auto | None = setting(Integer())
    """Parameters of at most this many elements are never partitioned."""
    stage3_model_persistence_threshold: int | Auto | None = setting(Integer())
    """Most elements of all unpartitioned parameters together."""
    stage3_max_live_parameters: int | Auto | None = setting(Integer())
    """Most elements resident in full at a time."""
    stage3_max_reuse_distance: int | Auto | None = setting(Integer())
    """Keep a parameter that is used again within this many elements."""
    stage3_gather_16bit_weights_on_model_save: bool | Auto | None = setting(Boolean())
    """Gather the weights in DeepSpeed's ``save_16bit_model``."""
    stage3_module_granularity_threshold: int | Auto | None = setting(Integer())
    """Fetch modules with less parameters per submodule than this as a whole; 0: never."""
    memory_efficient_linear: bool | Auto | None = setting(Boolean())
    """Replace ``torch.nn.functional.linear`` while parameters are partitioned."""
    zero_hpz_partition_size: int | Auto | None = setting(Integer())
    """Ranks of ZeRO++'s secondary partition; 1: off."""
    zero_quantized_weights: bool | Auto | None = setting(Boolean())
    """ZeRO++: gather quantized weights."""
    zero_quantized_nontrainable_weights: bool | Auto | None = setting(Boolean())
    """ZeRO++: store frozen weights quantized."""
    zero_quantized_gradients: bool | Auto | None = setting(Boolean())
    """ZeRO++: reduce quantized gradients."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Bf16Section(Section):
    """``bf16``: bfloat16 weights with fp32 master weights."""

    passed_through: ClassVar[frozenset[str]] = known_keys.BF16

    enabled: bool | Auto | None = setting(Boolean())
    immediate_grad_update: bool | Auto | None = setting(Boolean())
    """Add gradients to the master gradients as they appear."""
    check_grad_overflow: bool | Auto | None = setting(Boolean())
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: bool | Auto | None = setting(Boolean())
    """Keep master weights and gradients in bf16 too."""
    bf16_optimizer_states: bool | Auto | None = setting(Boolean())
    """Keep optimizer states in bf16 too."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class Fp16Section(Section):
    """``fp16``: float16 weights with fp32 master weights and loss scaling."""

    passed_through: ClassVar[frozenset[str]] = known_keys.FP16

    enabled: bool | Auto | None = setting(Boolean())
    auto_cast: bool | Auto | None = setting(Boolean())
    """Cast the inputs of the model."""
    loss_scale: float | Auto | None = setting(Number())
    """Fixed scale of the loss; 0: dynamic."""
    initial_scale_power: int | Auto | None = setting(Integer())
    """The dynamic scale starts at two to this power."""
    loss_scale_window: int | Auto | None = setting(Integer(minimum=1))
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int | Auto | None = setting(Integer())
    """Overflows tolerated before the scale is halved."""
    consecutive_hysteresis: bool | Auto | None = setting(Boolean())
    """Refill the hysteresis after a step without overflow."""
    min_loss_scale: int | Auto | None = setting(Integer())
    """Floor of the dynamic scale."""
    fp16_master_weights_and_grads: bool | Auto | None = setting(Boolean())
    """Keep master weights and gradients in fp16 too."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class OptimizerSection(Section):
    """``optimizer`` as written; ``zerotune.optim`` decides what it becomes."""

    passed_through: ClassVar[frozenset[str]] = known_keys.OPTIMIZER
    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class SchedulerSection(Section):
    """``scheduler`` as written; ``zerotune.optim`` decides what it becomes."""

    aliases: ClassVar[Mapping[str, str]] = {"name": "type", "parameters": "params"}

    type: str | None = setting(Text())
    params: Mapping[str, Any] | None = setting(Free())
    """Arguments by name; values may be ``"auto"``."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class AioSection(Section):
    """``aio``: how swap files are read and written."""

    passed_through: ClassVar[frozenset[str]] = known_keys.AIO
    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: int | Auto | None = setting(Integer(minimum=1))
    """Bytes of one request."""
    queue_depth: int | Auto | None = setting(Integer(minimum=1))
    """Requests in flight per thread."""
    intra_op_parallelism: int | Auto | None = setting(Integer(minimum=1))
    """Threads that share one tensor."""
    single_submit: bool | Auto | None = setting(Boolean())
    """Submit requests one by one."""
    overlap_events: bool | Auto | None = setting(Boolean())
    """Submit the next requests while others complete."""
    use_gds: bool | Auto | None = setting(Boolean())
    """GPUDirect storage; CUDA only."""
    extra: Mapping[str, Any] = extra_keys()


@attrs.frozen(kw_only=True)
class LaunchSection(Section):
    """What an accelerate YAML or a trainer's configuration adds; never sent to DeepSpeed."""

    passed_through: ClassVar[frozenset[str]] = known_keys.LAUNCH
    aliases: ClassVar[Mapping[str, str]] = {"max_grad_norm": "gradient_clipping"}

    distributed_type: str | None = setting(Text())
    mixed_precision: str | None = setting(
        Choice(choices=(*PRECISIONS, "fp8", "auto"), synonyms=PRECISION_SYNONYMS)
    )
    """Precision asked from the launcher; fills ``"auto"``."""
    num_processes: int | None = setting(Integer(minimum=-1, auto=False))
    """World size asked from the launcher."""
    num_machines: int | None = setting(Integer(minimum=1, auto=False))
    machine_rank: int | None = setting(Integer(auto=False))
    main_process_ip: str | None = setting(Text(empty=True))
    main_process_port: int | None = setting(Integer(auto=False))
    gradient_accumulation_steps: int | Auto | None = setting(Integer(minimum=1))
    """Micro batches per step, given outside the DeepSpeed block."""
    gradient_clipping: float | Auto | None = setting(Number())
    """Largest gradient norm, given outside the DeepSpeed block."""
    zero3_init_flag: bool | None = setting(Boolean(auto=False))
    """Build the model inside ``deepspeed.zero.Init``; stage 3 only."""
    deepspeed_config_file: str | None = setting(Text())
    """The file the plan was really read from."""
    offload_param_path: str | None = setting(Folder())
    """Swap root for parameters, before DeepSpeed's own ``nvme_path``."""
    offload_optimizer_path: str | None = setting(Folder())
    """Swap root for optimizer states, where they go elsewhere."""
    deepspeed_moe_layer_cls_names: str | None = setting(Text(empty=True))
    extra: Mapping[str, Any] = extra_keys()
