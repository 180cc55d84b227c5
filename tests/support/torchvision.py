"""The torchvision transforms that diffusers' scripts use, for machines without torchvision.

They differ only in the pixels that a script trains on, so two runs of a script are comparable.
"""

from __future__ import annotations

import enum
import importlib.util
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image


class InterpolationMode(enum.Enum):
    BILINEAR = Image.Resampling.BILINEAR
    LANCZOS = Image.Resampling.LANCZOS


class Resize:
    """Resize the shorter side to ``size``."""

    def __init__(self, size: int, interpolation: InterpolationMode = InterpolationMode.BILINEAR):
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = self.size / min(image.size)
        sides = tuple(max(self.size, round(side * scale)) for side in image.size)
        return image.resize(sides, self.interpolation.value)


class RandomCrop:
    def __init__(self, size: int):
        self.size = size

    @staticmethod
    def get_params(image: Image.Image, size: tuple[int, int]) -> tuple[int, int, int, int]:
        (height, width), (wide, high) = size, image.size
        return random.randint(0, high - height), random.randint(0, wide - width), height, width

    def __call__(self, image: Image.Image) -> Image.Image:
        return crop(image, *self.get_params(image, (self.size, self.size)))


class CenterCrop(RandomCrop):
    def __call__(self, image: Image.Image) -> Image.Image:
        top, left = ((side - self.size) // 2 for side in reversed(image.size))
        return crop(image, top, left, self.size, self.size)


def crop(image: Image.Image, top: int, left: int, height: int, width: int) -> Image.Image:
    return image.crop((left, top, left + width, top + height))


class RandomHorizontalFlip:
    def __init__(self, p: float = 0.5):
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        mirror = random.random() < self.p
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image


class Lambda:
    def __init__(self, function: Any):
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class ToTensor:
    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean: list[float], std: list[float]):
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


class Compose:
    def __init__(self, transforms: list[Any]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


def stand_in() -> None:
    """Install these as ``torchvision``, after libraries have checked whether it is available."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    transforms: Any = ModuleType("torchvision.transforms")
    transforms.__dict__.update(globals())
    transforms.functional = SimpleNamespace(crop=crop)
    sys.modules["torchvision"] = package = ModuleType("torchvision")
    package.transforms = transforms  # type: ignore[attr-defined]
    sys.modules |= {
        "torchvision.transforms": transforms,
        "torchvision.transforms.functional": transforms.functional,
    }
