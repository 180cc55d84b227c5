"""Small models with unusual shapes, and real data that ships with ordinary packages."""

from __future__ import annotations

from typing import Any

import torch


def tiny_unet(seed: int = 0, channels: tuple[int, int] = (8, 16)) -> Any:
    """Return a diffusers U-Net with attention and classes; 50,000 parameters by default."""
    from diffusers import UNet2DModel

    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=channels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
        num_class_embeds=11,
    )


class HostileNet(torch.nn.Module):
    """Odd sizes, a 0-d and a 1-element parameter, a frozen layer, tied weights, 4-D kernels.

    DeepSpeed refuses 0-d parameters; ``scalar=False`` makes it 1-d.
    """

    def __init__(self, seed: int = 0, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = torch.nn.Conv2d(1, 3, 3, padding=1)
        self.frozen = torch.nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.first = torch.nn.Linear(7, 13)
        self.second = torch.nn.Linear(13, 7)
        self.tied = torch.nn.Linear(7, 13, bias=False)
        self.tied.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.full(() if scalar else (1,), 1.5))
        self.single = torch.nn.Parameter(torch.tensor([0.25]))

    def forward(self, x_b77: torch.Tensor) -> torch.Tensor:
        features = self.convolution(x_b77.unsqueeze(1)).mean(1)
        hidden = torch.tanh(self.first(self.frozen(features)))
        hidden = hidden + self.tied(features)
        return self.second(hidden) * self.scale + self.single


class WideNet(HostileNet):
    """Layers of more than 1 MiB on each of two ranks: DeepSpeed swaps nothing smaller."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, scalar=False)
        self.entry = torch.nn.Linear(49, 760)
        self.wide = torch.nn.ModuleList(torch.nn.Linear(760, 760) for _ in range(2))
        self.exit = torch.nn.Linear(760, 49)

    def forward(self, x_b77: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.entry(x_b77.flatten(1)))
        for layer in self.wide:
            hidden = torch.tanh(layer(hidden))
        return super().forward(x_b77) + self.exit(hidden).view_as(x_b77)


class Ranked(torch.nn.Module):
    """A model that counts its forward passes and belongs to a group, as an engine does."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, model, group):
        super().__init__()
        self.module, self.group, self.calls = model, group, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.module(*args, **kwargs)


def digits_batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return real handwritten digits: images (b, 1, 8, 8) in [-1, 1] and labels (b,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed))[:size]
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    return images, torch.tensor(data.target)[order].long()
