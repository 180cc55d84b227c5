from __future__ import annotations

import json
import os

import pytest

from zerotune.errors import InvalidValueError, PlanFileError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.sections import LaunchSection


@pytest.fixture
def plan(reference_a) -> DeepSpeedPlan:
    return DeepSpeedPlan.from_dict(
        {
            **reference_a,
            "flops_profiler": {"enabled": True, "note": "a" * 90, "list": list(range(40))},
            "_comment": "ünïcode",
        }
    )


class TestSave:
    @pytest.mark.parametrize("name", ["ds.json", "ds.yaml", "ds.yml", "ds"])
    def test_a_saved_plan_reads_back_equal(self, plan, tmp_path, name):
        saved = plan.save(tmp_path / name)
        assert saved.paths == (tmp_path / name,)
        assert saved.backups == ()
        assert DeepSpeedPlan.load(tmp_path / name) == plan
        assert [file.name for file in tmp_path.iterdir()] == [name]

    @pytest.mark.parametrize("name", ["ds.toml", "ds.py"])
    def test_a_plan_is_not_written_to_a_file_of_another_format(self, plan, tmp_path, name):
        with pytest.raises(PlanFileError, match=r"name the file ds\.json or ds\.yaml"):
            plan.save(tmp_path / name)
        assert list(tmp_path.iterdir()) == []

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

    @pytest.mark.parametrize("beside", ['"distributed_type": "DEEPSPEED"', '"--seed": 3'])
    def test_a_file_with_other_settings_is_not_overwritten(self, plan, tmp_path, beside):
        file = tmp_path / "config.json"
        file.write_text(f'{{{beside}, "deepspeed_config": {{}}}}')
        with pytest.raises(PlanFileError, match="other settings") as caught:
            plan.save(file)
        assert "name it under deepspeed_config" in caught.value.fix
        assert beside in file.read_text()
