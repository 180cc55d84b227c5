"""Learn a new word for SD 1.5 or SDXL: train embeddings of CLIP (textual inversion), nothing else.

    torchrun examples/recipes/textual_inversion.py --base SDXL --data photos --output runs/zoe \
        --word zoe --like person --vectors 4 --steps 2000

The word stands before each caption. diffusers reads the result: learned.safetensors for SD 1.5; for
SDXL, its tensor clip_l belongs to text_encoder and clip_g to text_encoder_2. To resume a stopped
run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import zerotune
from zerotune import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.data import Augmentation

KEYS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}


class Extended(torch.nn.Embedding):
    """A frozen embedding whose last words are trained."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Look each word up among the known or among the learned ones."""
        known = words < self.num_embeddings
        old = super().forward(torch.where(known, words, 0))
        learned = self.learned[(words - self.num_embeddings).clamp(min=0)]
        return torch.where(known[..., None], old, learned.to(old.dtype))


def extend(encoder: Any, tokenizer: Any, names: Sequence[str], like: str) -> None:
    """Add words to a text encoder; all begin as the embedding of a known word."""
    embedding = encoder.get_input_embeddings()
    (first, *_) = tokenizer(like, add_special_tokens=False).input_ids
    if tokenizer.add_tokens(list(names)) != len(names):
        raise SystemExit(f"--word {names[0]}: the tokenizer knows this word; choose another")
    if tokenizer.convert_tokens_to_ids(names[0]) != embedding.num_embeddings:
        raise SystemExit("the tokenizer and the embedding of the text encoder differ in size")
    embedding.__class__ = Extended  # The names of its weights stay.
    start = embedding.weight[first].detach().repeat(len(names), 1)
    embedding.learned = torch.nn.Parameter(start)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    optimizer = {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.0}}
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, precision="bf16", micro_batch_size=options.batch, optimizer=optimizer
    )
    loaded = zerotune.load_pretrained(options.base, text_encoders=True)
    loaded.model.requires_grad_(False)
    _, *encoders = loaded.model.names
    # diffusers names the vectors of a word so, and writes them in a prompt for the word.
    names = [options.word, *(f"{options.word}_{number}" for number in range(1, options.vectors))]
    pipeline = loaded.family.parts.pipeline
    for encoder in encoders:
        tokenizer = getattr(pipeline, encoder.replace("text_encoder", "tokenizer"))
        extend(loaded.model[encoder], tokenizer, names, options.like)

    images = PreparedImages(
        ImageFolder(options.data),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(prefix=" ".join(names) + " "),
    )
    # Only latents are cached, because embeddings change.
    cache = options.output / "cache"
    data = zerotune.encode_dataset(images, family=loaded.family, folder=cache)
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded, plan=plan, data=data, callbacks=[saving]
    ) as trainer:  # fmt: skip
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        learned = {
            name.partition(".")[0]: weight.clone().contiguous()
            for name, weight in trainer.engine.master_weights.gather()
        }
        if trainer.engine.group.rank == 0:
            keys = KEYS if len(encoders) > 1 else {encoders[0]: options.word}
            found = {keys[encoder]: learned[encoder] for encoder in encoders}
            save_file(found, options.output / "learned.safetensors")
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="images, maybe with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--word", required=True, help="the new word")
    parser.add_argument("--like", required=True, help="a known word to begin with")
    parser.add_argument("--lr", type=float, default=5e-4)
    sizes = {"steps": 2000, "every": 500, "vectors": 1, "stage": 0, "batch": 1}
    sizes |= {"area": 1024 * 1024, "bucket-step": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
