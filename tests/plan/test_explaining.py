from __future__ import annotations

import json

from zerotune.plan import DeepSpeedPlan, OptimizerChoice, SchedulerChoice

ADAMW = OptimizerChoice(name="AdamW", params={"lr": 1e-4}, implementation="DeepSpeedCPUAdam")


def test_a_plan_is_explained_as_written(reference_a):
    text = DeepSpeedPlan.from_dict(reference_a).explain()
    assert "ZeRO stage      2: optimizer states, master weights and gradients" in text
    assert "8 = micro 2 x accumulation 4 x world size" in text
    assert "AdamW(lr=0.0001, betas=[0.9, 0.999]" in text
    assert "decisions:" not in text


def test_an_open_plan_is_explained_too():
    text = DeepSpeedPlan.from_dict(
        {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}
    ).explain()
    assert "auto: chosen when the plan is resolved" in text
    assert "train_batch" not in text
    assert "unset = micro unset x accumulation unset" in text


def test_a_resolved_plan_tells_warnings_first_and_defaults_last(reference_a, cuda, unet):
    text = DeepSpeedPlan.from_dict(reference_a).resolve(platform=cuda, model=unet).explain()
    lines = text.splitlines()
    first = lines[lines.index("decisions:") + 1]
    assert first.startswith("  [warning] zero_optimization.offload_param")
    assert "optimizer lives in host memory" in text
    assert "not settled yet" in text
    assert f"UNet: {unet.numel:,} elements in {len(unet.parameters)} parameters" in text
    assert "zero_optimization.contiguous_gradients = True" in text
    assert text.index("because defaults move") > text.index("[note]")


def test_choices_and_folders_are_explained(cuda):
    plan = DeepSpeedPlan.build(stage=3, offload="nvme")
    resolved = plan.resolve(platform=cuda)
    assert "in files (NVMe) under a leased folder" in resolved.explain()
    settled = resolved.with_nvme_path(optimizer="/mnt/x").with_choices(
        ADAMW, SchedulerChoice(name="WarmupLR", params={"warmup_num_steps": 5})
    )
    text = settled.explain()
    assert "under /mnt/x" in text
    assert "AdamW(lr=0.0001) run by DeepSpeedCPUAdam" in text
    assert "WarmupLR(warmup_num_steps=5)" in text
    assert "the learning rate is constant" in resolved.with_choices(ADAMW, None).explain()


def test_the_plain_engine_is_named(reference_a, no_deepspeed):
    text = DeepSpeedPlan.from_dict(reference_a).resolve(platform=no_deepspeed).explain()
    assert "plain engine (DeepSpeed is off)" in text
    assert "nothing is partitioned" in text


def test_the_summary_is_data(reference_a, cuda):
    resolved = DeepSpeedPlan.from_dict(reference_a).resolve(platform=cuda)
    summary = resolved.with_choices(ADAMW, None).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["stage"] == 2
    assert summary["offload_optimizer"] == "cpu"
    assert summary["optimizer"] == {"name": "AdamW", "params": {"lr": 1e-4}}
    assert summary["scheduler"] is None
    assert summary["decisions"][0]["severity"] == "warning"
