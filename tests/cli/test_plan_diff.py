from __future__ import annotations

import json

import pytest

from zerotune import cli

BEFORE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


@pytest.fixture
def differ(tmp_path, monkeypatch, capsys):
    """Return a function that compares a plan with ``BEFORE`` and returns exit status and output."""
    monkeypatch.chdir(tmp_path)

    def run(after, *options):
        for name, config in (("before.json", BEFORE), ("after.json", after)):
            (tmp_path / name).write_text(json.dumps(config))
        status = cli.main(["plan", "diff", "before.json", "after.json", *options])
        return status, capsys.readouterr().out

    return run


def test_equal_plans_give_status_0(differ):
    assert differ(BEFORE) == (0, "before.json -> after.json: no difference\n")


def test_each_differing_setting_has_a_line(differ):
    after = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    status, out = differ(after)
    assert status == 1
    assert out.splitlines() == [
        "before.json -> after.json: 2 differences",
        "  ~ zero_optimization.stage: 2 -> 3",
        "  + gradient_clipping: 1.0",
    ]
    status, out = differ(after, "--json")
    assert (status, len(json.loads(out)["changes"])) == (1, 2)


def test_files_in_different_formats_are_compared_by_their_meaning(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(BEFORE))
    (tmp_path / "b.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: a.json}\n"
    )
    assert cli.main(["plan", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.yaml")]) == 1
    assert "zero_optimization" not in capsys.readouterr().out


def test_an_error_names_the_file_that_has_it(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(BEFORE))
    (tmp_path / "b.json").write_text(json.dumps({**BEFORE, "train_batch_size": 0}))
    assert cli.main(["plan", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "b.json has errors" in first
    assert second.startswith("error: train_batch_size = 0")
