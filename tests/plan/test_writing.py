from __future__ import annotations

import json
import os

import pytest

import zerotune.plan
from zerotune.errors import InvalidValueError, PlanError, PlanFileError
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.sections import LaunchSection, ZeroSection

NAMES = {name: getattr(zerotune.plan, name) for name in zerotune.plan.__all__}


@pytest.fixture
def plan(reference_a) -> DeepSpeedPlan:
    return DeepSpeedPlan.from_dict(
        {
            **reference_a,
            "flops_profiler": {"enabled": True, "note": "a" * 90, "list": list(range(40))},
            "_comment": "ünïcode",
        }
    )


def evaluated(plan):
    return eval(plan.to_python(), dict(NAMES))


class TestPython:
    def test_python_code_of_a_plan_evaluates_to_an_equal_plan(self, plan):
        assert evaluated(plan) == plan
        assert evaluated(plan).to_deepspeed() == plan.to_deepspeed()

    def test_python_code_contains_launch_settings_and_extra_keys(self):
        plan = DeepSpeedPlan(
            zero_optimization=ZeroSection(stage=3, extra={"zenflow": {"topk_ratio": 0.1}}),
            launch=LaunchSection(num_processes=2, extra={"gpu_ids": "all"}),
        )
        assert evaluated(plan) == plan
        assert evaluated(plan).launch == plan.launch

    def test_python_code_breaks_long_lines_where_possible(self, plan):
        lines = plan_document(plan, "python").text.splitlines()
        assert max(len(line) for line in lines if "aaaa" not in line) <= 100

    def test_a_script_imports_the_names_it_uses(self, plan):
        namespace: dict[str, object] = {}
        exec(plan_document(plan, "python").text, namespace)
        assert namespace["plan"] == plan


