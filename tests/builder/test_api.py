"""The page's API: what it returns and what it allows."""

from __future__ import annotations

import json
import re

import pytest

from tests.builder.states import PLAN, state
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.write import launchable


def preview(client, **parts):
    return client.post("/api/preview", json={"state": state(**parts)}).json()


def messages(found, key):
    return [message for message in found["messages"] if message["key"] == key]


class TestPreview:
    def test_all_output_formats_hold_the_same_plan(self, client, root):
        found = preview(client)
        assert json.loads(found["outputs"]["json"]["text"]) == PLAN
        plan = DeepSpeedPlan.from_dict(PLAN)
        for name, output, said in (
            ("a.json", "json", plan), ("a.yaml", "yaml", launchable(plan)),
        ):  # fmt: skip
            (root / name).write_text(found["outputs"][output]["text"])
            assert DeepSpeedPlan.load(root / name) == said
        running = json.loads(found["outputs"]["running"]["text"])
        assert running["train_batch_size"] == 1
        assert running["optimizer"]["params"]["betas"] == [0.9, 0.999]

    def test_a_finding_appears_at_its_key(self, client):
        config = {**PLAN, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
        found = preview(client, config=config)
        (message,) = messages(found, "zero_optimization.offload_param")
        assert message["severity"] == "warning"
        assert "stage to 3" in message["text"] + message["fix"]

    def test_one_error_does_not_hide_another(self, client):
        config = {
            **PLAN,
            "gradient_clipping": -1,
            "train_micro_batch_size_per_gpu": 0,
            "zero_optimization": {"stage": 7, "overlap_com": True},
        }
        found = preview(client, config=config, setup={"vram": "much"})
        assert found["valid"] is False
        assert {message["key"] for message in found["messages"]} == {
            "setup.vram",
            "gradient_clipping",
            "train_micro_batch_size_per_gpu",
            "zero_optimization.stage",
            "zero_optimization.overlap_com",
        }

    def test_memory_is_measured_against_the_chosen_machine(self, client):
        bars = {bar["place"]: bar for bar in preview(client)["memory"]["bars"]}
        assert bars["device"]["available"] == 24 * 2**30
        assert bars["device"]["fits"]
        parts = sum(part["nbytes"] for part in bars["device"]["components"])
        assert parts == bars["device"]["needed"]
        small = preview(client, setup={"vram": "6", "ram": "32 GiB"})["memory"]["bars"]
        assert [bar["fits"] for bar in small[:2]] == [False, False]

    def test_memory_is_not_estimated_without_a_family(self, client):
        assert "family" in preview(client, setup={"family": ""})["memory"]["reason"]

    def test_optimizers_that_cannot_run_have_a_reason(self, client):
        found = {each["name"]: each for each in preview(client)["optimizers"]}
        assert found["AdamW"]["runs"]
        assert found["Prodigy"]["runs"]
        three = {**PLAN, "zero_optimization": {"stage": 3}}
        at_three = preview(client, config=three)["optimizers"]
        prodigy = {each["name"]: each for each in at_three}["Prodigy"]
        assert not prodigy["runs"]
        assert "sub-group" in prodigy["reason"]
        assert prodigy["alternative"] == "Prodigy at stage 2"

    def test_an_automatic_learning_rate_is_reported_and_kept(self, client):
        config = {**PLAN, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
        found = preview(client, config=config)
        assert found["runs"]
        assert any("run does not set" in m["text"] for m in messages(found, "optimizer.params.lr"))
        assert json.loads(found["outputs"]["json"]["text"]) == config

    def test_a_reason_is_stated_only_once(self, client):
        found = preview(
            client, config={**PLAN, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
        )
        reason = "DeepSpeed's own version chooses parameters by name"
        assert sum(reason in one["text"] for one in found["messages"]) == 1
        (other,) = messages(found, "zero_force_ds_cpu_optimizer")
        assert "see the reason given at zero_allow_untested_optimizer" in other["text"]

    def test_missing_packages_are_reported_before_an_optimizer_is_chosen(self, client, monkeypatch):
        monkeypatch.setattr("zerotune.builder.preview.installed_packages", lambda: {"prodigyopt"})
        found = {each["name"]: each["missing"] for each in preview(client)["optimizers"]}
        assert found["AdamW8bit"] == "bitsandbytes"
        assert found["TorchAOAdamW8bit"] == "torchao"
        assert found["Prodigy"] is None
        assert found["AdamW"] is None


class TestOpen:
    def open(self, client, **body):
        return client.post("/api/open", json=body)

    def test_an_invalid_configuration_opens_for_repair(self, client):
        broken = {**PLAN, "train_batch_sise": 4, "zero_optimization": {"stage": "two"}}
        opened = self.open(client, text=json.dumps(broken)).json()
        assert opened["state"]["config"] == broken
        assert [one["severity"] for one in opened["messages"]] == ["error", "error"]
        assert {one["key"] for one in opened["messages"]} == {
            "train_batch_sise", "zero_optimization.stage",
        }  # fmt: skip

    def test_opening_a_trainers_file_opens_the_configuration_it_names(self, client, root):
        (root / "ds.json").write_text(json.dumps(PLAN))
        (root / "config.json").write_text(
            json.dumps({"deepspeed_config": "ds.json", "mixed_precision": "bf16"})
        )
        opened = self.open(client, path="config.json").json()
        assert opened["state"]["config"] == PLAN
        assert opened["state"]["launch"] == {"mixed_precision": "bf16"}

    def test_an_accelerate_yaml_sets_the_number_of_processes(self, client):
        text = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n"
        opened = self.open(client, text=text).json()
        assert opened["state"]["config"]["zero_optimization"]["stage"] == 3
        assert opened["state"]["setup"]["world_size"] == 4

    def test_the_yaml_has_the_number_of_processes_of_the_machine_panel(self, client):
        state = {"config": PLAN, "setup": {"world_size": 2}}
        shown = client.post("/api/preview", json={"state": state}).json()["outputs"]["yaml"]["text"]
        assert "num_processes: 2\n" in shown


class TestApplyAndSave:
    def test_a_callback_receives_the_plan(self, client_of):
        seen = []

        def use(plan):
            seen.append(plan)
            return "Restarting with it."

        client = client_of(on_apply=use)
        answer = client.post("/api/apply", json={"state": state()})
        assert answer.json()["answer"] == "Restarting with it."
        assert seen == [DeepSpeedPlan.from_dict(PLAN)]

    def test_an_error_in_a_callback_is_reported(self, client_of):
        def fail(plan):
            raise RuntimeError("the trainer is busy")

        answer = client_of(on_apply=fail).post("/api/apply", json={"state": state()})
        assert answer.status_code == 502
        assert "the trainer is busy" in answer.json()["error"]

    def test_a_plan_that_cannot_run_is_not_applied(self, client_of):
        seen = []
        client = client_of(on_apply=seen.append)
        config = {**PLAN, "optimizer": {"type": "Adamm"}}
        answer = client.post("/api/apply", json={"state": state(config)})
        assert answer.status_code == 409
        assert seen == []

    def test_a_trainers_file_is_not_overwritten(self, client_of, root):
        file = root / "config.json"
        file.write_text(json.dumps({"--seed": 3, "--deepspeed_config": {"train_batch_size": 2}}))
        client = client_of(plan_file=file)
        start = client.get("/api/start").json()
        assert start["state"]["config"] == {"train_batch_size": 2}
        body = {"state": state(), "version": start["version"]}
        assert (
            "name it under --deepspeed_config" in client.post("/api/apply", json=body).json()["fix"]
        )
        assert json.loads(file.read_text())["--seed"] == 3

    def test_a_second_tab_does_not_overwrite_the_first(self, client_of, root):
        client = client_of(plan_file=root / "plan.json")
        first = second = client.get("/api/start").json()["version"]
        other = state({**PLAN, "gradient_clipping": 0.1})
        assert client.post("/api/apply", json={"state": other, "version": first}).is_success
        answer = client.post("/api/apply", json={"state": state(), "version": second})
        assert answer.status_code == 409
        assert json.loads((root / "plan.json").read_text())["gradient_clipping"] == 0.1
        assert client.post("/api/apply", json={"state": state(), "version": None}).is_success

    def test_the_suffix_of_a_saved_file_chooses_its_format(self, client, root):
        for name in ("a.json", "a.yaml", "new/folder/b.json"):
            body = {"path": name, "state": state()}
            assert client.post("/api/save", json=body).is_success, name
        assert (root / "a.yaml").read_text().startswith("distributed_type: DEEPSPEED")
        assert DeepSpeedPlan.load(root / "new/folder/b.json") == DeepSpeedPlan.from_dict(PLAN)
        assert not list(root.rglob("*.draft"))

    def test_a_broken_plan_file_is_reported_and_not_overwritten(self, client_of, root):
        file = root / "plan.json"
        file.write_text('{"train_batch_size": }')
        client = client_of(plan_file=file)
        start = client.get("/api/start").json()
        assert "line 1" in start["messages"][0]["text"]
        assert file.read_text() == '{"train_batch_size": }'


class TestAdvise:
    def test_runners_up_come_with_their_form_states(self, client):
        found = client.post("/api/advise", json={"state": state(setup={"vram": "12"})}).json()
        assert found["fits"]
        assert found["chosen"]["title"] == "ZeRO-2, optimizer in host memory"
        assert found["runners_up"]
        assert found["rejected"]
        every = [found["chosen"], *found["runners_up"], *found["rejected"]]
        assert sum(each["foremost"] for each in every) == 5
        assert found["chosen"]["foremost"]
        predicted = found["chosen"]["predicted"]
        assert re.fullmatch(r"\d+\.\d\d s|\d+\.\d ms", predicted["seconds"])
        assert predicted["rates"].startswith("rates catalogued for RTX 4070 (12 GiB)")
        for each in (found["chosen"], *found["runners_up"]):
            shown = client.post("/api/preview", json={"state": each["state"]}).json()
            assert all(bar["fits"] for bar in shown["memory"]["bars"]), each["title"]
            assert each["state"]["config"]["optimizer"] == PLAN["optimizer"]

    def test_the_nearest_plan_is_returned_when_nothing_fits(self, client):
        found = client.post("/api/advise", json={"state": state(setup={"vram": "1"})}).json()
        assert not found["fits"]
        assert found["nearest"]["shortfalls"]["device"] > 0

    def test_an_optimizer_that_runs_only_with_streamed_weights_is_advised(self, client):
        config = {**PLAN, "optimizer": {"type": "AdamW8BitStates"}}
        found = client.post("/api/advise", json={"state": state(config)}).json()
        assert found["chosen"]["streamed"]
        assert found["runners_up"] == found["rejected"] == []


@pytest.mark.parametrize("name", ["a" * 300, "x/" + "b" * 300 + ".json", "c/" * 3000])
def test_an_overlong_name_is_refused(client, name):
    start = client.get("/api/start").json()["state"]
    for answer in (
        client.post("/api/open", json={"path": name}),
        client.post("/api/save", json={"path": name, "state": start}),
    ):
        assert 400 <= answer.status_code < 500, answer.text


def test_the_page_can_be_read_without_scripts(client_of, root):
    config = {
        **PLAN,
        "gradient_clipping": -1,
        "optimizer": {"type": "Lion", "params": {"lr": 3e-5}},
    }
    (root / "plan.json").write_text(json.dumps(config))
    text = client_of(plan_file=root / "plan.json").get("/").text
    assert "Cannot run." in text
    assert re.search(r'id="config-gradient-clipping" type="text" value="-1"', text)
    assert re.search(r'id="config-gradient-clipping-messages"><div class="message"', text)
    assert re.search(r'<option value="Lion"[^>]* selected', text)
    assert 'value="3e-05"' in text
    (root / "plan.json").write_text(json.dumps(PLAN))
    assert "Runs and fits." in client_of(plan_file=root / "plan.json").get("/").text


def test_no_text_of_a_configuration_is_read_as_markup(client, client_of, root):
    mark = '"><img src=x onerror=alert(1)>'
    params = {"lr": 1e-4, mark: mark}
    config = {**PLAN, mark: mark, "optimizer": {"type": mark, "params": params}}
    opened = [{"severity": "note", "key": mark, "text": mark, "fix": mark, "change": mark}]
    (root / "plan.json").write_text(json.dumps(config))
    sent = {"state": state(config), "opened": opened}
    html = client.post("/api/preview", json=sent).json()["html"]
    for text in (html, client_of(plan_file=root / "plan.json").get("/").text):
        assert "img src=x" in text
        assert "<img src=x" not in text
