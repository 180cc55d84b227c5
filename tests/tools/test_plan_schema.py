"""The stored schema describes DeepSpeed's keys, and zerotune's knowledge of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.ranks import run_ranks
from tests.support.schema import known_paths, schema_parameters
from zerotune.errors import UnknownKeyError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan import keys as known_keys
from zerotune.plan.schema import whole_schema
from zerotune.plan.section import Nested, modelled
from zerotune.plan.sections import OffloadSection

GOLDEN = sorted((Path(__file__).parents[1] / "plan" / "golden").glob("*.json"))

# Keys that zerotune knows but this DeepSpeed does not read, with the reason.
NOT_DEEPSPEEDS = {
    "allgather_size": "read with the boolean zero_optimization of old files only",
    "data_parallel_size": "written by old files; nothing reads it",
    **dict.fromkeys(known_keys.REMOVED, "removed in 0.19"),
    **{f"zero_optimization.{key}": "removed in 0.19" for key in known_keys.REMOVED_ZERO},
}


def make():
    from tools.plan_schema import FILE, plan_schema, render

    return render(plan_schema()), FILE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def schema():
    return json.loads(whole_schema())


@pytest.mark.deepspeed
def test_the_file_is_that_of_the_installed_deepspeed():
    needs("sphinx")
    made, file = run_ranks(make)[0]
    assert made == file, "run python -m tools.plan_schema, and look at the difference"


@pytest.fixture(scope="module")
def parameters(schema):
    return {parameter.path: parameter for parameter in schema_parameters(schema)}


@pytest.fixture(scope="module")
def validator(schema):
    jsonschema = needs("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def paths(cls, prefix=""):
    """Yield every key that zerotune models or passes through."""
    for attribute in modelled(cls):
        path = f"{prefix}{attribute.name}"
        kind = attribute.metadata["kind"]
        yield path
        if isinstance(kind, Nested):
            inside = (found for found in paths(kind.cls, f"{path}."))
            absent = {f"{path}.{name}" for name in kind.without}
            yield from (found for found in inside if found not in absent)
    yield from (f"{prefix}{name}" for name in cls.passed_through)


def test_every_key_zerotune_knows_is_in_the_schema(parameters):
    known = set(paths(DeepSpeedPlan))
    # Only one of the two offload sections has SuperOffload's keys.
    known -= {f"zero_optimization.offload_param.{key}" for key in known_keys.OFFLOAD}
    missing = known - parameters.keys()
    assert missing <= NOT_DEEPSPEEDS.keys()


def test_a_parameter_has_type_default_meaning_and_stages(parameters):
    bucket = parameters["zero_optimization.reduce_bucket_size"]
    assert bucket.types == ("integer", "string")
    assert bucket.default == 500_000_000
    assert bucket.doc == "Elements reduced at a time."
    assert (bucket.modelled, bucket.stages, bucket.deprecated) == (True, (1, 2, 3), False)
    assert parameters["zero_optimization.sub_group_size"].stages == (3,)
    assert parameters["zero_optimization.offload_param"].stages == (3,)
    legacy = parameters["zero_optimization.cpu_offload"]
    assert (legacy.deprecated, legacy.replaced_by) == (True, "offload_optimizer")
    passed = parameters["zero_optimization.leaf_module.names"]
    assert (passed.modelled, passed.default, passed.types) == (False, [], ("array", "string"))
    assert parameters["compile.deepcompile"].doc == "Turn on/off the DeepCompile mode"
    assert parameters["train_batch_size"].types == ("integer", "string")
    assert parameters["gradient_clipping"].default == 1.0
    assert parameters["aio.queue_depth"].default == 8


def test_every_modelled_key_is_documented(parameters):
    silent = {p.path for p in parameters.values() if p.modelled and not p.doc}
    assert silent <= {"optimizer.type", "scheduler.type"}


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_rendered_configurations_are_valid(file, validator):
    assert list(validator.iter_errors(json.loads(file.read_text()))) == []


@pytest.mark.parametrize(
    ("place", "value", "at"),
    [
        (("train_batch_size",), 0.5, "$.train_batch_size"),
        (("train_batch_size",), 0, "$.train_batch_size"),
        (("zero_optimization", "stage"), 4, "$.zero_optimization.stage"),
        (("zero_optimization", "stage"), "two", "$.zero_optimization.stage"),
        (("zero_optimization", "reduce_bucket"), 3, "$.zero_optimization"),
        (("zero_optimization", "overlap_comm"), 3, "$.zero_optimization.overlap_comm"),
        (("bf16", "enabled"), "yes", "$.bf16.enabled"),
        (("optimizer", "type"), 3, "$.optimizer.type"),
        (("train_batch",), 8, "$"),
    ],
)
def test_an_invalid_value_is_refused_at_its_path(place, value, at, validator):
    config = copy.deepcopy(json.loads(GOLDEN[-1].read_text()))
    target = config
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    assert at in {error.json_path for error in validator.iter_errors(config)}


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": "auto"}}},
        {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
        {"_note": "private", "zero_optimization": {"sub_group_size": 1e9}},
    ],
)
def test_auto_and_comment_keys_are_valid(config, validator):
    assert list(validator.iter_errors(config)) == []


def test_a_saved_schema_makes_newer_keys_pass(schema):
    newer = copy.deepcopy(schema)
    newer["properties"]["zero_optimization"]["properties"]["new_key"] = {"type": "integer"}
    config = {"zero_optimization": {"stage": 2, "new_key": 3}}
    with pytest.raises(UnknownKeyError):
        DeepSpeedPlan.from_dict(config, also_known=known_paths(schema))
    plan = DeepSpeedPlan.from_dict(config, also_known=known_paths(newer))
    assert plan.to_deepspeed() == config


def test_each_offload_section_lists_only_its_own_keys(schema):
    zero = schema["properties"]["zero_optimization"]["properties"]
    for name, absent in (("offload_param", "ratio"), ("offload_optimizer", "max_in_cpu")):
        (section,) = (each for each in zero[name]["anyOf"] if "properties" in each)
        assert absent in {attribute.name for attribute in modelled(OffloadSection)}
        assert absent not in section["properties"]
        assert section["properties"]["device"]["anyOf"][0] == {"enum": ["none", "cpu", "nvme"]}
