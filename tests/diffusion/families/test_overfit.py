"""A model trained on four photographs reproduces them from their captions.

The photographs are real and lie in a folder with captions; the VAE was trained on them, and latents
and texts are cached. ``Trainer`` trains a U-Net like SDXL's at stage 2 with CPU offload and an EMA,
and the pipeline samples the images.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.diffusion.families.overfitting import (
    learn,
    photos,
    pipeline,
    prepared_images,
    psnr,
)
from tests.support.ranks import run_ranks

NOTES = os.environ.get("ZEROTUNE_FAMILY_NOTES")

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


def drawn_after(tmp_path, *, vae_steps, steps):
    """Train; return photographs, VAE reconstructions and samples, (4, 3, 32, 32) each."""
    folder = photos(tmp_path / "photos")
    prepared = prepared_images(str(folder))
    seen = torch.stack([prepared[index]["images"] for index in range(len(prepared))])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = pipeline(tmp_path / "pipeline", seen.unique(dim=0), steps=vae_steps)
    torch.set_num_threads(threads)
    (found,) = run_ranks(
        learn, str(base), str(folder), str(tmp_path / "cache"), steps, 3e-3, timeout_s=1500
    )
    found = {name: torch.from_numpy(images) for name, images in found.items()}
    if NOTES:
        _grid(found, Path(NOTES).parent / "overfit.png")
    return found


def _grid(found, path):
    from PIL import Image

    rows = [torch.cat(list(found[name].clamp(-1, 1)), 2) for name in ("photos", "decoded", "drawn")]
    pixels = ((torch.cat(rows, 1) + 1) * 127.5).byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels)
    image.resize((5 * image.width, 5 * image.height), Image.Resampling.NEAREST).save(path)


def own_and_others(found):
    """Return each sample's PSNR to its photograph's reconstruction, and to the closest other."""
    table = [[psnr(drawn, wanted) for wanted in found["decoded"]] for drawn in found["drawn"]]
    own = [row[index] for index, row in enumerate(table)]
    others = [max(row[:index] + row[index + 1 :]) for index, row in enumerate(table)]
    return own, others


@pytest.mark.timeout(1800)
def test_training_reproduces_the_photographs(tmp_path):
    found = drawn_after(tmp_path, vae_steps=250, steps=1000)
    decoded = [psnr(a, b) for a, b in zip(found["decoded"], found["photos"], strict=True)]
    own, others = own_and_others(found)
    print("PSNR of the VAE", decoded, "of drawn images", own, "of the best other", others)
    assert min(decoded) > 28
    assert min(own) > 20, own
    assert max(others) < 16, others
