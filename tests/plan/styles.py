"""Configurations in published styles, made up for these tests, by name.

``DEEPSPEED`` holds DeepSpeed's own JSON, ``TRAINERS`` files of trainers that hold one, and
``ACCELERATE`` what ``accelerate config`` and people write by hand. Each can run.
"""

from __future__ import annotations

from typing import Final

DEEPSPEED: Final = {
    "every batch key automatic": """{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": true}}""",
    "stage 3 with automatic buckets": """{
        "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": true}}""",
    "scientific floats": """{
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1,
        "reduce_bucket_size": 2e8, "allgather_bucket_size": 5E8}}""",
    "optimizer and schedule automatic": """{
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
            "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto",
            "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2}, "train_batch_size": 8}""",
    "a train batch alone": '{"train_batch_size": 32, "steps_per_print": 2000}',
    "no batch at all": '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
    "the legacy offload": """{
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "cpu_offload": true, "contiguous_gradients": true}}""",
    "fp16 with every scale": """{
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.3,
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12,
            "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}}""",
    "comments and a trailing comma": """{
        // two cards
        "train_micro_batch_size_per_gpu": 3, /* three each */
        "zero_optimization": {"stage": 2,},
    }""",
    "misspelt persistence": """{
        "zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e4}}""",
    "the bfloat16 section": '{"bfloat16": {"enabled": true}, "train_batch_size": 2}',
    "short forms": '{"bf16": true, "fp16": false, "optimizer": "AdamW", "train_batch_size": 1}',
    "removed sections, switched off": """{
        "train_batch_size": 2, "amp": {"enabled": false}, "elasticity": {"enabled": false},
        "sparse_gradients": false}""",
    "parameters offloaded to a disk": """{
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
            "nvme_path": "/local/swap", "buffer_size": 1e8, "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local/swap"}},
        "aio": {"block_size": 1048576, "queue_depth": 16, "thread_count": 2}}""",
    "device null and CPU": """{
        "train_batch_size": 1, "zero_optimization": {"stage": 2,
            "offload_optimizer": {"device": "CPU", "pin_memory": true},
            "offload_param": {"device": null}}}""",
    "numbers as text": """{
        "train_batch_size": "16", "zero_optimization": {"stage": "2",
            "reduce_bucket_size": "5e8"}}""",
    "monitors and profilers": """{
        "train_batch_size": 2, "wall_clock_breakdown": false,
        "flops_profiler": {"enabled": false, "profile_step": 1},
        "tensorboard": {"enabled": true, "output_path": "logs", "job_name": "a"},
        "csv_monitor": {"enabled": false, "output_path": "logs"}}""",
    "activation checkpointing": """{
        "train_batch_size": 2, "activation_checkpointing": {"partition_activations": false,
            "cpu_checkpointing": false, "number_checkpoints": null}}""",
    "clipping off": '{"gradient_clipping": 0, "train_batch_size": 1}',
    "clipping in the optimizer": """{
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 0.4}}}""",
    "a private note": '{"_note": "two nodes", "train_batch_size": 2, "bf16": {"enabled": false}}',
}

TRAINERS: Final = {
    "an object, all beside it": """{
        "model": "m", "mixed_precision": "bf16", "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5, "deepspeed_config": {"zero_optimization": {"stage": 2}}}""",
    "dashes and text": """{
        "--seed": 1, "--mixed_precision": "no", "--gradient_accumulation_steps": "2",
        "--deepspeed_config": "{\\"zero_optimization\\": {\\"stage\\": 1}}"}""",
    "accumulation that the batch sizes give": """{
        "gradient_accumulation_steps": 2, "deepspeed_config": {"train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}}""",
    "accumulation and a train batch": """{
        "gradient_accumulation_steps": 2, "deepspeed_config": {"train_batch_size": 16}}""",
    "the configuration stands": """{
        "gradient_accumulation_steps": 2, "max_grad_norm": 2.0, "deepspeed_config": {
            "gradient_accumulation_steps": 8, "gradient_clipping": 0.1}}""",
    "everything automatic": """{
        "mixed_precision": "fp16", "gradient_accumulation_steps": 3, "gradient_clipping": 0,
        "deepspeed_config": {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}}""",
    "an automatic precision": """{
        "mixed_precision": "auto", "deepspeed_config": {"fp16": {"enabled": false}}}""",
    "an automatic precision over an empty section": """{
        "mixed_precision": "auto", "deepspeed_config": {"bf16": {}}}""",
    "swap folders of the trainer": """{
        "offload_param_path": "/fast/params", "deepspeed_config": {"bf16": {"enabled": true},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
            "nvme_path": "none"}, "offload_optimizer": {"device": "nvme"}}}}""",
    "two swap folders": """{
        "offload_param_path": "/a", "offload_optimizer_path": "/b", "deepspeed_config": {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/c"}}}}""",
    "a swap folder for nothing": """{
        "offload_param_path": "/a", "deepspeed_config": {"zero_optimization": {"stage": 2}}}""",
}

