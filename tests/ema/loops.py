"""Custom training loops with EMAModel, written like diffusers' scripts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.models import tiny_unet
from tests.support.ranks import free_port
from zerotune.backend.deepspeed.external import master_weights_of
from zerotune.ema import EMAModel

STEPS = 3
DECAY = 0.8
ACCUMULATION = 2


def loss_of(model: Any, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(4, 1, 8, 8, generator=generator)
    times = torch.randint(0, 1000, (4,), generator=generator)
    labels = torch.zeros(4, dtype=torch.long)
    return (model(x.to(dtype), times, class_labels=labels).sample.float() - x).pow(2).mean()


def with_accelerate(
    source: Callable[[Any], Any], zero: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    from accelerate import Accelerator, DeepSpeedPlugin

    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config(zero))
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, deepspeed_plugin=plugin)
    unet = tiny_unet()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(unet, optimizer)
    yield model, source(model)
    for index in range(STEPS * ACCUMULATION):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, index + 100 * accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            yield model, None


def with_deepspeed(source: Callable[[Any], Any], zero: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    import deepspeed

    model = tiny_unet()
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = config(zero) | {"bf16": {"enabled": True}, "optimizer": adam}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    yield engine, source(engine)
    for index in range(STEPS * ACCUMULATION):
        loss = loss_of(engine, index + 100 * engine.global_rank, torch.bfloat16)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        if boundary:
            yield engine, None
    engine.destroy()


def config(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage3_param_persistence_threshold": 0} | zero,
    }


def follow_loop(kind: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Run a loop; compare with a float64 EMA of its gathered weights."""

    def source(model: Any) -> EMAModel:
        ema = EMAModel(model, decay=DECAY)
        ema.follow(model)
        return ema

    loop = {
        "accelerate": lambda: with_accelerate(source, zero),
        "deepspeed": lambda: with_deepspeed(source, zero),
    }[kind]()
    model, ema = next(loop)
    master = master_weights_of(model)
    expected = [full.double() for _, full in master.gather()]
    names = list(master.parameters)
    seen: dict[str, Any] = {
        "partitioned": all(p.numel() == 0 for p in model.parameters()),
        "sharded": not ema.shadow.source.replicated,
    }
    for _ in range(STEPS):
        next(loop)
        ema.step(model.parameters())
        for average, (_, full) in zip(expected, master.gather(), strict=True):
            average.lerp_(full.double(), 1 - ema.cur_decay_value)
    # A shadow of bare parameters has positions instead of names, in the same order.
    averages = {name: full for name, (_, full) in zip(names, ema.shadow.gather(), strict=True)}
    seen["steps"] = ema.optimization_step
    seen["error"] = max(
        float((averages[name].double() - value).norm() / value.norm())
        for name, value in zip(names, expected, strict=True)
    )
    trained = dict(master.gather())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    seen["copied"] = all(torch.equal(full, averages[name]) for name, full in master.gather())
    ema.restore(model.parameters())
    seen["restored"] = all(torch.equal(full, trained[name]) for name, full in master.gather())
    seen["another"] = not all(torch.equal(trained[name], averages[name]) for name in names)
    seen["unfinished"] = next(loop, None) is not None
    return seen
