"""Train a U-Net on real digits with a loop around raw DeepSpeed.

``deepspeed_before.py`` is the script without zerotune, ``deepspeed_after.py`` the same script
with zerotune. docs/embedding.md shows the difference.
"""

from __future__ import annotations

import sys
from itertools import islice

import deepspeed
import torch
from diffusers import UNet2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
}


def new_model() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def digits() -> TensorDataset:
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    # Noise and times are drawn once, so that the losses of runs can be compared.
    return TensorDataset(images, torch.randn_like(images), torch.rand(len(images)))


def loss_of(model, batch):  # noqa: ANN001, ANN201
    images, noise, times = batch
    mixed = torch.lerp(images, noise, times.view(-1, 1, 1, 1))
    prediction = model(mixed, times * 1000).sample
    return torch.nn.functional.mse_loss(prediction, noise - images)


def main(
    steps: int = 50, output: str = "outputs/deepspeed", resume: str | None = None
) -> list[float]:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    dataset = digits()
    loader = DataLoader(
        dataset,
        batch_size=CONFIG["train_micro_batch_size_per_gpu"],
        sampler=DistributedSampler(dataset, shuffle=False),
    )
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    if resume:
        engine.load_checkpoint(resume)
    losses = []
    for batch in islice(loader, engine.global_steps * engine.gradient_accumulation_steps(), None):
        loss = loss_of(engine, [tensor.to(engine.device) for tensor in batch])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_steps == steps:
            break
    engine.save_checkpoint(output)
    if engine.global_rank == 0:
        print(f"loss {losses[-1]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
