"""Any input of any reader gives a plan or a ``PlanError``; writing loses nothing."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_properties import CONFIGS, JUNK, SCALARS, SLOW, plan_or_error
from zerotune.errors import PlanError
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.accelerate import BLOCK_KEYS
from zerotune.plan.read import SHORT_NAMES
from zerotune.plan.sections import LaunchSection
from zerotune.plan.source import parse_yaml

LAUNCHES = st.dictionaries(
    st.sampled_from(sorted(LaunchSection.known_names())),
    SCALARS | st.sampled_from(["bf16", "no", "fp16", "fp8"]),
    max_size=4,
)
FLAGS = st.sampled_from([True, False, "auto"])
OFFLOADS = st.fixed_dictionaries(
    {"device": st.sampled_from(["none", "cpu", "nvme"])},
    optional={"pin_memory": FLAGS, "nvme_path": st.just("/mnt/a; b")},
)
GOOD_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "train_batch_size": st.sampled_from([8, "auto"]),
        "gradient_accumulation_steps": st.sampled_from([1, 4, "auto"]),
        "gradient_clipping": st.sampled_from([0, 0.5, 1, "auto"]),
        "zero_optimization": st.fixed_dictionaries(
            {},
            optional={
                "stage": st.sampled_from([0, 1, 2, 3, "auto"]),
                "offload_optimizer": OFFLOADS | st.just({}) | st.just({"device": "cpu"}),
                "offload_param": OFFLOADS | st.just({"device": "none"}),
                "stage3_gather_16bit_weights_on_model_save": FLAGS,
                "zenflow": st.just({"topk_ratio": 0.1}),
            },
        ),
        "bf16": st.fixed_dictionaries({}, optional={"enabled": FLAGS}),
        "fp16": st.fixed_dictionaries({}, optional={"enabled": FLAGS, "loss_scale": st.just(0)}),
        "optimizer": st.just({"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}}),
        "_comment": st.text(max_size=8),
    },
)
SMALL_CONFIGS = st.fixed_dictionaries(
    {
        "zero_optimization": st.fixed_dictionaries(
            {"stage": st.integers(0, 3)},
            optional={
                "offload_optimizer": st.sampled_from([{"device": "cpu"}, {"device": "none"}]),
                "offload_param": st.sampled_from([{"device": "cpu"}, {}]),
                "stage3_gather_16bit_weights_on_model_save": st.booleans(),
            },
        )
    },
    optional={
        "gradient_accumulation_steps": st.integers(1, 4),
        "gradient_clipping": st.sampled_from([0, 1, 0.5, 1e-07, 1e22]),
    },
)
GOOD_LAUNCHES = st.fixed_dictionaries(
    {},
    optional={
        "mixed_precision": st.sampled_from(["bf16", "fp16", "no", "fp8", "auto"]),
        "num_processes": st.just(8),
        "num_machines": st.sampled_from([1, 2]),
        "main_process_ip": st.just("10.0.0.1"),
        "zero3_init_flag": st.booleans(),
        "gradient_accumulation_steps": st.sampled_from([2, "auto"]),
        "gradient_clipping": st.sampled_from([0, 0.7]),
        "offload_param_path": st.just("/mnt/b"),
        "deepspeed_hostfile": st.text(max_size=5),
        "gpu_ids": st.sampled_from(["0,1", "all", None]),
        "same_network": st.booleans(),
    },
)
BLOCKS = st.dictionaries(
    st.sampled_from([*sorted(BLOCK_KEYS), "train_batch_size", "zero_optimization"]),
    SCALARS | st.sampled_from(['{"zero_optimization": {"stage": 3}}', "e30="]),
    max_size=6,
)
OVERRIDES = st.dictionaries(
    st.sampled_from([*sorted(SHORT_NAMES), "mixed_precision", "nvme_path", "optimizer.params"])
    | st.text(alphabet="abz._", max_size=6),
    JUNK,
    max_size=3,
)


def plan_of(config, launch):
    """Return a plan with launch settings, or ``None`` for a ``PlanError``."""
    plan = plan_or_error(config)
    try:
        return None if plan is None else plan.with_overrides({"launch": launch})
    except PlanError:
        return None


def from_yaml_text(text):
    return DeepSpeedPlan.from_accelerate(
        parse_yaml(text, source="x.yaml"), source="x.yaml", folder=None
    )


@SLOW
@given(SMALL_CONFIGS | GOOD_CONFIGS | CONFIGS, GOOD_LAUNCHES | LAUNCHES)
def test_a_plan_written_in_any_format_reads_back_equal(config, launch):
    plan = plan_of(config, launch)
    if plan is None:
        return
    launched = plan.launch.to_dict() if plan.launch else {}
    for name, read in (
        ("deepspeed", DeepSpeedPlan.from_json),
        ("accelerate", from_yaml_text),
    ):
        document = plan_document(plan, name, lossy=launched)
        again = read(document.text)
        if not document.decisions:
            assert again == plan
        # What a format cannot hold is dropped and recorded once; a second round loses nothing.
        repeated = plan_document(again, name)
        assert repeated.text == document.text
        # Warnings about kept settings are repeated each time.
        assert [each for each in repeated.decisions if each.before != each.after] == []
        assert read(repeated.text) == again


@SLOW
@given(BLOCKS, GOOD_LAUNCHES | LAUNCHES)
def test_accelerates_settings_give_a_plan_or_a_plan_error(block, around):
    try:
        plan = DeepSpeedPlan.from_accelerate(
            {**around, "deepspeed_config": block}, source="x.yaml", folder=None
        )
    except PlanError:
        return
    document = plan_document(plan, "accelerate", lossy=plan.launch.to_dict())
    again = from_yaml_text(document.text)
    if not document.decisions:
        assert again == plan


@SLOW
@given(st.text() | JUNK.map(lambda value: json.dumps(value, skipkeys=True)))
def test_yaml_text_gives_a_plan_or_a_plan_error(text):
    with contextlib.suppress(PlanError):
        content = parse_yaml(text, source="x.yaml")
        if isinstance(content, dict):
            assert DeepSpeedPlan.from_accelerate(content, source="x.yaml", folder=None).explain()


@SLOW
@given(CONFIGS, OVERRIDES)
def test_overrides_give_a_plan_or_a_plan_error(config, overrides):
    plan = plan_or_error(config)
    if plan is None:
        return
    with contextlib.suppress(PlanError):
        new = plan.with_overrides(overrides)
        assert new.with_overrides({}) == new
