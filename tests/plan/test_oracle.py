"""``DeepSpeedConfig`` as an oracle: zerotune accepts only what DeepSpeed accepts."""

from __future__ import annotations

import copy
import itertools
import json
import re
import runpy
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.ranks import run_ranks
from tests.support.schema import schema_parameters
from zerotune.errors import ZeroTuneError
from zerotune.plan import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed

DOCS = Path(__file__).parents[2] / "docs"
VALUES = ["x", "5", 0, 1, -1, 2.5, True, False, None, [], ["a"], {}, {"unknown": 1}, "auto", 10**30]


def nested(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def grid(schema):
    """Yield a configuration for each key and value, and combinations of interdependent keys."""
    for parameter in schema_parameters(schema):
        for value in VALUES:
            yield parameter.path, {"train_batch_size": 1, **nested(parameter.path, value)}
    chosen = itertools.product(
        (0, 1, 2, 3), ("none", "cpu"), ("bf16", "fp16"), ("mean", "sum", "max"),
        ({}, {"zenflow": {"overlap_step": True}}, {"zenflow": {"topk_ratio": 1.0}},
         {"leaf_module": {"names": ["x"]}}, {"compute_grad_norm": False}),
        ({"loss_scale_window": 0}, {"loss_scale": 8, "min_loss_scale": 0}, {"auto_cast": True}),
        (True, False),
    )  # fmt: skip
    for stage, device, precision, operation, zero, scaling, deepcompile in chosen:
        # Only the engine refuses these with and without offload; no configuration class does.
        only_engine = "compute_grad_norm" in zero or ("zenflow" in zero and device == "none")
        key = f"zero_optimization.{next(iter(zero))}" if only_engine else ""
        yield (
            key,
            {
                "train_batch_size": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": {
                    "stage": stage,
                    "offload_optimizer": {"device": device},
                    **zero,
                },
                "bf16": {"enabled": precision == "bf16"},
                "fp16": {"enabled": precision == "fp16", **scaling},
                "gradient_allreduce_op": operation,
                "compile": {"deepcompile": deepcompile},
            },
        )


def judged_here(config):
    """Return why zerotune refuses a configuration, and its reading of an accepted one."""
    try:
        plan = DeepSpeedPlan.from_dict(copy.deepcopy(config))
    except ZeroTuneError as error:
        return str(error), None
    errors = [finding for finding in plan.check() if finding.severity == "error"]
    return (str(errors[0]), None) if errors else (None, plan.to_dict())


def judged_there(config):
    import deepspeed.runtime.config as reading

    try:
        reading.DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
        return f"{type(error).__name__}: {error}"
    return None


def compare():
    """Return the differences: which of the two is stricter, key, configuration and reason."""
    import logging

    import deepspeed
    import deepspeed.runtime.config as reading

    from tests.plan.test_deepspeed_agrees import Ranks
    from tools.deepspeed_schema import FILE, deepspeed_schema, render
    from tools.plan_schema import plan_schema

    logging.disable(logging.CRITICAL)
    reading.dist = Ranks(1)
    differences, count = [], 0
    for key, config in grid(plan_schema()):
        refused_here, mended = judged_here(config)
        refused_there = judged_there(config if mended is None else mended)
        count += 1
        if refused_here and not refused_there:
            differences.append(("stricter", key, config, refused_here))
        if refused_there and not refused_here:
            differences.append(("laxer", key, config, refused_there))
    file = FILE.read_text(encoding="utf-8")
    return deepspeed.__version__, count, differences, render(deepspeed_schema()), file


@pytest.fixture(scope="module")
def compared():
    (found,) = run_ranks(compare)
    return found


@pytest.fixture(scope="module")
def exceptions():
    page = runpy.run_path(str(DOCS / "generate_rules.py"))
    return {"stricter": page["STRICTER"], "laxer": page["LAXER"]}


def test_zerotune_and_deepspeed_agree_except_where_the_page_says(compared, exceptions):
    version, count, differences, _, file = compared
    if Version(version) < Version(json.loads(file)["deepspeed"]):
        pytest.skip(f"the schema on file is not that of DeepSpeed {version}")
    assert count > 3000
    open_ones = [
        each
        for each in differences
        if not any(re.fullmatch(keys, each[1]) for keys in exceptions[each[0]])
    ]
    assert open_ones == []


def test_every_exception_on_the_page_is_needed(compared, exceptions):
    found = {(which, key) for which, key, *_ in compared[2]}
    for which, reasons in exceptions.items():
        for keys in reasons:
            assert any(w == which and re.fullmatch(keys, key) for w, key in found), keys


def test_the_stored_schema_equals_that_of_deepspeed(compared):
    version, _, _, made, file = compared
    if Version(version) < Version(json.loads(file)["deepspeed"]):
        pytest.skip(f"the schema on file is not that of DeepSpeed {version}")
    assert made == file, "run python -m tools.deepspeed_schema, and look at the difference"
