"""Peak memory of real training steps against the plan's estimate, over stages, offload and batch.

On a GPU: SDXL's U-Net with random weights at 1024 x 1024. Elsewhere the same run with a small
U-Net, which shows that it works and no more. Every case runs in a process of its own, so that one
that does not fit costs only itself.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from typing import Any

import torch

GIB = 2**30
CASES: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload": "cpu"},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "offload": "cpu", "offload_param": "cpu"},
)
SMALL: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 32,
    "block_out_channels": [64, 128, 256],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
    "norm_num_groups": 16,
}
STEPS = 2


def measure() -> dict[str, Any]:
    """Run every case; report peaks, estimates and the error of each."""
    on_gpu = torch.cuda.is_available()
    batches = (1, 4) if on_gpu else (1,)
    results = [_isolated(case, batch=batch, large=on_gpu) for case in CASES for batch in batches]
    errors = [abs(result["error"]) for result in results if result.get("error") is not None]
    return {
        "model": "sdxl" if on_gpu else "small",
        "results": results,
        "medians": {
            "absolute error of the device's peak": statistics.median(errors) if errors else None,
            "cases that ran": len(errors),
            "cases": len(results),
        },
    }


def _isolated(case: dict[str, Any], *, batch: int, large: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_report, args=(send, case, batch, large))
    worker.start()
    send.close()
    try:
        outcome = json.loads(receive.recv())
    except EOFError:
        outcome = {"failed": "the process died"}
    worker.join()
    return {"plan": case, "batch": batch} | outcome


def _report(send: Any, case: dict[str, Any], batch: int, large: bool) -> None:
    try:
        outcome = _run(case, batch, large)
    except (RuntimeError, MemoryError) as error:
        outcome = {"failed": str(error).splitlines()[0][:300]}
    send.send(json.dumps(outcome))


def _run(case: dict[str, Any], batch: int, large: bool) -> dict[str, Any]:
    from benchmarks.families import SDXL
    from zerotune import DeepSpeedPlan, OptimizerResolver, build_engine, model_facts
    from zerotune.diffusion.profile_inputs import example_inputs
    from zerotune.training.memory import host_now, host_peak

    config, side = (SDXL, 1024) if large else (SMALL, 256)
    import diffusers

    facts = model_facts(config)
    before = host_now()
    model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    model.enable_gradient_checkpointing()
    precision = "bf16" if large else "fp32"
    plan = DeepSpeedPlan.build(precision=precision, micro_batch_size=batch, **case)
    resolved = OptimizerResolver().apply(plan.resolve(model=facts))
    engine = build_engine(model=model, plan=resolved)
    make = example_inputs(model)
    for _ in range(STEPS):
        arguments = {
            name: _filled(value, engine) for name, value in make(batch, side, side).items()
        }
        engine.backward(engine(**arguments).sample.float().pow(2).mean())
        engine.step()
    estimate = plan.estimate(facts, batch=batch, resolution=side)
    result = _compare(estimate, host_peak() - before)
    engine.close()
    return result


def _filled(value: Any, engine: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, engine) for name, item in value.items()}
    dtype = engine.dtype if value.is_floating_point() else value.dtype
    return torch.rand(value.shape, device=engine.device).to(dtype)


def _compare(estimate: Any, host: int) -> dict[str, Any]:
    from zerotune.plan.memory.estimating import CONTEXT, RUNTIME

    result: dict[str, Any] = {
        "estimated": {
            "device_gib": estimate.device / GIB,
            "host_gib": estimate.host / GIB,
            "phase": estimate.peak("device").phase,
        },
        "measured": {"host_growth_gib": host / GIB},
    }
    if torch.cuda.is_available():
        # The context is not torch's; the reserved peak is what other processes cannot have.
        allocated = torch.cuda.max_memory_allocated()
        result["measured"] |= {
            "allocated_gib": allocated / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }
        result["error"] = (estimate.device - CONTEXT) / allocated - 1
    else:
        result["error"] = (estimate.host - RUNTIME) / host - 1
    return result
