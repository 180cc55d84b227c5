from __future__ import annotations

import pytest
import yaml

from tests.plan.accelerate_runs import launcher_refuses
from tests.plan.rulebook.findings import find, one, zero
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform


def test_stage_auto_is_recorded_once():
    finding = one("stage-auto", zero(stage="auto"))
    resolved = DeepSpeedPlan.from_dict(zero(stage="auto")).resolve(
        platform=Platform.synthetic("cuda")
    )
    assert [each.key for each in resolved.decisions].count(finding.key) == 1
    assert find("stage-auto", zero(stage=0)) == find("stage-auto", {}) == []


@pytest.mark.parametrize(("stage", "value", "found"), [(1, True, 1), (1, False, 0), (0, True, 0)])
def test_legacy_stage_1(stage, value, found):
    assert len(find("legacy-stage-1", zero(stage=stage, legacy_stage1=value))) == found


def test_gradients_are_not_distributed_round_robin():
    finding = one("round-robin-gradients", zero(stage=2, round_robin_gradients=True))
    assert finding.after is False
    assert find("round-robin-gradients", zero(stage=3, round_robin_gradients=True)) == []
    plan = DeepSpeedPlan.from_dict(zero(stage=2, round_robin_gradients=True))
    resolved = plan.resolve(platform=Platform.synthetic("cuda"), world_size=2)
    assert resolved.plan.zero_optimization.round_robin_gradients is False


@pytest.mark.parametrize(
    ("stage", "clipping", "device", "needs"),
    [
        (3, 0, "none", "stage 1 or 2"),
        (0, 0, "none", "stage 1 or 2"),
        (2, 1.0, "none", "gradient_clipping 0"),
        (2, "auto", "none", "gradient_clipping 0"),
        (1, 0, "cpu", "on the device"),
        (1, 0, "none", None),
    ],
)
def test_gradient_norm(stage, clipping, device, needs):
    config = zero(stage=stage, compute_grad_norm=False, offload_optimizer={"device": device})
    findings = find("gradient-norm", {**config, "gradient_clipping": clipping})
    assert len(findings) == (needs is not None)
    if needs is not None:
        assert needs in findings[0].reason
    config["zero_optimization"]["compute_grad_norm"] = True
    assert find("gradient-norm", config) == []


@pytest.mark.parametrize(
    ("extra", "keys", "found"),
    [
        ({"prescale_gradients": True}, {"stage": 2}, 1),
        ({"prescale_gradients": True}, {"stage": 3}, 1),
        ({"prescale_gradients": True}, {"stage": 1}, 0),
        ({"prescale_gradients": True}, {"stage": 2, "reduce_scatter": False}, 0),
        ({"prescale_gradients": False}, {"stage": 2}, 0),
        ({"gradient_predivide_factor": 2.0}, {"stage": 3}, 1),
        ({"gradient_predivide_factor": 1.0}, {"stage": 3}, 0),
    ],
)
def test_gradient_scaling(extra, keys, found):
    assert len(find("gradient-scaling", {**zero(**keys), **extra})) == found


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ({"flops_profiler": {"enabledd": True}}, "flops_profiler.enabledd", "enabled"),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "activation_checkpointing.partition_activation",
            "partition_activations",
        ),
        ({"data_efficiency": {"enable": True}}, "data_efficiency.enable", "enabled"),
        (
            {"data_efficiency": {"data_sampling": {"num_epoch": 1}}},
            "data_efficiency.data_sampling.num_epoch",
            "num_epochs",
        ),
        ({"data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type", "_dtype"),
        ({"data_types": {"grad_accum_dtype": "fp17"}}, "data_types.grad_accum_dtype", "fp16"),
        ({"prescale_gradients": "yess"}, "prescale_gradients", "true"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor", "more than 0"),
    ],
)
def test_a_typo_that_deepspeed_ignores_is_an_error(section, key, meant):
    finding = one("passed-through", section)
    assert finding.key == key
    assert meant in finding.fix


def test_sections_with_names_of_the_user_accept_any_key():
    sampling = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"x": {"a": 1}}}}
    section = {"data_efficiency": {"data_sampling": sampling}}
    assert find("passed-through", section) == []


@pytest.mark.parametrize(
    ("operation", "keys", "found"),
    [
        ("sum", {"stage": 3}, 1),
        ("SUM", {"stage": 3}, 1),
        ("mean", {"stage": 3}, 0),
        ("sum", {"stage": 2}, 0),
        ("sum", {"stage": 2, "zenflow": {}}, 1),
        (3, {"stage": 3}, 0),
    ],
)
def test_gradient_sum(operation, keys, found):
    config = {**zero(**keys), "gradient_allreduce_op": operation}
    assert len(find("gradient-sum", config)) == found


