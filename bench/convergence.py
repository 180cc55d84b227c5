"""Held-out losses of AdamW with 8-bit moments: zerotune's, bitsandbytes', and fp32 moments.

Two small models of diffusers are trained on digits and on photos. All contestants of a seed begin
with the same weights, and see the same samples and noise. ``python -m bench.convergence --seed 0``
adds the runs of a seed to ``docs/results/convergence.json``, and prints the table of all runs that
``docs/streaming.md`` contains. It needs bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch

EXACT, OURS, THEIRS = "fp32 moments", "AdamW8BitStates", "bitsandbytes' AdamW8bit"
RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "convergence.json"
RATE, DECAY, STEPS = 1e-3, 0.01, 3000
CHECKED = (300, 1000, 2000, STEPS)
"""Steps after which the held-out loss is computed."""
SIDE, HELD_OUT, CHUNK = 12, 512, 128
UNET = {
    "sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1,
    "block_out_channels": (32, 64), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "norm_num_groups": 16,
    "attention_head_dim": 16, "num_class_embeds": 10,
}  # fmt: skip
FLUX = {
    "patch_size": 1, "in_channels": 12, "num_layers": 1, "num_single_layers": 2,
    "attention_head_dim": 20, "num_attention_heads": 4, "joint_attention_dim": 32,
    "pooled_projection_dim": 32, "axes_dims_rope": (4, 8, 8),
}  # fmt: skip


@attrs.frozen(eq=False)
class Samples:
    """Images from -1 to 1, their classes, and the noise and times of held-out ones."""

    images: torch.Tensor
    classes: torch.Tensor

    def drawn(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return a random batch: images, classes, noise, and times from 0 to 1."""
        rows = torch.randint(len(self.images), (size,), generator=generator)
        return self.noised(rows, generator)

    def noised(self, rows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return rows with random noise and times."""
        images = self.images[rows]
        noise = torch.randn(images.shape, generator=generator)
        return images, self.classes[rows], noise, torch.rand(len(rows), generator=generator)


def digits() -> tuple[Samples, Samples]:
    """Return scikit-learn's digits: training data, and held-out data."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.images), generator=seeded(0))
    images = torch.from_numpy(found.images).float()[order, None] / 8 - 1
    classes = torch.from_numpy(found.target)[order]
    return Samples(images[:-360], classes[:-360]), Samples(images[-360:], classes[-360:])


def photos() -> tuple[Samples, Samples]:
    """Return crops of six photos: the left three quarters for training, the rest held out."""
    import skimage.data
    from sklearn.datasets import load_sample_image

    found = [getattr(skimage.data, n)() for n in ("astronaut", "coffee", "chelsea", "rocket")]
    found += [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]

    def crops(count: int, seed: int, *, held: bool) -> Samples:
        random, images, classes = np.random.default_rng(seed), [], []
        for _ in range(count):
            number = int(random.integers(len(found)))
            photo = found[number][::2, ::2]
            height, width = photo.shape[:2]
            cut = int(width * 0.75)
            low, high = (cut, width) if held else (0, cut)
            y = int(random.integers(height - SIDE + 1))
            x = int(random.integers(low, high - SIDE + 1))
            images.append(photo[y : y + SIDE, x : x + SIDE])
            classes.append(number)
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return Samples(pixels.float() / 127.5 - 1, torch.tensor(classes))

    return crops(4096, 0, held=False), crops(HELD_OUT, 1, held=True)


def unet() -> torch.nn.Module:
    """Return a U-Net like that of DDPM."""
    from diffusers import UNet2DModel

    model: torch.nn.Module = UNet2DModel(**UNET)
    return model


def flux() -> torch.nn.Module:
    """Return a transformer like Flux's."""
    from diffusers import FluxTransformer2DModel

    model: torch.nn.Module = FluxTransformer2DModel(**FLUX)
    return model


def loss_of_unet(model: Any, images: Any, classes: Any, noise: Any, times: Any) -> torch.Tensor:
    """Return the error of the predicted noise, with a cosine schedule."""
    angles = (times * math.pi / 2).view(-1, 1, 1, 1)
    mixed = torch.cos(angles) * images + torch.sin(angles) * noise
    found = model(mixed, (times * 999).long(), class_labels=classes).sample
    return (found - noise).square().mean()


def loss_of_flux(model: Any, images: Any, classes: Any, noise: Any, times: Any) -> torch.Tensor:
    """Return the error of the predicted velocity, with logit-normal times."""
    count, side = len(images), SIDE // 2

    def packed(pixels: torch.Tensor) -> torch.Tensor:
        squares = pixels.view(count, 3, side, 2, side, 2).permute(0, 2, 4, 1, 3, 5)
        return squares.reshape(count, side * side, 12)

    shares = torch.sigmoid(torch.special.ndtri(times.clamp(1e-4, 1 - 1e-4)))
    clean, random, share = packed(images), packed(noise), shares.view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()
    texts = torch.randn(10, 32, generator=seeded(9))[classes]
    found = model(
        hidden_states=(1 - share) * clean + share * random, timestep=shares, img_ids=places,
        encoder_hidden_states=texts[:, None].expand(-1, 2, -1), txt_ids=torch.zeros(2, 3),
        pooled_projections=texts,
    ).sample  # fmt: skip
    return (found - (random - clean)).square().mean()


MODELS: Final[dict[str, tuple[Any, Any, Any, int]]] = {
    "U-Net, digits": (unet, digits, loss_of_unet, 12),
    "Flux, photos": (flux, photos, loss_of_flux, 8),
}
"""Models: what builds it, loads its data and computes its loss, and the batch size."""


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU."""
    return torch.Generator().manual_seed(seed)


class OneSlab:
    """``AdamW8BitStates`` on all weights of a model in one slab, as on a streamed unit."""

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        from zerotune.backend.optimizers.classes import BLOCK, AdamW8BitStates
        from zerotune.backend.step.adams import Host8BitAdam, WholeMasters
        from zerotune.backend.step.kernel import load_host_step

        starts = [0]
        for weight in weights:
            starts.append(starts[-1] + -(-weight.numel() // BLOCK) * BLOCK)
        self._slab = torch.nn.Parameter(torch.zeros(starts[-1]))
        self._gradient = torch.zeros(starts[-1])
        for weight, start in zip(weights, starts, strict=False):
            part = slice(start, start + weight.numel())
            self._slab.data[part] = weight.data.view(-1)
            weight.data = self._slab.data[part].view(weight.shape)
            weight.grad = self._gradient[part].view(weight.shape)
        self._adam = AdamW8BitStates([self._slab], lr=RATE, weight_decay=DECAY)
        self._host = Host8BitAdam(op=load_host_step(), adam=self._adam)
        self._masters = WholeMasters(self._slab.data)

    def step(self) -> None:
        """Update all weights."""
        from zerotune.backend.step.kernel import Piece

        begun = self._host.begin(
            self._slab, gradient=self._gradient, group=self._adam.param_groups[0], factor=1.0,
            out=None, masters=self._masters, places=[(0, 0)],
        )  # fmt: skip
        begun.run([Piece(0, self._slab.numel())])

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._gradient.zero_()


def exact(weights: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=True)


def theirs(weights: Sequence[torch.nn.Parameter]) -> Any:
    """Return bitsandbytes' AdamW8bit, with fp32 moments for fewer than 4,096 weights."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(weights, lr=RATE, weight_decay=DECAY)


CONTESTANTS: Final[dict[str, Callable[..., Any]]] = {EXACT: exact, THEIRS: theirs, OURS: OneSlab}


def train(name: str, contestant: str, seed: int) -> tuple[dict[str, float], torch.Tensor]:
    """Return held-out losses by step, and the change of all weights."""
    build, load, loss_of, batch = MODELS[name]
    torch.manual_seed(seed)
    model = build()
    before = torch.cat([p.data.reshape(-1).clone() for p in model.parameters()])
    optimizer = CONTESTANTS[contestant](list(model.parameters()))
    samples, held = load()
    generator, losses = seeded(seed + 100), {}
    last = held.noised(torch.arange(len(held.images)), seeded(77))

    @torch.no_grad()
    def held_out() -> float:
        parts = [tuple(each.split(CHUNK)) for each in last]
        found = [(float(loss_of(model, *part)), len(part[0])) for part in zip(*parts, strict=True)]
        return sum(loss * size for loss, size in found) / len(last[0])

    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, *samples.drawn(batch, generator)).backward()
        optimizer.step()
        if step in CHECKED:
            losses[str(step)] = held_out()
    return losses, torch.cat([p.data.reshape(-1) for p in model.parameters()]) - before


