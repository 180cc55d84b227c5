"""A converted file runs the same, according to accelerate's and DeepSpeed's own code."""

from __future__ import annotations

import logging

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.accelerate_runs import ALONE, what_runs
from tests.plan.conftest import REFERENCE_C
from tests.plan.styles import ACCELERATE
from tests.support.ranks import free_port, run_ranks
from zerotune.plan import DeepSpeedPlan, plan_document

pytestmark = pytest.mark.deepspeed

BLOCKS = st.fixed_dictionaries(
    {},
    optional={
        "zero_stage": st.integers(0, 3),
        "gradient_accumulation_steps": st.integers(1, 5),
        "gradient_clipping": st.sampled_from([0.3, 1, 2.5, "auto"]),
        "offload_optimizer_device": st.sampled_from(["none", "cpu"]),
        "offload_param_device": st.sampled_from(["none", "cpu"]),
        "zero3_init_flag": st.booleans(),
        "zero3_save_16bit_model": st.booleans(),
        "deepspeed_multinode_launcher": st.just("standard"),
    },
)
AROUND = st.fixed_dictionaries(
    {"distributed_type": st.just("DEEPSPEED")},
    optional={
        "compute_environment": st.just("LOCAL_MACHINE"),
        "mixed_precision": st.sampled_from(["bf16", "fp16", "no", "NO"]),
        "debug": st.booleans(),
        "downcast_bf16": st.sampled_from(["no", "NO", False]),
        "dynamo_backend": st.sampled_from(["NO", "no"]),
        "dynamo_config": st.just({}),
        "num_processes": st.integers(1, 8),
        "main_training_function": st.just("main"),
    },
)
LOST = {
    "JSON in the block": "accelerate discards what is written in DeepSpeed's own words",
    "offload to the host": "accelerate fails on an accumulation of auto",
    "offload to a disk": "accelerate's launcher loses the folders",
    "a configuration in place of a file": "accelerate refuses JSON without zero_optimization",
    "a precision beside it": "accelerate refuses a precision beside a file",
    "the word NO": "accelerate's launcher fails on what YAML makes of the word",
}
"""Styles that accelerate does not run as written, and why."""
WILD = {"reference c": REFERENCE_C, **ACCELERATE}


def before_and_after(text, folder):
    """Return what runs with accelerate's YAML, and with the JSON converted from it."""
    file = folder / "accelerate.yaml"
    file.write_text(text)
    plan = DeepSpeedPlan.from_yaml(file)
    document = plan_document(plan, "deepspeed")
    converted = folder / "ds.json"
    converted.write_text(document.text)
    return (
        what_runs("--config_file", str(file)),
        what_runs("--use_deepspeed", "--deepspeed_config_file", str(converted), *flags(document)),
    )


def flags(document):
    """Return the launcher flags that the decisions of a conversion name."""
    return [
        word
        for decision in document.decisions
        for word in decision.reason.partition("launch with ")[2].split()
    ]


def compare(folder):
    """Return which generated files run, and what published ones run before and after conversion."""
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed

    require_deepspeed(accelerator="cpu")
    quiet_deepspeed()
    logging.disable(logging.CRITICAL)
    ran = []

    @settings(max_examples=60, deadline=None, database=None)
    @given(BLOCKS, AROUND)
    def all_run_the_same(block, around):
        text = yaml.safe_dump({**around, "deepspeed_config": block})
        before, after = before_and_after(text, folder)
        assert after == before
        ran.append("refused" not in before)

    all_run_the_same()
    return ran, {name: before_and_after(text, folder) for name, text in WILD.items()}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agree")
    (found,) = run_ranks(compare, folder, env={**ALONE, "MASTER_PORT": str(free_port())})
    return found


def test_any_accelerate_block_runs_the_same_after_conversion(compared):
    ran, _ = compared
    assert len(ran) >= 40
    assert all(ran)


@pytest.mark.parametrize("name", [name for name in WILD if name not in LOST])
def test_a_published_file_runs_the_same_after_conversion(compared, name):
    before, after = compared[1][name]
    assert "refused" not in before, before
    assert after == before


@pytest.mark.parametrize("name", LOST)
def test_every_listed_exception_does_not_run_as_written_in_accelerate(compared, name):
    before, after = compared[1][name]
    assert "refused" in before or after != before