@pytest.mark.parametrize(
    ("keys", "bf16", "cost"),
    [
        ({"stage": 2}, True, "953.67 MiB"),
        ({"stage": 2, "overlap_comm": True}, True, "1.86 GiB"),
        ({"stage": 2, "overlap_comm": True}, False, "3.73 GiB"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, True, "1.86 GiB"),
        ({"stage": 3, "overlap_comm": True}, True, "953.67 MiB"),
        ({"stage": 2, "contiguous_gradients": False}, True, None),
        ({"stage": 0}, True, None),
    ],
)
def test_large_reduce_bucket(keys, bf16, cost):
    config = {**zero(reduce_bucket_size=500_000_000, **keys), "bf16": {"enabled": bf16}}
    findings = find("large-reduce-bucket", config)
    assert len(findings) == (cost is not None)
    if cost is not None:
        assert cost in findings[0].reason
        assert ("two buckets" in findings[0].reason) == (cost in ("1.86 GiB", "3.73 GiB"))
        chosen = "overlap_comm" not in keys and "two buckets" in findings[0].reason
        assert ("zerotune turns overlap_comm on" in findings[0].reason) == chosen
    config["zero_optimization"]["reduce_bucket_size"] = 30_000_000
    assert find("large-reduce-bucket", config) == []


def test_deepspeeds_activation_checkpointing_is_reported_with_the_alternative():
    config = {"activation_checkpointing": {"partition_activations": True}}
    assert "enable_gradient_checkpointing" in one("activation-checkpointing", config).fix
    assert find("activation-checkpointing", {"activation_checkpointing": {}}) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"tensor_parallel": {"tp": {"tp_size": "4"}}}, "tensor_parallel.tp.tp_size"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
        ({"expert_parallel": {"autoep_size": 2}}, "expert_parallel.autoep_size"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_by_their_key(config, key):
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    assert one("parallelism", {**batch, **config}, world_size=4).key == key
    assert "data parallelism" in one("parallelism", config).reason


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
@pytest.mark.parametrize("prefix", ["", "parallelism_config_"])
def test_accelerates_parallelism_settings_are_refused_too(kind, prefix):
    def plan(size):
        return DeepSpeedPlan.from_dict(
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2},
                "parallelism_config": {f"{prefix}{kind}_size": size},
            }
        )

    (found,) = [each for each in plan(2).check() if each.rule == "parallelism"]
    assert (found.key, found.severity) == (f"parallelism_config.{prefix}{kind}_size", "error")
    assert not [each for each in plan(1).check() if each.rule == "parallelism"]


@pytest.mark.parametrize(
    "config",
    [{"sequence_parallel_size": 1}, {"pipeline": {"stages": "auto"}}, {"pipeline": [2]}],
)
def test_parallelism_of_degree_one_is_accepted(config):
    assert find("parallelism", config) == []


@pytest.mark.parametrize(
    ("config", "key", "fix"),
    [
        ({"tensorboard": {"enabled": 3}}, "tensorboard.enabled", "true or false"),
        ({"tensorboard": {"enable": True}}, "tensorboard.enable", "'enabled'"),
        ({"comms_logger": []}, "comms_logger", "an object"),
        ({"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens", "more than 0"),
        ({"timers": {"throughput": {"on": True}}}, "timers.throughput.on", "remove this key"),
        ({"communication_data_type": "int8"}, "communication_data_type", '"bf16"'),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op", '"sum"'),
        (zero(zenflow={"topk_ratio": 2}), "zero_optimization.zenflow.topk_ratio", "less than 1"),
        (zero(zenflow={"select_strategy": "x"}), "zero_optimization.zenflow.select_strategy", ""),
        (zero(leaf_module={"class": "x"}), "zero_optimization.leaf_module.class", "'classes'"),
        (
            zero(offload_optimizer={"device": "cpu", "super_offload": 2}),
            "zero_optimization.offload_optimizer.super_offload",
            "true or false",
        ),
        (
            zero(stage=3, offload_param={"device": "cpu", "super_offload": True}),
            "zero_optimization.offload_param.super_offload",
            "offload_optimizer",
        ),
    ],
)
def test_passed_through_keys_are_checked(config, key, fix):
    finding = one("passed-through", config)
    assert finding.key == key
    assert fix in finding.fix


def test_values_that_deepspeed_accepts_pass_through():
    config = {
        "tensorboard": {"enabled": "yes", "output_path": "x", "job_name": "auto"},
        "hybrid_engine": {"max_out_tokens": "512"},
        "gradient_allreduce_op": "SUM",
        "communication_data_type": "BF16",
        "zero_optimization": {"stage": 2, "leaf_module": {"classes": "Block"}},
    }
    assert find("passed-through", config) == []


def test_the_schema_of_another_deepspeed_can_be_passed():
    plan = DeepSpeedPlan.from_dict({"gradient_allreduce_op": "max"})
    schema = {"properties": {"gradient_allreduce_op": {"enum": ["max"]}}}
    assert plan.check()[0].rule == "passed-through"
    assert all(finding.rule != "passed-through" for finding in plan.check(schema=schema))


def test_deepcompile_with_summed_gradients_is_refused():
    config = {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}}
    assert "DeepCompile" in one("gradient-sum", {**config, **zero(stage=1)}).reason


