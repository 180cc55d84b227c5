"""The coordinate check of mup: does the output change by as much at every width?

Prints, for each width, the mean size of the change of a U-Net's output after a few steps, under
Adam and under MuAdam with base shapes. It should not depend on the width under MuAdam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

WIDTHS = (16, 32, 64, 128)
STEPS = 4
LR = 1e-3


def unet(width: int, seed: int) -> Any:
    """A diffusers U-Net whose channels are ``width`` and twice that."""
    from diffusers import UNet2DModel

    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )


def change(width: int, *, mup: bool, seed: int = 0) -> float:
    """Mean absolute change of the output after ``STEPS`` steps towards random targets."""
    model = unet(width, seed)
    parameters = list(model.parameters())
    if mup:
        from mup import MuAdam

        from zerotune.backend.mup import set_base_shapes

        set_base_shapes(
            model,
            base={"block_out_channels": (16, 32)},
            delta={"block_out_channels": (32, 64)},
        )
        optimizer: torch.optim.Optimizer = MuAdam(parameters, lr=LR)
    else:
        optimizer = torch.optim.Adam(parameters, lr=LR)
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(4, 1, 8, 8, generator=generator) for _ in range(2))
    with torch.no_grad():
        before = model(x, 10).sample
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x, 10).sample, target).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(x, 10).sample - before).abs().mean())


def growth(*, mup: bool, widths: Sequence[int], seeds: int = 2) -> float:
    """Factor by which the change grows per doubling of the width."""
    first, last = (
        sum(change(width, mup=mup, seed=seed) for seed in range(seeds))
        for width in (widths[0], widths[-1])
    )
    return (last / first) ** (1 / math.log2(widths[-1] / widths[0]))


def main() -> None:
    print("| width | Adam | MuAdam |\n|---|---|---|")
    for width in WIDTHS:
        plain, scaled = (
            sum(change(width, mup=mup, seed=seed) for seed in range(3)) / 3 for mup in (False, True)
        )
        print(f"| {width} | {plain:.4f} | {scaled:.4f} |", flush=True)


if __name__ == "__main__":
    main()
