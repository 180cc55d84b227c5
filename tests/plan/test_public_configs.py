"""Features of public DeepSpeed configurations, one test each.

The kinds come from 175 files found in public repositories (134 JSON, 41 accelerate YAML); each
test shows what the reader, the rules or resolution make of one of them.
"""

from __future__ import annotations

import json

import pytest

from zerotune.errors import (
    InvalidValueError,
    OptimizerError,
    PlanConflictError,
    PlanError,
    PlanFileError,
    PlanSyntaxError,
    UnknownKeyError,
)
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, RunFacts

BATCH = {"train_micro_batch_size_per_gpu": 1}


def zero(**keys):
    return {**BATCH, "zero_optimization": keys}


def read(config) -> DeepSpeedPlan:
    return DeepSpeedPlan.from_dict(config)


def found(plan, rule):
    return [finding for finding in plan.check() if finding.rule == rule]


@pytest.fixture
def resolve(cuda):
    def resolve_config(config, **kwargs):
        return read(config).resolve(platform=cuda, **kwargs)

    return resolve_config


@pytest.fixture
def read_yaml(tmp_path):
    def read_text(text):
        (tmp_path / "accelerate.yaml").write_text(text)
        return DeepSpeedPlan.from_yaml(tmp_path / "accelerate.yaml")

    return read_text


def test_automatic_batch_keys_are_solved_from_the_run(resolve):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    run = RunFacts(micro_batch_size=2, gradient_accumulation_steps=4)
    resolved = resolve(dict.fromkeys(keys, "auto"), run=run, world_size=3)
    assert [resolved.to_deepspeed()[key] for key in keys] == [24, 2, 4]


def test_scientific_notation_is_normalised_to_integers_and_fractions_are_refused():
    plan = read(zero(reduce_bucket_size=2e8, stage3_max_live_parameters=1e14))
    assert plan.zero_optimization.reduce_bucket_size == 200_000_000
    assert plan.zero_optimization.stage3_max_live_parameters == 10**14
    assert len(plan.decisions) == 2
    with pytest.raises(InvalidValueError, match="whole number"):
        read(zero(reduce_bucket_size=2.5))


def test_automatic_clipping_is_resolved_and_reported(resolve):
    resolved = resolve({**BATCH, "gradient_clipping": "auto"})
    assert resolved.gradient_clipping == 1.0
    (decision,) = [d for d in resolved.decisions if d.key == "gradient_clipping"]
    assert (decision.before, decision.after) == ("auto", 1.0)


def test_automatic_buckets_follow_from_the_shapes(resolve, unet):
    buckets = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    resolved = resolve(zero(stage=3, **buckets), model=unet)
    section = resolved.to_deepspeed()["zero_optimization"]
    assert all(isinstance(section[name], int) for name in buckets)
    assert section["reduce_bucket_size"] >= max(each.numel for each in unet.parameters)


def test_without_any_batch_key_the_run_determines_the_batch(resolve):
    assert resolve({}, run=RunFacts(micro_batch_size=3)).train_batch_size == 3


def test_a_batch_that_only_fits_other_world_sizes_lists_them(resolve):
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 1}
    with pytest.raises(PlanConflictError, match="it works at world size 1, 2, 4, 8"):
        resolve(config, world_size=3)


def test_numbers_and_auto_in_the_batch_triple_are_solved(resolve):
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
    }
    assert resolve(config, world_size=4).micro_batch_size == 2


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_auto_precision_is_always_resolved(resolve, section):
    resolved = resolve({**BATCH, section: {"enabled": "auto"}})
    rendered = resolved.to_deepspeed()
    assert rendered["bf16"]["enabled"] is (resolved.precision == "bf16")
    assert rendered["fp16"]["enabled"] is (resolved.precision == "fp16")
    assert [d for d in resolved.decisions if d.key == "precision"]


def test_automatic_optimizer_and_scheduler_parameters_are_filled_or_named(resolve):
    config = {
        **BATCH,
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(
                ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
            ),
        },
    }
    run = RunFacts(lr=1e-4, total_steps=100, warmup_steps=10)
    rendered = OptimizerResolver().apply(resolve(config, run=run)).to_deepspeed()
    assert rendered["optimizer"]["params"]["lr"] == 1e-4
    assert '"auto"' not in json.dumps(rendered)
    with pytest.raises((PlanError, OptimizerError)) as caught:
        OptimizerResolver().apply(resolve(config))
    assert caught.value.key


