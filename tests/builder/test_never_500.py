"""Endpoints answer any request, and never with a 500."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.builder.states import PLAN
from zerotune.builder import forms as wire
from zerotune.builder.forms import FormState, read_plan
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.keys import TOP_LEVEL, ZERO
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.schedules import SCHEDULERS
from zerotune.plan.section import modelled
from zerotune.plan.sections import OffloadSection, ZeroSection

QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
POST = (
    "/preview", "/advise", "/open", "/apply", "/save", "/templates/use",
)  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["auto", "", "cpu", "nvme", "none", "5e8", "-1", "true", "bf16", "\0", "é"]),
    st.text(max_size=8),
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def keys(cls, more=()):
    return st.sampled_from(sorted({each.name for each in modelled(cls)} | set(more)))


def names(known):
    return st.sampled_from([*known, "adamw", "nobody"])


params = st.dictionaries(
    st.sampled_from(["lr", "betas", "eps", "momentum", "warmup_num_steps", "total_num_steps", "x"]),
    scalars | st.lists(scalars, max_size=2),
    max_size=4,
)
offload = st.dictionaries(keys(OffloadSection), scalars, max_size=4)
zero = st.dictionaries(keys(ZeroSection, ZERO), scalars | offload, max_size=6)
config = st.fixed_dictionaries(
    {},
    optional={
        "train_batch_size": scalars,
        "train_micro_batch_size_per_gpu": scalars | st.integers(1, 8),
        "gradient_accumulation_steps": scalars | st.integers(1, 8),
        "gradient_clipping": scalars,
        "zero_optimization": zero | st.fixed_dictionaries({"stage": st.integers(0, 3)}),
        "bf16": st.dictionaries(st.sampled_from(["enabled", "x"]), scalars, max_size=2) | anything,
        "fp16": st.dictionaries(st.sampled_from(["enabled", "loss_scale"]), scalars, max_size=2),
        "optimizer": st.fixed_dictionaries({"type": names(OPTIMIZERS) | scalars, "params": params}),
        "scheduler": st.fixed_dictionaries({"type": names(SCHEDULERS) | scalars, "params": params}),
        "aio": anything,
    },
) | st.dictionaries(keys(DeepSpeedPlan, TOP_LEVEL), anything, max_size=5)
setup = st.fixed_dictionaries(
    {},
    optional={
        "family": st.sampled_from(["sdxl", "sd15", "wan-1.3b", "", "none"]) | scalars,
        "resolution": scalars | st.integers(8, 4096),
        "frames": scalars | st.integers(1, 200),
        "world_size": scalars | st.integers(1, 16),
        "vram": scalars | st.sampled_from(["8", "24 GiB", "1e9"]),
        "ram": scalars,
        "nvme": scalars | st.just("500"),
        "ema": scalars | st.just("host"),
        "gradient_checkpointing": scalars,
        "total_steps": scalars,
    },
)
states = st.fixed_dictionaries(
    {"config": config | anything, "setup": setup | anything},
    optional={"launch": st.dictionaries(st.text(max_size=6), scalars, max_size=2) | anything},
)
bodies = st.fixed_dictionaries(
    {"state": states | anything},
    optional={
        "path": scalars | st.sampled_from(["a.json", "b.yaml", "c.py", "folder/d.json", ".."]),
        "text": scalars | st.builds(json.dumps, config) | st.text(max_size=60),
        "name": scalars,
        "to": scalars,
        "id": st.sampled_from(["lowest", "sdxl-8"]) | scalars,
        "version": scalars,
        "format": scalars | st.sampled_from(["deepspeed", "accelerate"]),
        "setup": setup | anything,
    },
)


def answered(client, path, body):
    answer = client.post(f"/api{path}", json=body)
    assert answer.status_code in {200, 400, 404, 409, 422}, (path, body, answer.text)
    assert isinstance(answer.json(), dict)
    return answer


@pytest.mark.parametrize("path", POST)
def test_no_body_breaks_an_endpoint(path, client_of):
    client = client_of(on_apply=str)

    @QUICK
    @given(body=bodies)
    def check(body):
        answered(client, path, body)

    check()


@QUICK
@given(content=st.binary(max_size=80))
@example(content=b'{"state":' * 40)
def test_no_bytes_break_the_preview(content, client):
    headers = {"content-type": "application/json"}
    answer = client.post("/api/preview", content=content, headers=headers)
    assert answer.status_code in {200, 400, 422}


@settings(max_examples=150, deadline=None)
@given(config=config)
@example(config={**PLAN, "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}})
@example(config={"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 2**63 - 1}})
def test_a_plan_survives_a_round_trip_through_the_form(config):
    """A plan turned into a form and back, through the page's JSON, is the same plan."""
    try:
        plan = DeepSpeedPlan.from_dict(config)
    except ValueError:
        return
    sent = json.loads(json.dumps(FormState.of_plan(plan).data()))
    reading = read_plan(FormState.of_request(wire.from_wire(sent)))
    assert reading.errors == ()
    assert reading.plan == plan
    assert reading.plan.to_dict() == plan.to_dict()
