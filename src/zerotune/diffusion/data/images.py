"""Decode images to upright RGB, and find broken files."""

from __future__ import annotations

import importlib
import io
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal

import attrs

from zerotune._util.files import open_regular, reading_regular, system_errors
from zerotune.diffusion.data.buckets import Size
from zerotune.errors import DataError, InvalidValueError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
"""File extensions of images, matched case-insensitively."""
_SWAPPED = frozenset((5, 6, 7, 8))
_ORIENTATION = 0x0112  # EXIF tag
_WITH_ORIENTATION = frozenset(("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"))
"""Keys of ``Image.info`` from which Pillow reads an orientation."""
_SCALED = frozenset(("JPEG", "MPO"))


@attrs.frozen(kw_only=True)
class BrokenImage:
    """A file or record that cannot be decoded."""

    name: str
    reason: str


OnBroken = Literal["skip", "error"]
"""Whether a source skips broken images, or stops at the first one."""
Check = Literal["complete", "whole", "header"]
"""How image files are checked. ``"complete"`` finds truncated files: it reads header and end of a
JPEG file, and decodes files of other formats. ``"whole"`` decodes every file, and ``"header"`` only
reads headers. PNG files are always read completely, because the orientation may be stored at the
end."""


def check_choice(value: Any, known: Sequence[str], *, key: str) -> None:
    """Check that a setting has one of its values."""
    if value not in known:
        raise InvalidValueError(
            "is not a known value", f"write one of {', '.join(map(repr, known))}", key, value
        )


def image_size(file: Path | str | bytes, check: Check) -> Size:
    """Return the width and height of an upright image; Pillow's errors propagate.

    Args:
        file: Path or bytes of an encoded image.
        check: How much of the file is read.
    """
    found = None if check == "whole" else _size_of_jpeg(file, check)
    if found is not None:
        return found
    with _open(file) as image:
        width, height = image.size
        orientation = _orientation(image)
        if check == "complete" and image.format == "JPEG":
            image.fp.seek(-2, os.SEEK_END)
            check = "header" if image.fp.read() == _END else "whole"
        if check == "header":
            return (height, width) if orientation in _SWAPPED else (width, height)
        if image.format in _SCALED and orientation == 1:
            # Decodes every byte, but computes only an eighth of the pixels along each side.
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
            image.load()
            return width, height
    return decode(file).size


def pillow(module: str) -> ModuleType:
    """Import and return a module of Pillow."""
    return need(f"PIL.{module}", package="pillow")


def need(module: str, *, package: str, extra: str = "data") -> ModuleType:
    """Import and return a module of an optional dependency.

    Args:
        module: Name of the module.
        package: Name of the package.
        extra: Extra of zerotune that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise MissingDependencyError(
            "is not installed but is required to read these data",
            f"pip install 'zerotune[{extra}]'",
            package,
        ) from error


def decode(file: Path | str | bytes) -> Image:
    """Decode an image to 8-bit RGB or RGBA, upright according to its EXIF orientation.

    16-bit images are scaled to 8 bits, whereas Pillow would clip them to white.
    """
    with _open(file) as image:
        image.load()
        if _orientation(image) == 1:  # exif_transpose would copy the image.
            return _eight_bits(image)
        return _eight_bits(pillow("ImageOps").exif_transpose(image))


def why(error: Exception) -> str:
    """Describe why an image cannot be decoded."""
    # Messages of Pillow and the system repeat the file name, which the list already contains.
    if type(error).__name__ == "UnidentifiedImageError":
        text = "its format is unknown"
    else:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"cannot be read as an image ({text})"


def readable_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that Pillow raises for unreadable images."""
    bomb: type[Exception] = pillow("Image").DecompressionBombError
    # Decoders of rare formats raise the last three on damaged headers.
    return (OSError, bomb, SyntaxError, ValueError, EOFError)


@contextmanager
def reading(file: Path) -> Iterator[IO[bytes]]:
    """Open a dataset file for reading."""
    with (
        system_errors(DataError, file, "this dataset file cannot be read"),
        reading_regular(file) as opened,
    ):
        yield opened


def bytes_of(file: Path | bytes) -> bytes:
    """Return the bytes of a dataset file."""
    if isinstance(file, bytes):
        return file
    with reading(file) as opened:
        return opened.read()


def _size_of_jpeg(file: Path | str | bytes, check: Check) -> Size | None:
    """Return the size of a plain JPEG file; ``None`` for any other, which Pillow has to judge.

    Pillow takes four times as long, and folders hold many thousands of files.
    """
    if isinstance(file, bytes):
        head, end = file[:_HEADER_BYTES], file[-2:]
    else:
        descriptor = open_regular(file)
        try:  # A file object would take twice as long.
            head = end = os.read(descriptor, _HEADER_BYTES)
            if len(head) == _HEADER_BYTES:
                os.lseek(descriptor, -2, os.SEEK_END)
                end = os.read(descriptor, 2)
        finally:
            os.close(descriptor)
    if check != "header" and not end.endswith(_END):
        return None
    at, size = 2, None
    while head[:2] == b"\xff\xd8" and at + 10 <= len(head) and head[at] == 0xFF:
        kind, length, bits, height, width, layers = struct.unpack_from(">xBHBHHB", head, at)
        if kind == _SCAN:
            return size
        if kind in _FRAMES and size is None and bits == 8 and layers in (1, 3, 4):
            size = (width, height) if 0 < width * height < _MANY_PIXELS else None
        elif kind not in _SKIPPED:
            return None
        at += 2 + length
    return None


_HEADER_BYTES = 4096
_SCAN = 0xDA
_END = b"\xff\xd9"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xE0, 0xED, 0xEE, 0xFE))
"""Markers without a size or an orientation. EXIF and XMP (0xE1) may contain an orientation."""
_MANY_PIXELS = 2**26


@contextmanager
def _open(file: Path | str | bytes) -> Iterator[Any]:
    source = io.BytesIO(file) if isinstance(file, bytes) else reading_regular(file)
    with source as opened, pillow("Image").open(opened) as image:
        yield image


def _orientation(image: Any) -> int:
    if image.format == "JPEG" and _WITH_ORIENTATION.isdisjoint(image.info):
        return 1  # Pillow would parse nothing, which costs as much as an eighth of a small image.
    orientation: int = image.getexif().get(_ORIENTATION, 1)
    return orientation


def _eight_bits(image: Image) -> Image:
    if image.mode.startswith("I"):
        import numpy as np

        values = np.asarray(image).astype(np.int64)
        most = values.max(initial=0)
        # Values of 8 bits in a 32-bit file are probably not 16-bit values that are all but black.
        if values.min(initial=0) < 0 or most > 0xFFFF or (image.mode == "I" and 0 < most <= 0xFF):
            raise ValueError(
                f"pixels have 32 bits and values up to {most} (mode {image.mode}), so the value of "
                "white is unknown"
            )
        gray: Image = pillow("Image").fromarray((values // 257).astype(np.uint8))
        return gray.convert("RGB")
    if image.mode == "F":
        raise ValueError("pixels are floating-point, so the value of white is unknown")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == mode else image.convert(mode)  # Pillow copies even without need.
