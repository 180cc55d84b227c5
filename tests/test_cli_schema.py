from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.schema import schema_parameters
from zerotune.backend import schema
from zerotune.cli import main


@pytest.mark.deepspeed
def test_stdout_contains_only_the_schema_and_nothing_is_built(tmp_path):
    inherited = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-m", "zerotune", "schema"],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parameters = {each.path for each in schema_parameters(json.loads(done.stdout))}
    assert {"train_batch_size", "zero_optimization.stage", "aio.use_gds"} <= parameters
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_completely(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schema, "plan_schema", lambda: {"type": "object"})
    file = tmp_path / "schema.json"
    file.write_text("old")
    assert main(["schema", "-o", str(file)]) == 0
    assert json.loads(file.read_text()) == {"type": "object"}
    assert [each.name for each in tmp_path.iterdir()] == ["schema.json"]
    assert capsys.readouterr().out == ""
