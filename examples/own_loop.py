"""A custom training loop with plan, engine, EMA and objective, without ``Trainer``.

Run it with ``python examples/own_loop.py`` or
``torchrun --nproc-per-node 2 examples/own_loop.py``.
"""

from __future__ import annotations

import sys

import torch
from diffusers import UNet2DModel
from sklearn.datasets import load_digits

import zerotune


def main(steps: int = 50) -> float:
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    plan = zerotune.DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="fp32",
        micro_batch_size=16,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
    )
    objective = zerotune.FlowMatchingObjective()
    with zerotune.prepare(model=model, plan=plan) as engine:
        ema = zerotune.EMAShadow(decay=0.99).attach(engine)
        ranks = {"rank": engine.group.rank, "world_size": engine.group.world_size}
        data = zerotune.DataStream(
            zerotune.ImageTensors(images=digits), micro_batch_size=16, **ranks
        )
        noise = torch.Generator().manual_seed(engine.group.rank)
        for _ in range(steps):
            loss = objective(engine, next(data), noise)
            engine.backward(loss)
            if engine.step().applied:
                ema.step()
        with ema.swapped_in():
            images = zerotune.sample(engine, scheduler=objective.scheduler, count=4, steps=10)
        if engine.group.is_main:
            print(f"loss {loss.item():.3f} after {steps} steps; sampled {tuple(images.shape)}")
        return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
