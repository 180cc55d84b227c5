"""The installed DeepSpeed accepts everything the form can express."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.builder.engines import accept
from tests.builder.states import CHOSEN
from tests.support.ranks import run_ranks
from zerotune.builder.forms import FormState
from zerotune.builder.preview import understand
from zerotune.builder.setup import Machines
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.schedules import SCHEDULERS

pytestmark = pytest.mark.deepspeed

PLACES = [
    (stage, optimizer, parameters)
    for stage in range(4)
    for optimizer in ("none", "cpu", "nvme")
    for parameters in ("none", "cpu", "nvme")
]


def form(stage, optimizer_on, parameters_on, optimizer, scheduler):
    zero = {"stage": stage}
    for name, device in (("offload_optimizer", optimizer_on), ("offload_param", parameters_on)):
        if device != "none":
            zero[name] = {"device": device}
            if device == "nvme":
                zero[name]["nvme_path"] = "/swap"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4}},
    }
    if scheduler:
        config["scheduler"] = {"type": scheduler, "params": {}}
    return FormState(config=config, setup={**CHOSEN, "family": ""})


def cases():
    """Yield each placement with every schedule, and optimizer placements with every optimizer."""
    schedules = itertools.cycle([None, *SCHEDULERS])
    for place in PLACES:
        for optimizer in OPTIMIZERS if place[2] == "none" else ():
            yield (*place, optimizer, next(schedules))
        for scheduler in SCHEDULERS:
            yield (*place, "AdamW", scheduler)


def test_deepspeed_accepts_every_plan_that_can_run():
    machines = Machines()
    emitted, refused_by_us = {}, {}
    for case in cases():
        preview = understand(form(*case), machines)
        if preview.resolved is None:
            refused_by_us[case] = preview.messages[0]
            continue
        emitted[f"{case} as saved"] = preview.plan.to_deepspeed()
        emitted[f"{case} as it runs"] = preview.running_config
    # Every refused case has one of two reasons, which its message gives.
    for case, message in refused_by_us.items():
        stage, *devices, _, _ = case
        swaps_too_early = "nvme" in devices and stage < 3
        assert message.severity == "error"
        assert swaps_too_early or message.key.startswith("optimizer"), (case, message)
    assert len(emitted) > 600
    stages = {config["zero_optimization"]["stage"] for config in emitted.values()}
    assert stages == {0, 1, 2, 3}
    # Convert through JSON, as a file would.
    assert run_ranks(accept, json.loads(json.dumps(emitted))) == [{}]