def run(name: str, seed: int, contestants: Sequence[str], results: Path) -> None:
    """Train contestants, and add their losses, and cosines with ``EXACT``, to the results."""
    changes: dict[str, torch.Tensor] = {}
    for contestant in contestants:
        losses, changes[contestant] = train(name, contestant, seed)
        row = {"model": name, "contestant": contestant, "seed": seed, "losses": losses}
        if EXACT in changes:
            pair = changes[EXACT], changes[contestant]
            row["cosine"] = float(torch.nn.functional.cosine_similarity(*pair, dim=0))
        rows = json.loads(results.read_text()) if results.exists() else []
        kept = [r for r in rows if key_of(r) != key_of(row)]
        write(results, [*kept, row])
        print(json.dumps(row), flush=True)


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """Return what identifies a run."""
    return row["model"], row["contestant"], row["seed"]


def write(results: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write runs, one a line."""
    lines = map(json.dumps, sorted(rows, key=key_of))
    results.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return mean losses over seeds, with the standard deviation, in Markdown."""
    lines = [
        f"| model | moments | {' | '.join(f'{step:,} steps' for step in CHECKED)} | cosine |",
        f"|---|---|{'--:|' * (len(CHECKED) + 1)}",
    ]
    for name in MODELS:
        for contestant in CONTESTANTS:
            of = [r for r in rows if (r["model"], r["contestant"]) == (name, contestant)]
            if not of:
                continue
            cells = []
            for step in CHECKED:
                losses = [r["losses"][str(step)] for r in of]
                spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
                cells.append(f"{statistics.mean(losses):.4f} ± {spread:.4f}")
            cosine = statistics.mean(r["cosine"] for r in of)
            lines.append(f"| {name} | {contestant} | {' | '.join(cells)} | {cosine:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", default=[])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--contestant", choices=CONTESTANTS, action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    told = parser.parse_args()
    torch.set_num_threads(1)
    for seed in told.seed:
        for name in told.model or MODELS:
            run(name, seed, told.contestant or list(CONTESTANTS), told.results)
    print(table(json.loads(told.results.read_text())))


if __name__ == "__main__":
    main()
