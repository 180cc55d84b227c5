"""Loss scale and random states of a run resumed under another plan."""

from __future__ import annotations

import random
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from tests.checkpoint.samples import sample_manifest
from zerotune.checkpoint.adapting import carried_loss_scale, keeps_states, restart_generators
from zerotune.checkpoint.generators import capture_generators

PLAN = sample_manifest().plan
DYNAMIC = {"cur_scale": 512.0, "cur_iter": 30, "last_overflow_iter": 20, "cur_hysteresis": 1}
TORCH = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


def carried(scaler, saved, running, fresh):
    state = attrs.evolve(sample_manifest().state, loss_scaler=scaler)
    plans = [
        None if kind is None else attrs.evolve(PLAN, precision=kind[0], engine=kind[1])
        for kind in (saved, running)
    ]
    state, decisions = carried_loss_scale(state, saved=plans[0], running=plans[1], fresh=fresh)
    return state.loss_scaler, [(d.key, d.before, d.after) for d in decisions]


@pytest.mark.parametrize(
    ("scaler", "saved", "running", "fresh", "expected", "decisions"),
    [
        (DYNAMIC, ("fp16", "deepspeed"), ("fp16", "deepspeed"), {}, DYNAMIC, []),
        (
            DYNAMIC,
            ("fp16", "deepspeed"),
            ("fp16", "plain"),
            {**TORCH, "scale": 65536.0, "_growth_tracker": 0},
            {**TORCH, "_growth_tracker": 0},
            [("fp16.loss_scale", 512.0, 512.0)],
        ),
        (
            TORCH,
            ("fp16", "plain"),
            ("fp16", "deepspeed"),
            {"cur_scale": 65536.0, "cur_iter": 0},
            {"cur_scale": 512.0, "cur_iter": 0},
            [("fp16.loss_scale", 512.0, 512.0)],
        ),
        (
            DYNAMIC,
            ("fp16", "deepspeed"),
            ("bf16", "deepspeed"),
            {},
            {},
            [("fp16.loss_scale", 512.0, None)],
        ),
        # DeepSpeed's bf16 engine has a meaningless loss scale of 1.
        (
            {"cur_scale": 1.0},
            ("bf16", "deepspeed"),
            ("fp16", "plain"),
            {**TORCH, "scale": 65536.0},
            {},
            [("fp16.loss_scale", None, 65536.0)],
        ),
        ({"cur_scale": 1.0}, ("bf16", "deepspeed"), ("fp32", "plain"), {}, {}, []),
        ({}, None, ("bf16", "deepspeed"), {"cur_scale": 1.0}, {}, []),
    ],
)
def test_a_loss_scale_is_carried_over_only_where_it_means_the_same(
    scaler, saved, running, fresh, expected, decisions
):
    assert carried(scaler, saved, running, fresh) == (expected, decisions)


def test_additional_ranks_draw_distinct_reproducible_numbers():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.manual_seed(3)
        tensors, _ = capture_generators()
        drawn = []
        for rank in (2, 3, 2):
            restart_generators(tensors, rank=rank)
            drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
        torch.manual_seed(4)
        other, _ = capture_generators()
        restart_generators(other, rank=2)
        drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[3]


@pytest.mark.parametrize(
    ("state", "update", "keeps"),
    [("exp_avg", True, False), ("state1", False, False), ("exp_avg", False, True),
     ("state1", True, True)],
)  # fmt: skip
def test_states_of_bitsandbytes_begin_anew_where_their_form_differs(
    state, update, keeps, monkeypatch
):
    manifest = sample_manifest()
    records = [attrs.evolve(each, states=(state,)) for each in manifest.parameters]
    manifest = attrs.evolve(manifest, parameters=records)
    optimizer = SimpleNamespace(package="bitsandbytes.optim")
    plan = SimpleNamespace(optimizer=optimizer, update=object() if update else None)
    monkeypatch.setattr("zerotune.checkpoint.adapting.plan_record", lambda _: manifest.plan)
    assert keeps_states(manifest, SimpleNamespace(plan=plan)) is keeps
