"""A crop that depends on the image's content and is never centred."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


@attrs.frozen
class FirstLight:
    """Keep the part that begins at the first column that is not black."""

    def corner(self, image: Image, excess: tuple[int, int]) -> tuple[int, int]:
        light = np.asarray(image.convert("L")).any(axis=0)
        return min(int(light.argmax()), excess[0]), 0