def test_swapping_without_a_folder_is_reported():
    config = zero(stage=3, offload_optimizer={"device": "nvme"})
    assert one("nvme-path-unset", config).key.endswith("offload_optimizer.nvme_path")
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/nvme"
    assert find("nvme-path-unset", config) == []


def test_a_number_in_quotes_is_reported():
    finding = one("number-as-text", {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}})
    assert (finding.key, finding.fix) == ("optimizer.params.lr", "write 1e-4")
    params = {"lr": 1e-4, "betas": "auto", "kind": "cosine"}
    assert find("number-as-text", {"optimizer": {"type": "AdamW", "params": params}}) == []


@pytest.mark.parametrize(("precision", "size"), [("auto", "1.86"), (True, "1.86"), (False, "3.73")])
def test_the_reported_bucket_size_follows_the_precision(precision, size):
    section = {"stage": 2, "reduce_bucket_size": 500_000_000, "overlap_comm": True}
    config = {"zero_optimization": section, "bf16": {"enabled": precision}}
    assert size in one("large-reduce-bucket", config).reason


@pytest.mark.parametrize(
    ("stage", "size", "ranks", "fix"),
    [
        (3, 3, 8, "write 2"),
        (3, 8, 12, "write 6"),
        (3, 2, 8, None),
        (3, 16, 8, None),
        (3, 1, 8, None),
        (3, "auto", 8, None),
        (2, 3, 8, None),
    ],
)
def test_secondary_partitions_divide_the_ranks(stage, size, ranks, fix):
    config = zero(stage=stage, zero_hpz_partition_size=size)
    findings = find("hpz-partition-size", config, world_size=ranks)
    assert [finding.fix for finding in findings] == [fix] * (fix is not None)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("size", "ranks"), [(3, 8), (8, 12), (2, 8), (16, 8)])
def test_deepspeed_rejects_the_same_secondary_partitions(size, ranks):
    from deepspeed.utils import groups

    try:
        groups._ensure_divisibility(ranks, min(size, ranks))
        refused = False
    except AssertionError:
        refused = True
    config = zero(stage=3, zero_hpz_partition_size=size)
    assert bool(find("hpz-partition-size", config, world_size=ranks)) == refused


@pytest.mark.parametrize(
    ("stage", "offload", "found"),
    [(1, None, 1), (2, None, 1), (2, "none", 1), (2, "cpu", 0), (3, None, 0)],
)
def test_zenflow_needs_offload(stage, offload, found):
    section = {"offload_optimizer": {"device": offload}} if offload else {}
    config = zero(stage=stage, zenflow={"topk_ratio": 0.1}, **section)
    assert len(find("zenflow-without-offload", config)) == found


LAUNCHED = {"distributed_type": "DEEPSPEED", "num_processes": 2}


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"gpu_ids": 0}, "gpu_ids", 'write "0"'),
        ({"gpu_ids": [0, 1]}, "gpu_ids", 'write "0,1"'),
        ({"gpu_ids": "0,1"}, None, None),
        ({"distributed_type": "deepspeed"}, "distributed_type", "write DEEPSPEED"),
        ({"num_processes": None}, "num_processes", "such as 1,"),
        ({"num_processes": -1}, "num_processes", "such as 1,"),
        ({}, None, None),
    ],
)
def test_settings_that_accelerates_launcher_rejects(tmp_path, changes, key, fix):
    content = {**LAUNCHED, "deepspeed_config": {"zero_stage": 2}, **changes}
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        yaml.safe_dump({key: each for key, each in content.items() if each is not None})
    )
    found = find("launcher-file", DeepSpeedPlan.load(file))
    assert [finding.key for finding in found] == [f"launch.{key}"] * (key is not None)
    assert all(fix in finding.fix for finding in found)
    assert launcher_refuses(str(file)) == bool(found)
