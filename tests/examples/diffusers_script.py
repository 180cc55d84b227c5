"""A script in diffusers' style, with EMA and save: a U-Net learns real digits.

It draws its noise once, so that runs can be compared loss by loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate.utils import set_seed
from diffusers import UNet2DModel
from diffusers.optimization import get_scheduler
from examples.embedding.accelerate_before import digits, new_model
from torch.utils.data import DataLoader

from zerotune import EmbeddedPlan, export_model
from zerotune.ema import EMAModel

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "scheduler": {"type": "constant_with_warmup", "params": {"num_warmup_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="outputs/diffusers")
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=50)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--adam_weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--checkpointing_steps", type=int, default=25)
    return parser.parse_args(given)


def loss_of(model, batch):
    images, noise, times = batch
    mixed = torch.lerp(images, noise, times.view(-1, 1, 1, 1))
    prediction = model(mixed.to(model.dtype), times * 1000).sample
    return torch.nn.functional.mse_loss(prediction.float(), noise - images)


def main(args: argparse.Namespace) -> list[float]:
    run = EmbeddedPlan(plan=CONFIG, run=args)
    accelerator = run.accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )

    def save_ema(_models, _weights, folder) -> None:
        ema_model.save_pretrained(Path(folder) / "unet_ema")

    accelerator.register_save_state_pre_hook(save_ema)
    set_seed(0)
    loader = DataLoader(digits(), batch_size=args.train_batch_size)
    model = new_model()
    ema_model = EMAModel(
        model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.adam_weight_decay
    )
    lr_scheduler = get_scheduler(
        "constant_with_warmup", optimizer, num_warmup_steps=args.lr_warmup_steps
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(
        model, optimizer, loader, lr_scheduler
    )
    accelerator.register_for_checkpointing(ema_model)
    output, global_step, losses = Path(args.output_dir), 0, []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            global_step += 1
            if global_step % args.checkpointing_steps == 0:
                accelerator.save_state(output / f"checkpoint-{global_step}")
        if global_step == args.max_train_steps:
            break
    accelerator.wait_for_everyone()
    export_model(output / "unet", engine=run.engine, weights=ema_model.shadow)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(parse_args())