def test_zero_warm_up_steps_become_a_schedule_that_deepspeed_accepts(resolve):
    config = {
        **BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 0, "warmup_max_lr": 1e-4},
        },
    }
    resolved = OptimizerResolver().apply(resolve(config))
    rendered = resolved.to_deepspeed().get("scheduler", {"params": {}})
    assert rendered["params"].get("warmup_num_steps", 1) > 0
    assert [d for d in resolved.decisions if "warmup_num_steps" in d.key]


def test_parameter_offload_below_stage_3_gives_a_warning():
    plan = read(zero(stage=2, offload_param={"device": "cpu"}))
    (finding,) = found(plan, "offload-param-below-stage-3")
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("legacy", "becomes"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload_params": True}, {"offload_param": {"device": "cpu"}}),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
    ],
)
def test_legacy_keys_are_translated_and_recorded(legacy, becomes):
    plan = read(zero(stage=3, **legacy))
    assert plan.to_deepspeed()["zero_optimization"] == {"stage": 3, **becomes}
    (decision,) = plan.decisions
    assert decision.key == f"zero_optimization.{next(iter(legacy))}"


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_one_bit_optimizers_are_explained_with_what_to_write_instead(name):
    (finding,) = found(read({**zero(stage=1), "optimizer": {"type": name}}), "one-bit-optimizer")
    assert "AdamW" in finding.fix


def test_an_unknown_optimizer_is_named_and_not_replaced(resolve):
    with pytest.raises(OptimizerError) as caught:
        resolve({**zero(stage=1), "optimizer": {"type": "MyOptimizer"}})
    assert caught.value.key == "optimizer.type"


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("sequence_parallel", "sequence_parallel_size"),
        ("monitor_config", "tensorboard"),
        ("max_grad_norm", "gradient_clipping"),
    ],
)
def test_unknown_top_level_keys_give_a_suggestion_and_private_ones_pass(key, guess):
    with pytest.raises(UnknownKeyError) as caught:
        read({**BATCH, key: 1})
    assert guess in caught.value.fix
    assert read({**BATCH, f"_{key}": 1}).decisions == ()


@pytest.mark.parametrize("section", ["amp", "elasticity", "sparse_attention", "nebula"])
def test_removed_sections_are_dropped_when_off_and_refused_when_on(section):
    off = read({**BATCH, section: {"enabled": False}})
    assert section not in off.to_deepspeed()
    assert [d.key for d in off.decisions] == [section]
    on = read({**BATCH, section: {"enabled": True}})
    assert [finding.key for finding in found(on, "removed-section")] == [section]


def test_known_misspellings_of_zero_keys_are_corrected_and_others_named():
    plan = read(zero(stage=3, stage3_param_persitance_threshold=10))
    assert plan.zero_optimization.stage3_param_persistence_threshold == 10
    assert plan.decisions[0].after == "stage3_param_persistence_threshold"
    with pytest.raises(UnknownKeyError, match="stage3_max_live_parameters") as caught:
        read(zero(stage=3, stage3_max_live_paramters=10))
    assert caught.value.key == "zero_optimization.stage3_max_live_paramters"


