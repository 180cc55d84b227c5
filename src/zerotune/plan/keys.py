"""Keys that DeepSpeed 0.18.9 to 0.19.8 and accelerate 1.15 know beyond those zerotune models.

The plan layer cannot import either, so the lists are written down here; a test compares them with
the installed DeepSpeed's own models.
"""

from __future__ import annotations

from typing import Final

TOP_LEVEL: Final = frozenset(
    {
        "activation_checkpointing",
        "allgather_size",
        "autotuning",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "pipeline",
        "prescale_gradients",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wandb",
        "weight_quantization",
    }
)

REMOVED: Final = {
    "nebula": "Nebula checkpointing",
    "compression_training": "the compression library",
    "amp": "NVIDIA Apex AMP; use bf16 or fp16",
    "quantize_training": "mixture of quantization",
    "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "eigenvalue-based quantization",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training; set the batch keys directly",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": (
        "the top-level curriculum; use data_efficiency.data_sampling.curriculum_learning"
    ),
    "progressive_layer_drop": "progressive layer dropping",
}
"""Features that DeepSpeed 0.19 removed, by top-level key (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``)."""

REMOVED_ZERO: Final = {
    "mics_shard_size": "MiCS sharding",
    "mics_hierarchical_params_gather": "MiCS sharding",
    "zeropp_loco_param": "LoCo-ZeRO++",
}
"""Features that DeepSpeed 0.19 removed, by key of ``zero_optimization``."""

ZERO: Final = frozenset(
    {
        "compute_grad_norm",
        "enable_sanity_checks",
        "leaf_module",
        "legacy_stage1",
        "log_trace_cache_warnings",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "save_muon_momentum_buffer_in_memory",
        "stage3_allgather_sequential",
        "stage3_use_all_reduce_for_fetch_params",
        "zenflow",
        *REMOVED_ZERO,
    }
)

ZERO_ALIASES: Final = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
    "stage3_param_persistance_threshold": "stage3_param_persistence_threshold",
    "stage3_param_persitence_threshold": "stage3_param_persistence_threshold",
}
"""Other names that DeepSpeed accepts for a setting, and misspellings found in public files."""
MISSPELT_ZERO: Final = frozenset(
    {
        "stage3_param_persitance_threshold",
        "stage3_param_persistance_threshold",
        "stage3_param_persitence_threshold",
    }
)
"""Keys of ``ZERO_ALIASES`` that DeepSpeed rejects."""

OFFLOAD: Final = frozenset({"super_offload", "cpuadam_cores_perc"})
BF16: Final[frozenset[str]] = frozenset()
FP16: Final[frozenset[str]] = frozenset()
OPTIMIZER: Final = frozenset({"legacy_fusion"})
AIO: Final[frozenset[str]] = frozenset()

PLACES: Final = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Paths in DeepSpeed's configuration, by key of accelerate's ``deepspeed_config`` block."""
