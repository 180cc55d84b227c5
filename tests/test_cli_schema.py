from __future__ import annotations

import json

from tests.support.schema import schema_parameters
from zerotune.cli import main


def test_stdout_contains_only_the_schema(capsys):
    assert main(["schema"]) == 0
    parameters = {each.path for each in schema_parameters(json.loads(capsys.readouterr().out))}
    assert {"train_batch_size", "zero_optimization.stage", "aio.use_gds"} <= parameters


def test_a_file_is_written_completely(tmp_path, capsys):
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "schema.json"
    file.write_text("old")
    assert main(["schema", "-o", str(file)]) == 0
    assert file.read_text() == printed
    assert [each.name for each in tmp_path.iterdir()] == ["schema.json"]
    assert capsys.readouterr().out == ""
