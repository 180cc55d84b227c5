from __future__ import annotations

import json

from tests.support.schema import schema_parameters
from zerotune.cli import main


def test_stdout_contains_only_the_schema(capsys):
    assert main(["schema"]) == 0
    parameters = {each.path for each in schema_parameters(json.loads(capsys.readouterr().out))}
    assert {"train_batch_size", "zero_optimization.stage", "aio.use_gds"} <= parameters
