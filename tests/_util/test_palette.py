"""The palette's colours are distinguishable, with and without colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from zerotune._util import palette
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform

# Matrices for linear RGB from Machado, Oliveira and Fernandes (2009), severity 1.0.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def seen(colour: str, sight: np.ndarray) -> np.ndarray:
    """Convert a colour to CIELAB, optionally as a colour-blind person sees it."""
    coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(sight @ linear, 0, 1) / WHITE
    root = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the CIEDE2000 difference, in the notation of Sharma, Wu and Dalal (2005)."""
    mean = (np.hypot(*one[1:]) + np.hypot(*other[1:])) / 2
    grow = 1 + 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    c1, c2 = np.hypot(one[1] * grow, one[2]), np.hypot(other[1] * grow, other[2])
    h1 = np.degrees(np.arctan2(one[2], one[1] * grow)) % 360
    h2 = np.degrees(np.arctan2(other[2], other[1] * grow)) % 360
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    lightness, chroma = other[0] - one[0], c2 - c1
    hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    light, strong = (one[0] + other[0]) / 2, (c1 + c2) / 2
    middle = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    weight = (
        1
        - 0.17 * np.cos(np.radians(middle - 30))
        + 0.24 * np.cos(np.radians(2 * middle))
        + 0.32 * np.cos(np.radians(3 * middle + 6))
        - 0.20 * np.cos(np.radians(4 * middle - 63))
    )
    bend = -2 * np.sqrt(strong**7 / (strong**7 + 25.0**7))
    bend *= np.sin(np.radians(60 * np.exp(-(((middle - 275) / 25) ** 2))))
    parts = (
        lightness / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)),
        chroma / (1 + 0.045 * strong),
        hue / (1 + 0.015 * strong * weight),
    )
    return float(np.sqrt(sum(part**2 for part in parts) + bend * parts[1] * parts[2]))


@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_are_distinguishable(sight):
    # Any two segments can touch, since those between them may be empty. No plan has both of these:
    colours = dict(palette.COMPONENTS)
    del colours["streamed weights"]
    labs = {name: seen(colour, SIGHTS[sight]) for name, colour in colours.items()}
    close = {
        pair: round(difference(labs[pair[0]], labs[pair[1]]), 1) for pair in combinations(labs, 2)
    }
    assert {pair: found for pair, found in close.items() if found < 15} == {}


def test_every_component_of_the_memory_model_has_a_colour():
    found = set()
    for accelerator in ("cuda", "cpu"):
        for stage, offload, param in (
            (0, "none", "none"), (1, "cpu", "none"), (2, "cpu", "none"),
            (3, "cpu", "cpu"), (3, "nvme", "nvme"), (3, "none", "none"),
        ):  # fmt: skip
            plan = DeepSpeedPlan.build(
                stage=stage, offload=offload, offload_param=param, gradient_accumulation_steps=2
            )
            estimate = plan.estimate(
                "sdxl", platform=Platform.synthetic(accelerator), world_size=2, ema="host",
                frozen_bytes=1,
            )  # fmt: skip
            found |= {item.component for item in estimate.items}
    assert found <= set(palette.COMPONENTS)


def test_unknown_components_get_distinct_colours():
    colours = palette.component_colours(["weights", "a", "b", "a"])
    assert colours["weights"] == palette.COMPONENTS["weights"]
    assert colours["a"] != colours["b"]
