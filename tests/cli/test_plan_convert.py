from __future__ import annotations

import json

import pytest

from tests.plan.accelerate_runs import launcher_refuses
from zerotune import cli
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.write import launchable

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/mnt/a"}},
}
YAML = "{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 2}}"
SHARED = (
    "{distributed_type: DEEPSPEED, num_processes: 2,"
    " deepspeed_config: {train_batch_size: 8, zero_optimization: {stage: 2}}}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "a.yaml").write_text(YAML)
    return tmp_path


def test_the_printed_and_the_written_plan_are_the_same(folder, capsys):
    plan = DeepSpeedPlan.load("ds.json")
    assert cli.main(["plan", "convert", "ds.json", "--to", "deepspeed"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert cli.main(["plan", "convert", "ds.json", "--to", "deepspeed", "-o", "x.json"]) == 0
    assert (folder / "x.json").read_text() == printed.out
    assert DeepSpeedPlan.load("x.json") == plan
    assert capsys.readouterr().err == "zerotune: wrote x.json\n"


def test_an_accelerate_yaml_states_its_number_of_processes(folder, capsys):
    assert cli.main(["plan", "convert", "ds.json", "--to", "accelerate", "-o", "x.yaml"]) == 0
    assert "launch.num_processes: unset -> 1 (accelerate launch" in capsys.readouterr().err
    plan = DeepSpeedPlan.load("ds.json")
    assert DeepSpeedPlan.load("x.yaml") == launchable(plan)
    asked = ["--num-processes", "4"]
    assert cli.main(["plan", "convert", "ds.json", "--to", "accelerate", *asked]) == 0
    assert "num_processes: 4\n" in capsys.readouterr().out
    assert cli.main(["plan", "convert", "a.yaml", "--to", "accelerate", *asked]) == 0
    assert "num_processes: 2\n" in capsys.readouterr().out, "what the file says stays"


@pytest.mark.deepspeed
@pytest.mark.parametrize("around", ["num_processes: -1", "gpu_ids: 0", "gpu_ids: [0, 1]"])
def test_a_file_that_accelerate_rejects_becomes_one_that_it_starts(folder, around):
    text = f"{{distributed_type: deepspeed, {around}, deepspeed_config: {{zero_stage: 2}}}}"
    (folder / "rejected.yaml").write_text(text)
    assert launcher_refuses("rejected.yaml")
    assert cli.main(["plan", "convert", "rejected.yaml", "--to", "accelerate", "-o", "x.yaml"]) == 0
    assert not launcher_refuses("x.yaml")


def test_settings_that_the_format_cannot_hold_are_refused_unless_they_are_named(folder, capsys):
    (folder / "a.yaml").write_text(SHARED)
    assert cli.main(["plan", "convert", "a.yaml", "--to", "deepspeed", "-o", "x.json"]) == 2
    assert "--lossy num_processes" in capsys.readouterr().err
    assert not (folder / "x.json").exists()
    named = ["--lossy", "num_processes,gpu_ids"]
    assert cli.main(["plan", "convert", "a.yaml", "--to", "deepspeed", *named]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    assert "zerotune: [warning] launch.num_processes: 2 -> unset" in printed.err


def test_an_invalid_plan_gives_status_2_and_writes_nothing(folder, capsys):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 9}}')
    assert cli.main(["plan", "convert", "ds.json", "--to", "accelerate", "-o", "x.yaml"]) == 2
    assert "zero_optimization.stage = 9" in capsys.readouterr().err
    assert not (folder / "x.yaml").exists()
