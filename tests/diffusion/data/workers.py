"""What the ranks of these tests do; in a module of its own, so that processes can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerotune import DeepSpeedPlan, FlowMatchingObjective, Trainer, Unconditional
from zerotune.diffusion import AnimatedPNG, encode_dataset, load_pretrained
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    CachedImages,
    CacheSettings,
    ClipBuckets,
    ClipFolder,
    ImageFolder,
    PreparedClips,
    PreparedImages,
    TensorCache,
    WholeImage,
    cache_latents,
)
from zerotune.training.validate import ValidationImages, ValidationLoss


def color_unet() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


class Watched:
    """An objective that keeps the captions and shapes of what it was given."""

    def __init__(self) -> None:
        self._objective = FlowMatchingObjective(family=Unconditional())
        self.seen: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    def __call__(self, engine: Any, batch: Any, generator: torch.Generator) -> Any:
        self.seen.append((tuple(batch["captions"]), tuple(batch["images"].shape[2:])))
        return self._objective(engine, batch, generator)


def pictures(folder: str) -> PreparedImages:
    return PreparedImages(
        ImageFolder(folder),
        buckets=AspectBuckets(area=32 * 32, step=8),
        minimum=2,
        augmentation=Augmentation(flip=0.5),
    )


def train(folder: str, checkpoint: str, resume: bool, steps: int) -> list[Any]:
    """Captions and sizes that this rank saw; saves at the end."""
    objective = Watched()
    trainer = Trainer(
        model=color_unet(),
        plan=DeepSpeedPlan.build(
            stage=0, precision="fp32", train_batch_size=4, micro_batch_size=2,
            gradient_accumulation_steps=None,
        ),
        data=pictures(folder),
        objective=objective,
        callbacks=[],
        deepspeed=False,
        seed=3,
    )  # fmt: skip
    with trainer:
        if resume:
            trainer.resume(checkpoint)
        trainer.fit(steps=steps)
        if not resume:
            trainer.save(checkpoint)
    return objective.seen


class Counting(WholeImage):
    """Writes a line for each file that it looks at, from whatever process."""

    log: Path

    def size(self, file: Any) -> Any:
        with self.log.open("a") as lines:
            lines.write("looked\n")
        return super().size(file)


def open_counted(folder: str, log: str) -> list[Any]:
    Counting.log = Path(log)
    source = ImageFolder(folder, check=Counting())
    return [source.item(index) for index in range(len(source))]


def validate(folder: str, cache: str) -> dict[str, list[tuple[int, float]]]:
    """The held-out losses of images, and of a cache of them, before and after a step."""
    images = pictures(folder)
    settings = CacheSettings(kind="latents", model="pixels", dtype="float32")
    stored = TensorCache(cache, settings=settings)
    cache_latents(images, cache=stored, encode=lambda pixels: {"images": pixels})
    datasets = {"images": images, "cached": CachedImages(images, latents=stored)}
    plan = DeepSpeedPlan.build(stage=0, precision="fp32", micro_batch_size=4)
    held = {name: ValidationLoss(every=1, data=data, batches=3) for name, data in datasets.items()}
    with Trainer(
        model=color_unet(),
        plan=plan,
        data=images,
        objective=FlowMatchingObjective(family=Unconditional()),
        callbacks=[*held.values()],
        deepspeed=False,
    ) as trainer:
        trainer.fit(steps=1)
    return {name: each.history for name, each in held.items()}


def train_clips(model: str, clips: str, folder: str) -> dict[str, Any]:
    """Folders of frames to caches, two steps of a clips' model at stage 2, and previews."""
    loaded = load_pretrained(model, frozen_dtype="fp32")
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    buckets = ClipBuckets(
        sizes=AspectBuckets(area=16 * 16, step=8),
        frames=(5,),
        compression=loaded.family.parts.latents.frames,
    )
    cached = encode_dataset(
        PreparedClips(ClipFolder(clips), buckets=buckets),
        family=loaded.family,
        folder=f"{folder}/cache",
        progress=False,
    )
    objective, shapes = loaded.objective(), []

    def watched(engine: Any, batch: Any, generator: torch.Generator) -> Any:
        shapes.append(tuple(batch["latents"].shape))
        return objective(engine, batch, generator)

    watched.family, watched.scheduler = loaded.family, objective.scheduler  # type: ignore[attr-defined]
    plan = DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="fp32",
        micro_batch_size=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
    )
    previews = ValidationImages(
        every=2, folder=f"{folder}/previews", prompts=["a long one"], frames=3, size=(16, 16),
        steps=1, clips=AnimatedPNG(fps=8),
    )  # fmt: skip
    with Trainer(
        model=loaded.model, plan=plan, data=cached, objective=watched, callbacks=[previews]
    ) as trainer:
        report = trainer.fit(steps=2)
        trained = dict(trainer.engine.master_weights.gather())
        return {
            "losses": [float(loss) for loss in trainer.report().losses],
            "moved": sum(not torch.equal(trained[n].cpu(), before[n]) for n in before),
            "shapes": shapes,
            "report": str(report),
        }
