"""A small real training run, described by data, for parity tests."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import attrs
import torch


@attrs.frozen(kw_only=True)
class Case:
    """Settings of the plan to train under."""

    stage: int = 0
    offload: str = "none"
    offload_param: str = "none"
    precision: str = "fp32"
    deepspeed: bool = True
    accumulation: int = 1
    micro_batch: int = 4
    clipping: float = 1.0
    nvme_path: str | None = None
    optimizer: Any = "AdamW"
    lr: float = 1e-3
    streamed: Any = None
    engine: Any = None
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        if not self.deepspeed:
            return f"plain-{self.precision}"
        return f"z{self.stage}-{self.offload}-{self.offload_param}-{self.precision}"


PLAIN = Case(deepspeed=False)


def build(
    model: Any, plan: Any, *, resolver: Any = None, timeout_s: float = 600.0, **context: Any
) -> Any:
    """Resolve the plan for this model and rank, and start an engine."""
    from zerotune.plan.facts import ModelFacts
    from zerotune.plan.optimizer.resolver import OptimizerResolver
    from zerotune.training.setup import build_engine

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    resolved = plan.resolve(model=ModelFacts.from_module(model), world_size=world_size, **context)
    settled = (resolver or OptimizerResolver()).resolve(resolved)
    return build_engine(model=model, plan=settled, timeout_s=timeout_s)


def start(case: Case, model: Any) -> Any:
    """Start a verified engine for ``case``."""
    from zerotune.plan.plan import DeepSpeedPlan

    optimizer = case.optimizer
    if isinstance(optimizer, str):
        optimizer = {"type": optimizer, "params": {"lr": case.lr, "weight_decay": 0.01}}
    plan = DeepSpeedPlan.build(
        stage=case.stage,
        offload=case.offload,
        offload_param=case.offload_param,
        nvme_path=case.nvme_path,
        precision=case.precision,
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clipping,
        optimizer=optimizer,
        scheduler={
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": case.lr / 10,
                "warmup_max_lr": case.lr,
                "warmup_num_steps": 5,
                "warmup_type": "linear",
            },
        },
        **dict(case.overrides),
    )
    context = {"deepspeed": case.deepspeed, "streamed": case.streamed}
    return build(model, plan, engine=case.engine, **context)


def unet_loss(engine: Any, step: int) -> Any:
    """Return the loss of denoising real digits; the batch depends only on step and rank."""
    import torch

    from tests.support.models import digits_batch

    micro = engine.plan.micro_batch_size
    images, labels = digits_batch(micro, seed=1000 * step + engine.group.rank)
    generator = torch.Generator().manual_seed(7 + 1000 * step + engine.group.rank)
    noise = torch.randn(images.shape, generator=generator)
    times = torch.rand(micro, generator=generator)
    mixed = (1 - times.view(-1, 1, 1, 1)) * images + times.view(-1, 1, 1, 1) * noise
    device = engine.device
    prediction = engine(
        mixed.to(device, engine.dtype), (times * 1000).to(device), class_labels=labels.to(device)
    ).sample
    return torch.nn.functional.mse_loss(prediction.float(), (noise - images).to(device))


def train_unet(case: Case, steps: int, *, device: str = "cpu") -> list[float]:
    """Return this rank's losses, one per micro batch; the engine must be on ``device``."""
    from tests.support.models import tiny_unet

    engine = start(case, tiny_unet())
    assert engine.device.type == device
    losses = []
    for step in range(steps):
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    engine.close()
    return losses


def digest(engine: Any) -> str:
    """Digest of the master weights and moments, the same for every engine. Collective."""
    found: dict[str, Any] = {}
    moments = (lambda fragment, n=n: fragment.states.get(n) for n in ("exp_avg", "exp_avg_sq"))
    for index, source in enumerate((None, *moments)):
        begun = source is None or any(f.states for f in engine.master_weights.read())
        for name, value in engine.master_weights.gather(source) if begun else ():
            found[f"{name} {index}"] = value.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def weights_of(engine: Any) -> str:
    """Digest of the model's weights and buffers."""
    found = hashlib.sha256()
    # At stage 3, what is at rest; state_dict() refuses empty tensors.
    named = itertools.chain(engine.module.named_parameters(), engine.module.named_buffers())
    for name, value in named:
        found.update(name.encode() + value.detach().float().numpy().tobytes())
    return found.hexdigest()
