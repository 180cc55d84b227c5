"""Train a U-Net on real digits with accelerate and its DeepSpeed plugin.

``accelerate_before.py`` is the script without zerotune, ``accelerate_after.py`` the same script
with zerotune. docs/embedding.md shows the difference.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from diffusers import UNet2DModel
from diffusers.optimization import get_scheduler
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
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


def main(steps: int = 50, output: str = "outputs/accelerate") -> list[float]:
    set_seed(0)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    loader = DataLoader(digits(), batch_size=CONFIG["train_micro_batch_size_per_gpu"])
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    lr_scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=5)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(
        model, optimizer, loader, lr_scheduler
    )
    losses, done = [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
        losses.append(loss.item())
        if done == steps:
            break
    accelerator.save_state(output)
    accelerator.print(f"loss {losses[-1]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
