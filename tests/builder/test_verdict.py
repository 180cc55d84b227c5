"""One verdict on a plan, and a button for everything that is wrong with it."""

from __future__ import annotations

import json

import pytest

from tests.builder.states import PLAN, state
from zerotune.builder.forms import FormState
from zerotune.builder.preview import Machines, understand
from zerotune.builder.repairs import repairs
from zerotune.plan import DeepSpeedPlan


def preview(client, **parts):
    return client.post("/api/preview", json={"state": state(**parts)}).json()


def zero(**keys):
    return {**PLAN, "zero_optimization": keys}


class TestVerdict:
    @pytest.mark.parametrize(
        ("setup", "text"),
        [
            ({}, "runs and fits"),
            ({"vram": "2"}, "runs, but does not fit: GPU"),
            ({"vram": "2", "ram": "2"}, "runs, but does not fit: GPU, RAM"),
            ({"family": ""}, "runs, memory not estimated"),
            ({"resolution": "large"}, "cannot run"),
            ({"vram": "much"}, "cannot run"),
            ({"lora": "x"}, "cannot run"),
            ({"world_size": "0"}, "cannot run"),
            ({"base_dtype": "nf4"}, "cannot run"),
        ],
    )
    def test_it_counts_findings_setup_and_fit(self, client, setup, text):
        found = preview(client, setup=setup)
        assert found["verdict"]["text"] == text
        stopped = text == "cannot run"
        assert any(each["severity"] == "error" for each in found["messages"]) == stopped
        assert found["runs"] != stopped
        assert ("running" in found["outputs"]) != stopped
        assert (found["title"] is None) == stopped

    @pytest.mark.parametrize(
        ("setup", "words"),
        [
            ({"resolution": "large"}, "1024 pixels"),
            ({"vram": "much"}, "24.00 GiB of VRAM"),
            ({"lora": "x", "world_size": "-1"}, "1 process and the whole model"),
        ],
    )
    def test_memory_says_for_what_it_is_drawn(self, client, setup, words):
        memory = preview(client, setup=setup)["memory"]
        assert memory["bars"]
        assert (
            memory["outdated"]
            == f"Estimated for {words}, because the value in the form is invalid."
        )
        assert preview(client)["memory"]["outdated"] == ""

    def test_what_cannot_run_is_not_applied(self, client_of):
        seen = []
        client = client_of(on_apply=seen.append)
        answer = client.post("/api/apply", json={"state": state(setup={"world_size": "many"})})
        assert answer.status_code == 409
        assert "setup.world_size" in answer.json()["error"]
        assert seen == []

    def test_seconds_come_with_their_rates(self, client):
        time = preview(client, setup={"card": "RTX 3090, 24 GiB"})["time"]
        assert time["rates"] == "rates catalogued, RTX 3090 (24 GiB)"
        other = preview(client, setup={"card": "RTX 4090, 24 GiB"})["time"]
        assert other["seconds"] != time["seconds"]
        assert preview(client, setup={"vram": "much"})["time"] is None


BROKEN = {
    "value": ({**PLAN, "gradient_clipping": -1}, "Write 0"),
    "name": (zero(stage=2, overlap_com=True), "Rename to overlap_comm"),
    "top level": ({**PLAN, "gradient_acumulation_steps": 2}, "Remove gradient_acumulation_steps"),
    "place": ({**PLAN, "stage3_max_live_parameters": 5}, "Rename to stage3_max_live_parameters"),
    "stage": (zero(stage=7), "Write 3"),
    "claimed": (
        zero(stage=3, cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "/s"}),
        "Remove cpu_offload",
    ),
    "nvme": (
        zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/s"}),
        "Set stage to 3",
    ),
    "ratio": (
        zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "Set offload_optimizer.ratio to 1.0",
    ),
    "parameters": (zero(stage=2, offload_param={"device": "cpu"}), "Set stage to 3"),
    "no device": (zero(stage=2, offload_optimizer={}), "Write cpu"),
    "two precisions": ({**PLAN, "fp16": {"enabled": True}}, "Set fp16.enabled to false"),
    "batch": ({**PLAN, "train_batch_size": 7}, "Set train_batch_size to 1"),
    "removed": ({**PLAN, "elasticity": {"enabled": True}}, "Remove elasticity"),
    "optimizer": ({**PLAN, "optimizer": {"type": "Adamm"}}, "Write Adam"),
    "argument": (
        {**PLAN, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decy": 0.1}}},
        "Rename to params.weight_decay",
    ),
    "elsewhere": (
        {**PLAN, "optimizer": {"type": "Prodigy"}, "zero_optimization": {"stage": 3}},
        "Set stage to 2",
    ),
    "ignored": (zero(stage=2, zero_hpz_partition_size=2), "Remove zero_hpz_partition_size"),
    "parallel": ({**PLAN, "tensor_parallel": {"autotp_size": 2}}, "Write 1"),
}


