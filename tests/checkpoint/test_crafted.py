"""Any content of manifests and headers gives one of our errors, before anything changes."""

from __future__ import annotations

import json
import os

from tests.checkpoint import crafted
from tests.checkpoint.refusals import Tried
from tests.support.ranks import ranks
from zerotune.checkpoint.manifest import MANIFEST

COUNT = int(os.environ.get("ZEROTUNE_CRAFTED", "40"))


@ranks(1)
def test_crafted_checkpoints_are_refused_before_anything_is_changed(tmp_path):
    found = crafted.campaign(tmp_path, seed=15, count=COUNT)
    assert found["foreign"] == []
    assert found["changed"] == []
    assert found["refused"] > COUNT // 2
    assert found["refused"] + found["loaded"] == COUNT
    assert {name: said for name, (how, said) in found["headers"].items() if how != "refused"} == {}
    assert len(found["headers"]) == 18


@ranks(1)
def test_no_manifest_leaves_an_engine_inside_an_accumulation_window(tmp_path):
    tried = Tried(str(tmp_path))
    content = json.loads((tried.good / MANIFEST).read_text())
    content["state"]["micro_step"] += 1
    crafted.sign(tried.good, content)
    tried.load(tried.good)
    state = tried.engine.state
    tried.load(tried.good)
    assert state.micro_step == 2 * state.global_step
