"""Start the real DeepSpeed engine for each case and report what it built."""

from __future__ import annotations

import os
from typing import Any


def basic_optimizer(engine):
    wrapper = engine.optimizer
    return getattr(wrapper, "optimizer", wrapper)


def start(case):
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(model.weight, case["weight"])
    client = None
    if case["source"] == "torch":
        client = getattr(torch.optim, case["implementation"])(model.parameters(), **case["params"])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=client,
        config=case["config"],
        dist_init_required=not torch.distributed.is_initialized(),
    )
    return engine


def run(case):
    import torch

    engine = start(case)
    optimizer = basic_optimizer(engine)
    seen = []

    def before_update(_optimizer, _args, _kwargs):
        group = _optimizer.param_groups[0]
        betas = group.get("betas")
        seen.append([float(group["lr"]), None if betas is None else list(betas)])

    optimizer.register_step_pre_hook(before_update)
    for _ in range(case["steps"]):
        output = engine(torch.ones(1, 4))
        # Gradients are exactly 0, so only weight decay moves the weights.
        engine.backward(output.sum() * 0.0)
        engine.step()
    group = optimizer.param_groups[0]
    return {
        "class": type(optimizer).__name__,
        "basic": type(engine.basic_optimizer).__name__,
        "group": {key: group[key] for key in case["params"] if key in group},
        "seen": seen,
        "weight": float(engine.module.weight.detach().mean()),
    }


def run_all(cases: dict[str, Any]) -> dict[str, Any]:
    """Run every case in one process; return the results by name."""
    import deepspeed
    import torch

    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    return {name: run(case) for name, case in cases.items()}