SIMPLETUNER: Final = {
    "its page at stage 3": """{
        "deepspeed_config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"}}, "zero3_init_flag": true,
            "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": "auto"},
        "train_batch_size": 4}""",
    "its page, saving whole": """{
        "zero_optimization": {"stage": 3}, "zero3_init_flag": true,
        "zero3_save_16bit_model": true, "bf16": {"enabled": true}}""",
    "switched off": """{
        "--deepspeed_config": "", "--mixed_precision": "bf16", "--train_batch_size": 4,
        "--gradient_accumulation_steps": 2}""",
    "its batch beside a train batch": """{
        "train_batch_size": 2, "gradient_accumulation_steps": 9,
        "deepspeed_config": {"train_batch_size": 16}}""",
    "its batch beside the configuration's own": """{
        "train_batch_size": 2, "deepspeed_config": {"train_micro_batch_size_per_gpu": 3}}""",
    "its batch where the others give it": """{
        "train_batch_size": 2, "mixed_precision": "bf16",
        "deepspeed_config": {"train_batch_size": 8, "gradient_accumulation_steps": 1}}""",
}

_AROUND = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
_DEFAULTS = (
    f"{_AROUND}debug: false\ndowncast_bf16: 'no'\nenable_cpu_affinity: false\n"
    "machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nrdzv_backend: static\n"
    "same_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\n"
    "use_cpu: false\n"
)

ACCELERATE: Final = {
    "the questionnaire, bf16": f"{_DEFAULTS}mixed_precision: bf16\nnum_processes: 8\n"
    "deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1.0,"
    " offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: false,"
    " zero_stage: 2}\n",
    "the questionnaire, fp16": f"{_DEFAULTS}mixed_precision: fp16\nnum_processes: 2\n"
    "deepspeed_config: {deepspeed_multinode_launcher: standard, zero3_init_flag: true,"
    " zero3_save_16bit_model: true, zero_stage: 3}\n",
    "the questionnaire, no precision": f"{_DEFAULTS}mixed_precision: 'no'\n"
    "deepspeed_config: {zero_stage: 1}\n",
    "no stage": f"{_AROUND}mixed_precision: bf16\ndeepspeed_config: {{gradient_clipping: 0.7}}\n",
    "offload to the host": f"{_AROUND}mixed_precision: bf16\ndeepspeed_config:"
    " {zero_stage: 2, offload_optimizer_device: cpu, gradient_accumulation_steps: auto}\n",
    "offload to a disk": f"{_AROUND}mixed_precision: bf16\ndeepspeed_config: {{zero_stage: 3,"
    " offload_optimizer_device: nvme, offload_optimizer_nvme_path: /mnt/a,"
    " offload_param_device: nvme, offload_param_nvme_path: /mnt/b}\n",
    "JSON in the block": f"{_AROUND}mixed_precision: fp16\ndeepspeed_config:\n"
    "  train_micro_batch_size_per_gpu: 2\n"
    "  zero_optimization: {stage: 2, reduce_bucket_size: 5e8}\n",
    "a configuration in place of a file": f"{_AROUND}deepspeed_config:\n"
    '  deepspeed_config_file: \'{"bf16": {"enabled": true}, "train_batch_size": 8}\'\n',
    "a precision beside it": f"{_AROUND}mixed_precision: bf16\ndeepspeed_config:\n"
    '  deepspeed_config_file: \'{"bf16": {"enabled": "auto"}}\'\n',
    "the word NO": f"{_AROUND}mixed_precision: NO\ndeepspeed_config: {{zero_stage: 2}}\n",
    "several machines": f"{_AROUND}mixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n"
    "machine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    "deepspeed_config: {zero_stage: 3, deepspeed_hostfile: hosts}\n",
    "as a guide for diffusers prints it": f"{_AROUND}deepspeed_config:\n"
    "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n"
    "  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
    "  zero3_init_flag: false\n  zero_stage: 2\n"
    "downcast_bf16: no\ndynamo_backend: 'NO'\nfsdp_config: {}\nmachine_rank: 0\n"
    "main_process_ip: null\nmain_process_port: null\nmain_training_function: main\n"
    "megatron_lm_config: {}\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 1\n"
    "rdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
    "as a trainer of language models ships it": f"{_DEFAULTS}deepspeed_config:\n"
    "  deepspeed_multinode_launcher: standard\n  offload_optimizer_device: none\n"
    "  offload_param_device: none\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n"
    "  zero_stage: 3\nmixed_precision: bf16\nnum_processes: 8\n",
    "zero.Init off, debugging on": f"{_AROUND}debug: true\ndowncast_bf16: no\n"
    "dynamo_config: {dynamo_backend: 'NO'}\nmixed_precision: bf16\nnum_processes: 4\n"
    "deepspeed_config: {gradient_accumulation_steps: 1, offload_optimizer_device: cpu,"
    " offload_param_device: cpu, zero3_init_flag: false, zero_stage: 3}\n",
    "cards by number": f"{_AROUND}gpu_ids: '0,1'\nnum_processes: 2\nmixed_precision: bf16\n"
    "deepspeed_config: {zero_stage: 2}\n",
}
