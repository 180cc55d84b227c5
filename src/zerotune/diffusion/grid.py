"""Image grids of samples, and animated grids of clips."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from zerotune._util.text import positive, validated
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

_BACKGROUND = 255
_INK = 0


def images_to_grid(
    images: torch.Tensor,
    *,
    columns: int,
    row_labels: Sequence[str] = (),
    upscale: int = 1,
    gap: int = 4,
) -> Image:
    """Arrange images in a grid, optionally enlarged without smoothing.

    Args:
        images: Images (n, c, h, w) with 1 or 3 channels; values are clamped to [-1, 1].
        columns: Number of images per row.
        row_labels: Labels to the left of the rows, from top to bottom; if there are fewer labels
            than rows, the last rows have none.
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
            key="images",
            value=tuple(images.shape),
            fix="decode latents to images first",
        )
    pixels = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    height, width = (side * upscale for side in pixels.shape[2:])
    rows = -(-len(pixels) // columns)
    margin = _label_margin(row_labels, height)
    canvas = Pillow.new(
        "L" if pixels.shape[1] == 1 else "RGB",
        (margin + columns * (width + gap) + gap, rows * (height + gap) + gap),
        color=_BACKGROUND if pixels.shape[1] == 1 else (_BACKGROUND,) * 3,
    )
    for index, image in enumerate(pixels):
        row, column = divmod(index, columns)
        tile = Pillow.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
        canvas.paste(
            tile.resize((width, height), Pillow.Resampling.NEAREST),
            (margin + gap + column * (width + gap), gap + row * (height + gap)),
        )
    _write_labels(canvas, row_labels[:rows], margin, height, gap)
    return canvas


# -- Clips: a grid that moves.


class ClipFormat(Protocol):
    """Protocol: a file format for a grid of clips."""

    @property
    def suffix(self) -> str:
        """File name extension, including the dot."""
        ...

    def encode(self, frames: Sequence[Image]) -> bytes:
        """Return the content of a file with the given frames.

        Args:
            frames: Images of equal size, in order.
        """
        ...


@attrs.frozen(kw_only=True)
class AnimatedPNG:
    """A lossless PNG animation that browsers can play; encoding requires only Pillow."""

    fps: float = attrs.field(default=16.0, validator=validated(positive, fix="write 16"))
    """Frames per second."""
    suffix: str = attrs.field(default=".png", init=False)

    def encode(self, frames: Sequence[Image]) -> bytes:
        """Return the content of a PNG file with the given frames.

        Args:
            frames: RGB images of one size.
        """
        content = io.BytesIO()
        first, *others = frames
        first.save(
            content,
            format="PNG",
            save_all=True,
            append_images=others,
            duration=1000 / self.fps,
            loop=0,
        )
        return content.getvalue()


@attrs.frozen(kw_only=True)
class MP4:
    """A small, lossy video file: H.264, or MPEG-4 if PyAV has no H.264 encoder.

    Raises:
        MissingDependencyError: PyAV is not installed; raised by ``encode``.
    """

    fps: float = attrs.field(default=16.0, validator=validated(positive, fix="write 16"))
    """Frames per second."""
    suffix: str = attrs.field(default=".mp4", init=False)

    def encode(self, frames: Sequence[Image]) -> bytes:
        """Return the content of an MP4 file; an odd width or height is padded by one pixel."""
        if not _has_av():
            raise MissingDependencyError(
                "is not installed but is required to write MP4",
                key="av",
                fix="run pip install 'zerotune[video]', or pass AnimatedPNG()",
            )
        av: Any = importlib.import_module("av")
        content = io.BytesIO()
        with av.open(content, "w", format="mp4") as container:
            kind = "libx264" if "libx264" in av.codecs_available else "mpeg4"
            rate = Fraction(self.fps).limit_denominator(1001)
            stream = container.add_stream(kind, rate=rate, options={"crf": "18"})
            pictures = [_even_sides(frame.convert("RGB")) for frame in frames]
            stream.width, stream.height = pictures[0].size
            stream.pix_fmt = "yuv420p"
            for picture in pictures:
                container.mux(stream.encode(av.VideoFrame.from_image(picture)))
            container.mux(stream.encode(None))
        return content.getvalue()


def clip_format(fps: float) -> tuple[ClipFormat, Decision]:
    """Return this installation's default clip format, and a decision that gives the reason."""
    if _has_av():
        reason = "PyAV is installed"
        return MP4(fps=fps), _format_decision(".mp4", reason)
    reason = "MP4 needs PyAV, which is not installed (zerotune[video])"
    return AnimatedPNG(fps=fps), _format_decision("animated .png", reason)


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
            key="clips",
            value=tuple(clips.shape),
            fix="pass images to images_to_grid",
        )
    return [images_to_grid(frame, columns=columns) for frame in clips.unbind(2)]


def _has_av() -> bool:
    return importlib.util.find_spec("av") is not None


def _format_decision(after: str, reason: str) -> Decision:
    return Decision(key="validation.clips", before=None, after=after, reason=reason)


def _even_sides(picture: Image) -> Image:
    # Colours have half the resolution, so both sides must be even.
    width, height = picture.size
    if width % 2 == 0 and height % 2 == 0:
        return picture
    from PIL import Image as Pillow

    wider = Pillow.new("RGB", (width + width % 2, height + height % 2))
    for place in ((width % 2, height % 2), (0, height % 2), (width % 2, 0), (0, 0)):
        wider.paste(picture, place)
    return wider


def _font_size(height: int) -> int:
    return max(10, height // 2)


def _label_margin(labels: Sequence[str], height: int) -> int:
    longest = max((len(label) for label in labels), default=0)
    return 0 if longest == 0 else round(0.7 * _font_size(height) * longest) + 8


def _write_labels(canvas: Image, labels: Sequence[str], margin: int, height: int, gap: int) -> None:
    if not labels:
        return
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=_font_size(height))
    ink = _INK if canvas.mode == "L" else (_INK,) * 3
    for row, label in enumerate(labels):
        middle = gap + row * (height + gap) + height // 2
        draw.text((margin // 2, middle), label, fill=ink, font=font, anchor="mm")
