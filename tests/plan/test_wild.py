"""Published configurations: zerotune reads them as DeepSpeed and accelerate do, and says the rest.

``tests/plan/wild`` holds the files and the verdicts of DeepSpeed and accelerate.
"""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest

from tests.plan.test_conversions import assert_every_way, runs
from tests.plan.wild import judge
from zerotune import cli
from zerotune.errors import ZeroTuneError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.keys import PLACES as BLOCK_PLACES
from zerotune.plan.sections import ZeroSection
from zerotune.plan.source import TRAINER_KEYS
from zerotune.plan.trainer import _PLACES

WILD = judge.configurations()
VERDICTS = json.loads(judge.VERDICTS.read_text(encoding="utf-8"))

STRICTER = {
    "demos.json": "DeepSpeed ignores unknown keys in silence",
    "factory-fp8.json": "DeepSpeed ignores unknown keys in silence",
    "factory-nodes.yaml": "DeepSpeed ignores unknown keys in silence",
    "sd-lora-trainer.json": "a trainer's file, of which DeepSpeed reads the batch size alone",
    "taehv.yaml": "accelerate discards keys of zero_optimization in its block in silence",
    "ttsflow.yaml": "PyYAML keeps the second of two equal keys in silence",
}
"""Files that zerotune refuses and DeepSpeed or accelerate accepts, and why."""
LAXER = {
    "mini-llada.json": "only transformers' trainer fills these arguments of the optimizer",
    "poetry-diffusion.json": "a trainer's file that turns DeepSpeed off is stage 0, with a warning",
}
"""Files that zerotune reads and DeepSpeed or accelerate refuses, and why."""


@pytest.fixture
def file(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return judge.placed(request.param, tmp_path)


def each(*names):
    return pytest.mark.parametrize("file", names or sorted(WILD), indirect=True)


def accepted(says):
    """Whether DeepSpeed or accelerate trains with DeepSpeed from a file."""
    reads = judge.ACCEPTED in (says.get("deepspeed"), says.get("runs"))
    return reads and says.get("schedule", judge.ACCEPTED) == judge.ACCEPTED


def test_there_are_at_least_60_files_that_differ():
    different = {json.dumps(wild.get("content", wild.get("text"))) for wild in WILD.values()}
    assert len(different) == len(WILD) >= 60
    assert VERDICTS.keys() - {"accelerate", "deepspeed"} == WILD.keys()


@pytest.mark.nightly
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_the_verdicts_are_those_of_the_installed_versions(tmp_path):
    assert judge.judged(tmp_path) == VERDICTS


@each()
def test_plan_check_accepts_what_they_accept(file, capsys):
    says = VERDICTS[file.name]
    passes = cli.main(["plan", "check", file.name]) == 0
    said = capsys.readouterr().out
    if file.name in STRICTER:
        assert (passes, accepted(says)) == (False, True)
    elif file.name in LAXER:
        assert (passes, accepted(says)) == (True, False)
    elif says.get("starts") in ("several processes", "one process"):
        assert "without DeepSpeed" in said
    else:
        assert passes == accepted(says), said


def leaves(node, path=""):
    """Yield path and value of each setting that is not empty."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}")
    elif node not in (None, {}, []):
        yield path, node


def names_in_a_plan(key):
    """Return the names that a plan may give to a key of a file."""
    places = (key, TRAINER_KEYS.get(key, key), ZeroSection.aliases.get(key, key))
    paths = (*places, BLOCK_PLACES.get(key, key), *_PLACES.get(key, ()))
    return {path.rpartition(".")[2] for path in paths}


@each()
def test_each_setting_is_kept_or_reported(file):
    with contextlib.suppress(ZeroTuneError):
        plan = DeepSpeedPlan.load(file)
        launch = plan.launch.to_dict() if plan.launch else {}
        kept = [*leaves(plan.to_dict()), *leaves(launch)]
        reported = str(plan.decisions)
        if launch.get("mixed_precision"):
            reported += "bf16 fp16"  # the flags of a trainer
        for path, value in leaves(WILD[file.name]["content"]):
            key = path.rpartition(".")[2]
            values = [one for where, one in kept if where.split(".")[-1] in names_in_a_plan(key)]
            lists = [one for one in values if isinstance(one, list)]
            assert value in [*values, *itertools.chain(*lists)] or key in reported, (path, value)


@each()
def test_a_converted_file_trains_the_same(file):
    with contextlib.suppress(ZeroTuneError):
        plan = DeepSpeedPlan.load(file)
        assert_every_way(runs(plan), plan)