class TestSave:
    @pytest.mark.parametrize("name", ["ds.json", "ds.yaml", "ds.yml", "ds"])
    def test_a_saved_plan_reads_back_equal(self, plan, tmp_path, name):
        saved = plan.save(tmp_path / name)
        assert saved.paths == (tmp_path / name,)
        assert saved.backups == ()
        assert DeepSpeedPlan.load(tmp_path / name) == plan
        assert [file.name for file in tmp_path.iterdir()] == [name]

    def test_running_a_script_builds_the_plan(self, plan, tmp_path):
        plan.save(str(tmp_path / "ds.py"))
        namespace: dict[str, object] = {}
        exec((tmp_path / "ds.py").read_text(), namespace)
        assert namespace["plan"] == plan

    def test_saving_over_a_file_keeps_a_backup(self, plan, tmp_path):
        file = tmp_path / "ds.json"
        file.write_text("// mine\n{}")
        saved = plan.save(file)
        assert saved.backups == (tmp_path / "ds.json.bak",)
        assert (tmp_path / "ds.json.bak").read_text() == "// mine\n{}"

    def test_saving_the_same_plan_again_keeps_the_earlier_backup(self, plan, tmp_path):
        file = tmp_path / "ds.json"
        file.write_text("{}")
        plan.save(file)
        before = file.stat().st_mtime_ns
        assert plan.save(file).backups == ()
        assert (tmp_path / "ds.json.bak").read_text() == "{}"
        assert file.stat().st_mtime_ns == before

    def test_a_failed_save_leaves_only_the_old_file(self, plan, tmp_path, monkeypatch):
        file = tmp_path / "ds.json"
        file.write_text("{}")

        def refuse(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(PlanFileError, match="No space left"):
            plan.save(file)
        assert [each.name for each in tmp_path.iterdir()] == ["ds.json"]
        assert file.read_text() == "{}"

    def test_an_unknown_format_lists_the_known_ones(self, plan, tmp_path):
        with pytest.raises(InvalidValueError, match="'deepspeed', 'accelerate'"):
            plan.save(tmp_path / "ds.toml", format="toml")
        assert not list(tmp_path.iterdir())

    def test_launcher_settings_are_written_or_reported_as_lost(self, tmp_path):
        plan = DeepSpeedPlan(
            train_batch_size=4,
            launch=LaunchSection(
                distributed_type="DEEPSPEED", num_processes=2, mixed_precision="bf16"
            ),
        )
        with pytest.raises(InvalidValueError, match=r"lossy=\['num_processes'\]") as caught:
            plan.save(tmp_path / "ds.json")
        assert caught.value.key == "launch.num_processes"
        assert not list(tmp_path.iterdir())
        saved = plan.save(tmp_path / "ds.json", lossy=["num_processes"])
        assert [(d.key, d.severity) for d in saved.decisions] == [
            ("launch.mixed_precision", "note"),
            ("launch.num_processes", "warning"),
        ]
        written = json.loads((tmp_path / "ds.json").read_text())
        assert written == {"train_batch_size": 4, "bf16": {"enabled": True}}

    @pytest.mark.parametrize(
        ("lossy", "close"),
        [(["num_proceses"], "num_processes"), (["bogus"], "gpu_ids"), ("launch.gpu_id", "gpu_ids")],
    )
    def test_a_name_in_lossy_that_is_not_a_launch_setting_is_an_error(self, plan, lossy, close):
        with pytest.raises(InvalidValueError, match="is not a launch setting") as caught:
            plan_document(plan, lossy=lossy)
        assert caught.value.key == "lossy"
        assert close in caught.value.fix

    def test_accelerates_json_is_not_overwritten_in_another_format(self, plan, tmp_path):
        file = tmp_path / "default_config.json"
        file.write_text('{"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}')
        with pytest.raises(PlanFileError, match="accelerate's settings"):
            plan.save(file)


class TestTrainer:
    def save(self, plan, tmp_path, content):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(content))
        return plan.save(file), json.loads(file.read_text())

    @pytest.mark.parametrize("key", ["deepspeed_config", "--deepspeed_config", "deepspeed"])
    @pytest.mark.parametrize("form", ["object", "text", "path"])
    def test_the_form_of_the_configuration_and_all_other_keys_are_kept(
        self, plan, tmp_path, key, form
    ):
        (tmp_path / "ds.json").write_text("{}")
        inner = {"object": {}, "text": "{}", "path": "ds.json"}[form]
        saved, content = self.save(plan, tmp_path, {"--seed": 3, key: inner, "--lr": 1e-5})
        assert saved.format == "trainer"
        assert list(content) == ["--seed", key, "--lr"]
        assert (content["--seed"], content["--lr"]) == (3, 1e-5)
        assert isinstance(content[key], dict if form == "object" else str)
        if form == "path":
            assert content[key] == "ds.json"
            assert saved.paths == (tmp_path / "ds.json", tmp_path / "config.json")
            assert saved.backups == (tmp_path / "ds.json.bak",)
            assert json.loads((tmp_path / "ds.json").read_text()) == plan.to_deepspeed()
        assert DeepSpeedPlan.from_json(tmp_path / "config.json") == plan

    def test_a_new_trainers_file_holds_the_plan_as_an_object(self, plan, tmp_path):
        saved = plan.save(tmp_path / "config.json", format="trainer")
        assert saved.decisions == ()
        assert json.loads((tmp_path / "config.json").read_text()) == {
            "deepspeed_config": plan.to_deepspeed()
        }

    def test_equal_settings_beside_the_plan_are_written_back_unchanged(self, tmp_path):
        content = {
            "--deepspeed_config": {"zero_optimization": {"stage": 2}},
            "--mixed_precision": "no",
            "--max_grad_norm": 0.5,
            "--gradient_accumulation_steps": "4",
        }
        file = tmp_path / "config.json"
        file.write_text(json.dumps(content))
        plan = DeepSpeedPlan.from_json(file)
        plan.save(file)
        assert json.loads(file.read_text()) == {**content, "--gradient_accumulation_steps": 4}
        assert DeepSpeedPlan.from_json(file) == plan

    def test_settings_beside_the_plan_are_updated_where_they_differ(self, tmp_path):
        plan = DeepSpeedPlan(launch=LaunchSection(mixed_precision="bf16", gradient_clipping=0.5))
        content = {"--deepspeed_config": {}, "--mixed_precision": "no"}
        saved, content = self.save(plan, tmp_path, content)
        assert content["--mixed_precision"] == "bf16"
        assert content["--max_grad_norm"] == 0.5
        assert [(d.key, d.before, d.after) for d in saved.decisions] == [
            ("--mixed_precision", "no", "bf16")
        ]

    def test_settings_that_the_plan_does_not_set_are_kept(self, plan, tmp_path):
        _, content = self.save(plan, tmp_path, {"deepspeed_config": {}, "mixed_precision": "bf16"})
        assert content["mixed_precision"] == "bf16"

    def test_comments_survive_only_in_the_backup_with_a_warning(self, plan, tmp_path):
        file = tmp_path / "config.json"
        file.write_text('{"deepspeed_config": {}, "seed": 3} // mine')
        saved = plan.save(file)
        assert [d.severity for d in saved.decisions] == ["warning"]
        assert "// mine" in saved.backups[0].read_text()

    def test_a_missing_named_file_is_not_created(self, plan, tmp_path):
        file = tmp_path / "config.json"
        file.write_text('{"deepspeed_config": "missing.json"}')
        with pytest.raises(PlanFileError, match="missing"):
            plan.save(file)
        assert [each.name for each in tmp_path.iterdir()] == ["config.json"]

    @pytest.mark.parametrize("text", ["[]", "{", "\xff"])
    def test_a_file_that_is_not_a_trainers_is_refused_and_kept(self, plan, tmp_path, text):
        file = tmp_path / "config.json"
        file.write_text(text, encoding="latin-1")
        with pytest.raises(PlanError):
            plan.save(file, format="trainer")
        assert file.read_text(encoding="latin-1") == text
