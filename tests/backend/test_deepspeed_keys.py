"""The keys on file are those that the installed DeepSpeed reads."""

from __future__ import annotations

import json

import pytest
from packaging.version import Version

from tests.support.ranks import ranks

pytestmark = pytest.mark.deepspeed


@ranks(1)
def test_the_keys_on_file_match_deepspeeds_code() -> None:
    from tools.deepspeed_keys import FILE, deepspeed_keys, render

    keys = deepspeed_keys()
    text = render(keys)
    on_file = FILE.read_text(encoding="utf-8")
    recorded = json.loads(on_file)
    if Version(keys["deepspeed"]) < Version(recorded["deepspeed"]):
        pytest.skip(f"the keys on file are those of DeepSpeed {recorded['deepspeed']}")
    assert text == on_file, "run python -m tools.deepspeed_keys, and look at the difference"
    assert keys["modules"]["deepspeed.runtime.config"]["param_dict"]["train_batch_size"] == {
        "name": "TRAIN_BATCH_SIZE",
        "default": None,
        "default_name": "TRAIN_BATCH_SIZE_DEFAULT",
    }
