from __future__ import annotations

import html
import json
import re

import attrs
import pytest

from zerotune.plan import DeepSpeedPlan, Workload
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.text.plan import describe

ADAMW = OptimizerChoice(name="AdamW", params={"lr": 1e-4}, implementation="DeepSpeedCPUAdam")


def test_explaining_a_plan_shows_it_as_written(reference_a):
    text = DeepSpeedPlan.from_dict(reference_a).explain()
    assert "ZeRO stage      2: optimizer states, master weights and gradients" in text
    assert "8 = micro 2 x accumulation 4 x world size" in text
    assert "AdamW(lr=0.0001, betas=[0.9, 0.999]" in text
    assert "changed from" not in text
    assert "chosen" not in text


def test_explaining_a_plan_with_open_values_works():
    text = DeepSpeedPlan.from_dict(
        {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}
    ).explain()
    assert "auto: chosen when the plan is resolved" in text
    assert "train_batch" not in text
    assert "micro ? x accumulation ? x world size" in text


def test_a_resolved_plan_shows_overruled_values_first_and_counts_defaults(reference_a, cuda, unet):
    text = DeepSpeedPlan.from_dict(reference_a).resolve(platform=cuda, model=unet).explain()
    lines = text.splitlines()
    first = lines[lines.index("changed from what was written:") + 1]
    assert first.startswith("  [warning] zero_optimization.offload_param")
    assert "optimizer state in host memory" in text
    assert "run by DeepSpeedCPUAdam" in text
    assert f"UNet: {unet.numel:,} elements in {len(unet.parameters)} parameters" in text
    chosen = text.partition("chosen automatically:")[2]
    assert "  [note] train_batch_size" in chosen or "unset ->" in chosen
    assert "[warning]" not in chosen
    count = int(re.search(r"^and (\d+) settings with the defaults", chosen, re.MULTILINE)[1])
    assert count >= 10
    assert "contiguous_gradients" not in text
    assert len(lines) < 45


def test_the_explanation_shows_choices_and_folders(cuda):
    plan = DeepSpeedPlan.build(stage=3, offload="nvme")
    resolved = plan.resolve(platform=cuda)
    assert "in files (NVMe) under a leased folder" in resolved.explain()
    settled = attrs.evolve(
        resolved.with_nvme_path(optimizer="/mnt/x"),
        optimizer=ADAMW,
        scheduler=SchedulerChoice(name="WarmupLR", params={"warmup_num_steps": 5}),
    )
    text = settled.explain()
    assert "under /mnt/x" in text
    assert "AdamW(lr=0.0001) run by DeepSpeedCPUAdam" in text
    assert "WarmupLR(warmup_num_steps=5)" in text
    assert "the learning rate is constant" in resolved.explain()


def test_the_summary_of_a_resolved_plan_is_plain_data(reference_a, cuda):
    resolved = DeepSpeedPlan.from_dict(reference_a).resolve(platform=cuda)
    summary = attrs.evolve(resolved, optimizer=ADAMW, scheduler=None).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["stage"] == 2
    assert summary["offload_optimizer"] == "cpu"
    assert summary["optimizer"] == {
        "name": "AdamW", "params": {"lr": 1e-4}, "implementation": "DeepSpeedCPUAdam",
    }  # fmt: skip
    assert summary["scheduler"] is None
    assert summary["decisions"][0]["severity"] == "warning"


NVME_BELOW_3 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}


def test_explanation_and_summary_include_the_findings_of_the_rules():
    plan = DeepSpeedPlan.from_dict(NVME_BELOW_3)

    assert plan.explain().startswith("Plan from dict: cannot run, 1 error\n  [error] ")
    found = [finding for finding in plan.summary()["findings"] if finding["severity"] == "error"]
    assert found
    assert found[0]["key"].startswith("zero_optimization.")
    assert found[0]["fix"]


def test_the_summary_of_a_plan_is_plain_data(reference_a):
    reference_a["optimizer"]["params"]["lr"] = "auto"
    reference_a["bf16"] = {"enabled": "true"}
    summary = DeepSpeedPlan.from_dict(reference_a, source="a.json").summary()

    assert json.loads(json.dumps(summary)) == summary
    assert summary["source"] == "a.json"
    assert summary["stage"] == 2
    assert summary["offload_optimizer"] == "cpu"
    assert summary["precision"] == "bf16"
    assert summary["train_batch_size"] == 8
    assert summary["optimizer"]["name"] == "AdamW"
    assert summary["optimizer"]["params"]["lr"] == "auto"
    assert summary["decisions"][0]["key"] == "bf16.enabled"


def test_the_findings_depend_on_the_world_size(reference_a):
    plan = DeepSpeedPlan.from_dict(reference_a)

    assert not [one for one in plan.summary()["findings"] if one["severity"] == "error"]
    worse = plan.summary(world_size=3)["findings"]
    assert [one for one in worse if one["severity"] == "error"]
    assert "[error]" in plan.explain(world_size=3)


def test_a_resolved_plan_is_explained_in_one_line(cuda, no_deepspeed):
    def line(platform=cuda, **build):
        return describe(DeepSpeedPlan.build(precision="fp32", **build).resolve(platform=platform))

    assert line(stage=0) == "no partitioning, fp32, 1 process"
    assert line(stage=2, offload="cpu") == "ZeRO-2, optimizer in host memory, fp32, 1 process"
    assert line(stage=3, offload="nvme", offload_param="cpu") == (
        "ZeRO-3, optimizer in files (NVMe), parameters in host memory, fp32, 1 process"
    )
    assert line(no_deepspeed) == "plain engine, fp32, 1 process"


class TestInAnInterpreterAndANotebook:
    @pytest.fixture
    def values(self, reference_a, cuda, unet):
        plan = DeepSpeedPlan.from_dict(reference_a)
        resolved = plan.resolve(platform=cuda, model=unet)
        advice = DeepSpeedPlan.advise("sdxl", vram="24GiB", ram="128GiB")
        return [plan, resolved, resolved.estimate(Workload()), advice, advice.chosen]

    def test_the_repr_of_a_value_is_one_short_line(self, values):
        for value in values:
            assert "\n" not in repr(value)
            assert len(repr(value)) < 250
            assert repr(value).startswith(f"<{type(value).__name__}: ")

    def test_the_str_of_a_value_is_its_report(self, values):
        plan, resolved, estimate, advice, _ = values
        assert str(plan).startswith("Plan from dict\n  ZeRO stage ")
        assert str(resolved).startswith("Resolved plan from dict\n  engine ")
        assert str(estimate).startswith("Memory per rank: ZeRO-")
        assert "5 of " in str(advice)
        assert max(len(line) for line in str(estimate).splitlines()) <= 100

    def test_a_notebook_shows_the_report_with_its_columns(self, values):
        plan, resolved, estimate, advice, _ = values
        for value in (plan, resolved, estimate, advice):
            assert value._repr_html_() == f"<pre>{html.escape(str(value))}</pre>"

    def test_text_from_a_file_is_escaped_in_html(self):
        plan = DeepSpeedPlan.from_dict(
            {"optimizer": {"type": "<script>alert(1)</script>", "params": {}}}
        )
        assert "<script>" not in plan._repr_html_()
        assert "&lt;script&gt;" in plan._repr_html_()
