"""Image grids of samples, and animated grids of clips."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from PIL.Image import Image

_BACKGROUND = 255


def images_to_grid(
    images: torch.Tensor,
    *,
    columns: int,
    upscale: int = 1,
    gap: int = 4,
) -> Image:
    """Arrange images in a grid, optionally enlarged without smoothing.

    Args:
        images: Images (n, c, h, w) with 1 or 3 channels; values are clamped to [-1, 1].
        columns: Number of images per row.
        upscale: Integer factor by which the images are enlarged.
        gap: Number of pixels between images.

    Returns:
        A grayscale or RGB ``PIL.Image``; ``.save("grid.png")`` writes it.

    Raises:
        InvalidValueError: ``images`` has the wrong shape or is empty.
    """
    from PIL import Image as Pillow

    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise InvalidValueError(
            "must have the shape (n, 1 or 3, h, w) with n at least 1",
            "decode latents to images first",
            "images",
            tuple(images.shape),
        )
    pixels = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    height, width = (side * upscale for side in pixels.shape[2:])
    rows = -(-len(pixels) // columns)
    canvas = Pillow.new(
        "L" if pixels.shape[1] == 1 else "RGB",
        (columns * (width + gap) + gap, rows * (height + gap) + gap),
        color=_BACKGROUND if pixels.shape[1] == 1 else (_BACKGROUND,) * 3,
    )
    for index, image in enumerate(pixels):
        row, column = divmod(index, columns)
        tile = Pillow.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
        canvas.paste(
            tile.resize((width, height), Pillow.Resampling.NEAREST),
            (gap + column * (width + gap), gap + row * (height + gap)),
        )
    return canvas


# -- Clips: a grid that moves.


def animated_png(frames: Sequence[Image], *, fps: float) -> bytes:
    """Return the content of a lossless PNG animation, which browsers play.

    Args:
        frames: RGB images of one size, in order.
        fps: Frames per second.
    """
    content = io.BytesIO()
    first, *others = frames
    first.save(
        content,
        format="PNG",
        save_all=True,
        append_images=others,
        duration=1000 / fps,
        loop=0,
    )
    return content.getvalue()


def clips_to_grid(clips: torch.Tensor, *, columns: int) -> list[Image]:
    """Arrange clips in a grid, and return one image per frame.

    Args:
        clips: Clips (n, c, frames, h, w) with 1 or 3 channels; values are clamped to [-1, 1].
        columns: Number of clips per row.

    Raises:
        InvalidValueError: ``clips`` has the wrong shape or is empty.
    """
    if clips.ndim != 5:
        raise InvalidValueError(
            "must have the shape (n, 1 or 3, frames, h, w)",
            "pass images to images_to_grid",
            "clips",
            tuple(clips.shape),
        )
    return [images_to_grid(frame, columns=columns) for frame in clips.unbind(2)]