@pytest.fixture(scope="module")
def machines():
    return Machines()


class TestRepairs:
    @pytest.mark.parametrize(("config", "label"), BROKEN.values(), ids=BROKEN)
    def test_a_button_does_what_the_fix_says(self, machines, config, label):
        before = FormState.of_request(state(config))
        found = understand(before, machines)
        offered = [
            (message, repair)
            for message, each in zip(found.messages, repairs(found, before, machines), strict=True)
            for repair in each
        ]
        wrong = [one for one in found.messages if one.fix and one.severity != "note"]
        assert {message.key for message, _ in offered} >= {one.key for one in wrong}
        assert label in {repair.label for _, repair in offered}
        for message, repair in offered:
            after = FormState.of_request(state(json.loads(json.dumps(config))))
            for edit in repair.edits:
                edit.apply(after)
            left = [one for one in understand(after, machines).messages if one.severity != "note"]
            assert (message.key, message.fix) not in {(one.key, one.fix) for one in left}
            touched = {edit.to or edit.path for edit in repair.edits}
            assert not touched & {one.key for one in left if one.severity == "error"}

    def test_a_misread_fix_is_no_button(self, machines):
        # "did you mean 'gradient_clipping'": that one is written too, and would be lost.
        form = FormState.of_request(state({**PLAN, "gradient_cliping": 0.5}))
        found = understand(form, machines)
        (offered,) = filter(None, repairs(found, form, machines))
        assert [one.label for one in offered] == ["Remove gradient_cliping"]

    def test_what_is_planned_for_can_be_cleared(self, client):
        found = preview(client, setup={"vram": "much", "lora": "x"})
        labels = {
            each["key"]: [one["label"] for one in each["repairs"]]
            for each in found["messages"]
            if each["severity"] == "error"
        }
        assert labels == {"setup.vram": ["Clear vram"], "setup.lora": ["Clear lora"]}


class TestOrder:
    CONFIG = {
        "bf16": {"enabled": True},
        "_note": "ours",
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "stage": 2},
        "optimizer": {"params": {"lr": 1e-4}, "type": "AdamW"},
        "train_micro_batch_size_per_gpu": 1,
    }

    def test_what_is_applied_keeps_the_order_of_its_keys(self, client_of, root):
        file = root / "plan.json"
        file.write_text(json.dumps(self.CONFIG))
        client = client_of(plan_file=file)
        start = client.get("/api/start").json()
        assert json.dumps(start["state"]["config"]) == json.dumps(self.CONFIG)
        config = {**self.CONFIG, "bf16": {"enabled": False}, "gradient_clipping": 1.0}
        body = {"state": state(config), "version": start["version"]}
        assert client.post("/api/apply", json=body).is_success
        assert json.dumps(json.loads(file.read_text())) == json.dumps(config)

    def test_a_trainers_file_keeps_it_too(self, client_of, root):
        file = root / "config.json"
        file.write_text(json.dumps({"seed": 3, "deepspeed_config": self.CONFIG}))
        client = client_of(plan_file=file)
        start = client.get("/api/start").json()
        assert json.dumps(start["state"]["config"]) == json.dumps(self.CONFIG)
        body = {"state": start["state"], "version": start["version"]}
        assert client.post("/api/apply", json=body).is_success
        assert json.dumps(json.loads(file.read_text())["deepspeed_config"]) == json.dumps(
            self.CONFIG
        )

    def test_advice_keeps_it(self, client):
        found = client.post("/api/advise", json={"state": state(self.CONFIG)}).json()
        assert list(found["chosen"]["state"]["config"])[:5] == list(self.CONFIG)

    def test_a_plan_without_one_has_that_of_its_fields(self, root):
        DeepSpeedPlan.from_dict(self.CONFIG).save(root / "a.json")
        assert json.loads((root / "a.json").read_text()) == self.CONFIG