@pytest.mark.parametrize(
    "text", ['{"bf16": {"enabled": true}, /* x */}', '{"bf16": {"enabled": true}} // x', "# x\n{}"]
)
def test_comments_and_trailing_commas_are_read_with_a_warning(text):
    assert [d.severity for d in DeepSpeedPlan.from_json(text).decisions] == ["warning"]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('{"bf16": {"enabled": True}}', 1, 22),
        ('{"train_batch_size": 8\n"bf16": {}}', 2, 1),
        ('{"train_batch_size": {{ batch }}}', 1, 23),
    ],
)
def test_other_json_mistakes_have_line_and_column(text, line, column):
    with pytest.raises(PlanSyntaxError, match="is not JSON") as caught:
        DeepSpeedPlan.from_json(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_boolean_zero_section_means_stage_1():
    plan = read({**BATCH, "zero_optimization": True})
    assert plan.stage == 1
    assert plan.decisions[0].severity == "warning"


def test_a_wrapped_configuration_is_unwrapped():
    assert read({"model": "x", "deepspeed_config": zero(stage=2)}).stage == 2


def test_a_file_that_is_not_a_deepspeed_configuration_is_recognised():
    model = {"hidden_size": 64, "architectures": ["UNet"], "vocab_size": 3, "dropout": 0.1}
    with pytest.raises(InvalidValueError, match="contains no DeepSpeed configuration"):
        read(model)


def test_the_old_name_of_the_aio_threads_is_translated():
    plan = read({**BATCH, "aio": {"thread_count": 2}})
    assert plan.aio.intra_op_parallelism == 2
    assert plan.decisions[0].after == "intra_op_parallelism"


@pytest.mark.parametrize("written", ["500000000", "5e8", 5e8])
def test_numbers_as_text_are_read(written):
    assert read(zero(reduce_bucket_size=written)).zero_optimization.reduce_bucket_size == 5 * 10**8


@pytest.mark.parametrize(("written", "device"), [("CPU", "cpu"), (None, "none"), ("None", "none")])
def test_devices_are_read_in_any_case_and_null_means_none(written, device):
    assert read(zero(stage=2, offload_optimizer={"device": written})).offload_optimizer_device == (
        device
    )


def test_bfloat16_means_bf16():
    plan = read({**BATCH, "bfloat16": {"enabled": True}})
    assert plan.precision == "bf16"
    assert plan.to_deepspeed() == {**BATCH, "bf16": {"enabled": True}}


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "CosineAnnealingWarmRestarts"])
def test_a_torch_scheduler_gives_a_suggestion(resolve, name):
    config = {
        **zero(stage=2),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {"type": name, "params": {}},
    }
    with pytest.raises(OptimizerError, match="WarmupCosineLR"):
        OptimizerResolver(on_unsupported="error").apply(
            resolve(config, run=RunFacts(total_steps=100))
        )


def test_deepspeed_json_inside_a_yaml_block_is_merged(read_yaml):
    plan = read_yaml("deepspeed_config: {zero_stage: 2, train_batch_size: 8}")
    assert (plan.train_batch_size, plan.stage) == (8, 2)
    (decision,) = [d for d in plan.decisions if "discard" in d.reason]
    assert decision.severity == "warning"


def test_yamls_readings_of_numbers_and_of_no_are_corrected(read_yaml):
    plan = read_yaml(
        "mixed_precision: NO\n"
        "deepspeed_config: {zero_optimization: {stage: 3, reduce_bucket_size: 5e8}}"
    )
    assert plan.zero_optimization.reduce_bucket_size == 5 * 10**8
    assert plan.launch.mixed_precision == "fp32"


def test_settings_beside_a_configuration_file_are_refused_by_name(read_yaml, tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(PlanConflictError, match="offload_param_device, zero_stage"):
        read_yaml(
            "deepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2,"
            " offload_param_device: cpu}"
        )


def test_nvme_folders_of_a_yaml_are_kept_with_a_warning_that_launchers_lose_them(read_yaml):
    plan = read_yaml(
        "deepspeed_config: {zero_stage: 3, offload_param_device: nvme,"
        " offload_param_nvme_path: /mnt/a}"
    )
    assert plan.zero_optimization.offload_param.nvme_path == "/mnt/a"
    assert [d for d in plan.decisions if "does not pass this path on" in d.reason]


def test_a_relative_configuration_file_is_searched_in_two_folders(read_yaml, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = "deepspeed_config: {deepspeed_config_file: ds.json}"
    with pytest.raises(PlanFileError) as caught:
        read_yaml(text)
    assert str(tmp_path / "ds.json") in caught.value.reason
    (elsewhere / "ds.json").write_text(json.dumps(zero(stage=1)))
    assert read_yaml(text).stage == 1
    (tmp_path / "ds.json").write_text(json.dumps(zero(stage=3)))
    assert read_yaml(text).stage == 3


def test_the_files_optimizer_overrides_the_runs_and_that_is_recorded(resolve):
    config = {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    resolved = OptimizerResolver().apply(resolve(config, run=RunFacts(lr=3e-5)))
    assert resolved.optimizer.params["lr"] == 1e-4
    assert [d for d in resolved.decisions if d.key.endswith("lr") and d.before == 3e-5]
