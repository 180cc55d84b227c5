"""Any input gives a plan or a ``PlanError``; a written plan reads the same."""

from __future__ import annotations

import contextlib
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerotune.errors import OptimizerError, PlanError
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.plan import keys as known_keys
from zerotune.plan.context import Context
from zerotune.plan.rules.table import check_plan
from zerotune.plan.section import modelled
from zerotune.plan.sections import (
    AioSection,
    Bf16Section,
    Fp16Section,
    OffloadSection,
    OptimizerSection,
    ZeroSection,
)
from zerotune.platform import Platform

SLOW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "AUTO", "5e8", "none", "cpu", "nvme", "true", 2e8, 0, 1, 2, 3, -1])
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
    ),
    max_leaves=10,
)


def names(cls):
    return [attribute.name for attribute in modelled(cls)]


def section(keys, values):
    return st.dictionaries(st.sampled_from(sorted(keys)), values, max_size=8)


OFFLOAD = section(names(OffloadSection), SCALARS) | SCALARS
ZERO_KEYS = {
    *names(ZeroSection),
    *known_keys.ZERO,
    *known_keys.ZERO_ALIASES,
    "cpu_offload",
    "cpu_offload_params",
}
SCHEDULES = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["WarmupLR", "WarmupDecayLR", "cosine", "x"]),
        "params": st.dictionaries(
            st.sampled_from(
                [
                    "warmup_num_steps",
                    "total_num_steps",
                ]
            ),
            JUNK,
        ),
    }
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
                "gradient_clipping",
                "steps_per_print",
                "wall_clock_breakdown",
            ),
            SCALARS,
        ),
        "zero_optimization": section(ZERO_KEYS, SCALARS | OFFLOAD) | SCALARS,
        "bf16": section(names(Bf16Section), SCALARS) | SCALARS,
        "bfloat16": SCALARS,
        "fp16": section(names(Fp16Section), SCALARS) | SCALARS,
        "aio": section([*names(AioSection), "thread_count"], SCALARS),
        "optimizer": section([*names(OptimizerSection), "name"], JUNK) | SCALARS,
        "scheduler": JUNK | SCHEDULES,
        "gradient_allreduce_op": SCALARS,
        "activation_checkpointing": JUNK,
        "wandb": JUNK,
        "amp": JUNK,
        "deepspeed_config": JUNK,
    },
)

PLATFORMS = st.sampled_from(
    [
        Platform.synthetic("cuda"),
        Platform.synthetic("cuda", bf16=False, versions={"deepspeed": "0.18.9"}),
        Platform.synthetic("cpu"),
        Platform.synthetic("mps", deepspeed=False),
    ]
)
MODELS = st.none() | st.lists(
    st.lists(st.integers(0, 3000), max_size=3).map(tuple), max_size=8
).map(lambda shapes: ModelFacts.from_shapes((f"p{i}", s) for i, s in enumerate(shapes)))


def plan_or_error(config):
    """Return the plan, or ``None`` for a ``PlanError``; any other exception fails the test."""
    try:
        return DeepSpeedPlan.from_dict(config)
    except PlanError as error:
        refusal = error
    assert refusal.reason
    assert str(refusal)
    return None


@SLOW
@given(JUNK)
def test_arbitrary_input_gives_a_plan_or_a_plan_error(config):
    plan_or_error(config)


STEPS = st.none() | st.integers(0, 5000)


@SLOW
@given(CONFIGS, st.none() | PLATFORMS, MODELS, st.integers(1, 5), STEPS)
def test_check_returns_findings_and_raises_nothing(config, platform, model, world_size, steps):
    plan = plan_or_error(config)
    if plan is None:
        return
    context = Context(
        world_size=world_size, platform=platform, model=model, run=RunFacts(total_steps=steps)
    )
    for finding in check_plan(plan, context):
        assert finding.reason
        assert str(finding)
        assert isinstance(finding.as_error(), PlanError)
        assert finding.reason
    assert [str(each) for each in plan.check(world_size=world_size, platform=platform)] == [
        str(each) for each in check_plan(plan, Context(world_size=world_size, platform=platform))
    ]


@SLOW
@given(CONFIGS, PLATFORMS, MODELS, st.integers(1, 5))
def test_resolving_gives_a_resolved_plan_or_an_error_of_ours(config, platform, model, world_size):
    plan = plan_or_error(config)
    if plan is None:
        return
    try:
        resolved = plan.resolve(platform=platform, model=model, world_size=world_size)
    except (PlanError, OptimizerError):
        return
    assert resolved.train_batch_size == (
        resolved.micro_batch_size * resolved.gradient_accumulation_steps * world_size
    )
    assert resolved.explain()
    json.dumps(resolved.summary())
    try:
        json.dumps(resolved.to_deepspeed(), allow_nan=False)
    except PlanError:
        return
    again = resolved.plan.resolve(platform=platform, model=model, world_size=world_size)
    assert again.to_deepspeed() == resolved.to_deepspeed()


@SLOW
@given(st.text() | JUNK.map(lambda value: json.dumps(value, skipkeys=True)))
def test_arbitrary_text_gives_a_plan_or_a_plan_error(text):
    with contextlib.suppress(PlanError):
        assert DeepSpeedPlan.from_json(text).explain()
