"""One inspection finds all mistakes, and every front end reports the same ones."""

from __future__ import annotations

import json

import pytest

from zerotune import cli
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.context import Context
from zerotune.platform import Platform

NVME = "zero_optimization.offload_optimizer.device"
TWICE_WRONG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
    "optimizer": {"type": "AdaBelief", "params": {"lr": 1e-4}},
}


def inspected(config):
    context = Context(platform=Platform.synthetic("cuda"))
    plan = DeepSpeedPlan.from_dict(config)
    return plan.inspect(context)


def test_an_unknown_optimizer_and_an_error_of_a_rule_are_both_found():
    found = inspected(TWICE_WRONG)
    assert [each.key for each in found.findings if each.severity == "error"] == [NVME]
    assert [(each.rule, each.key) for each in found.refusals] == [("optimizer", "optimizer.type")]
    assert found.resolved is None


def test_the_check_command_reports_both_errors(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(TWICE_WRONG))
    assert cli.main(["plan", "check", str(file), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    errors = [each["key"] for each in findings if each["severity"] == "error"]
    assert errors == [NVME, "optimizer.type"]


@pytest.mark.parametrize("unreadable", [{}, {"steps_per_print": "often"}])
def test_the_builder_reports_both_errors(unreadable):
    pytest.importorskip("starlette")
    from zerotune.builder.forms import FormState
    from zerotune.builder.preview import understand
    from zerotune.builder.setup import Machines

    preview = understand(FormState(config={**TWICE_WRONG, **unreadable}), Machines())
    errors = [message.key for message in preview.messages if message.severity == "error"]
    assert sorted(errors) == sorted([NVME, "optimizer.type", *unreadable])


def test_a_valid_plan_is_resolved():
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    found = inspected({"zero_optimization": {"stage": 2}, "optimizer": optimizer})
    assert found.refusals == ()
    assert found.resolved is not None
    assert found.resolved.optimizer.params["lr"] == 1e-4
