"""A minimal example of ``Trainer`` with a model, a plan and data.

Run it with ``python examples/minimal_trainer.py``.
"""

from __future__ import annotations

import sys

import torch
from diffusers import UNet2DModel
from sklearn.datasets import load_digits

from zerotune import DeepSpeedPlan, EMAShadow, ImageTensors, Trainer


def main(steps: int = 50) -> tuple[int, ...]:
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32", micro_batch_size=16)
    data = ImageTensors(images=digits)
    with Trainer(model=model, plan=plan, data=data, ema=EMAShadow(decay=0.99)) as trainer:
        print(trainer)  # trainer.explain() returns every decision
        report = trainer.fit(steps=steps)
        images = trainer.sample(count=4, steps=10)
    print(report.render())
    print("sampled", tuple(images.shape))
    return tuple(images.shape)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
