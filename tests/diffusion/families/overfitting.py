"""Overfit four captioned photographs through the whole library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import pipelines
from zerotune import DeepSpeedPlan, EMAShadow, Trainer
from zerotune.diffusion import encode_dataset, load_pretrained, sample
from zerotune.diffusion.data import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.data.sources import RepeatedSource

SIDE = 32
REPEATS = 2
PHOTOS = {
    "astronaut": "an astronaut",
    "chelsea": "a cat",
    "coffee": "coffee",
    "motorcycle_left": "a motorcycle",
}


def photos(folder: Path) -> Path:
    """Write the centres of scikit-image's photographs, 32 by 32, with captions beside them."""
    import skimage
    from PIL import Image

    folder.mkdir()
    for name, caption in PHOTOS.items():
        image = Image.open(Path(skimage.__file__).parent / "data" / f"{name}.png").convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.crop((left, top, left + side, top + side))
        square.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption)
    return folder


def pipeline(folder: Path, images: torch.Tensor, *, steps: int) -> Path:
    """Write a tiny SDXL with a VAE trained on the images and an untrained U-Net."""
    from diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained(pipelines.sdxl(folder / "random"))
    vae, unet = _models()
    pipe.register_modules(vae=vae, unet=unet)
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for _ in range(steps):
        latents = vae.encode(images).latent_dist.mode()
        # Keep latents at about unit size after scaling, as a real VAE's are.
        spread = latents.pow(2).mean() / 0.13025**-2
        loss = torch.nn.functional.mse_loss(vae.decode(latents).sample, images)
        (loss + 1e-3 * (spread.log() ** 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    pipe.save_pretrained(folder / "trained")
    return folder / "trained"


def _models() -> tuple[Any, Any]:
    """Build a VAE that shrinks each side to a quarter, and a U-Net like SDXL's, 1.0 M weights."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    torch.manual_seed(3)
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 32), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        sample_size=SIDE, scaling_factor=0.13025,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIDE // 4, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=64,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1), use_linear_projection=True,
        projection_class_embeddings_input_dim=32 + 6 * 8,
    )  # fmt: skip
    return vae, unet


def learn(folder: str, images: str, cache: str, steps: int, lr: float) -> dict[str, Any]:
    """Cache, train at stage 2 with CPU offload and EMA, and sample; images (4, 3, 32, 32) each."""
    from diffusers import DDPMScheduler

    loaded = load_pretrained(folder, frozen_dtype="fp32")
    prepared = prepared_images(images)
    cached = encode_dataset(prepared, family=loaded.family, folder=cache, progress=False)
    scheduler = DDPMScheduler.from_config(
        loaded.scheduler.config, prediction_type="v_prediction", rescale_betas_zero_snr=True
    )
    objective = loaded.objective(scheduler=scheduler)
    falling = {"total_num_steps": steps, "warmup_num_steps": 20, "cos_min_ratio": 0.01}
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", micro_batch_size=4 * REPEATS,
        optimizer={"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        scheduler={"type": "WarmupCosineLR", "params": falling},
    )  # fmt: skip
    ema = EMAShadow(decay=0.98)
    with Trainer(
        model=loaded.model, plan=plan, data=cached, objective=objective, ema=ema, callbacks=[]
    ) as trainer:
        trainer.fit(steps=steps)
        with ema.swapped_in():
            drawn = sample(
                trainer.engine, family=loaded.family, prompts=list(PHOTOS.values()),
                steps=30, size=(SIDE, SIDE), trained_with=scheduler,
            )  # fmt: skip
    order = [prepared.source.item(index).caption for index in range(len(prepared))]
    at = [order.index(caption) for caption in PHOTOS.values()]
    pixels = torch.stack([prepared[index]["images"] for index in at])
    latents = torch.stack([cached[index]["latents"] for index in at])
    decoded = loaded.family.parts.decode_latents(latents)
    found = {"photos": pixels, "decoded": decoded, "drawn": drawn}
    # Return arrays: tensors would be fetched from this process after it has ended.
    return {name: images.numpy() for name, images in found.items()}


def prepared_images(folder: str) -> PreparedImages:
    """Put the photographs into one bucket, each several times in a batch."""
    source = RepeatedSource(ImageFolder(folder), times=REPEATS)
    return PreparedImages(source, buckets=AspectBuckets(area=SIDE * SIDE, step=SIDE))


def psnr(image: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of images in [-1, 1], in dB."""
    error = (image.clamp(-1, 1) - wanted.clamp(-1, 1)).pow(2).mean()
    return float(10 * torch.log10(4 / error))
