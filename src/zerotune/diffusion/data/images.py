"""Encoded images as upright RGB, and what to do about transparency and broken files."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import attrs

from zerotune._util.files import check_regular, reading_regular, system_errors, write_atomically
from zerotune.diffusion.data.buckets import Size
from zerotune.errors import DataError, InvalidValueError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
"""Files with these endings, in either case, are images."""
_SWAPPED = frozenset((5, 6, 7, 8))
_ORIENTATION = 0x0112  # EXIF's tag
_SCALED = frozenset(("JPEG", "MPO"))


class AlphaPolicy(Protocol):
    """Makes an image without transparency of one with it."""

    def flatten(self, image: Image) -> Image:
        """An RGB image of an RGBA one."""
        ...


@attrs.frozen(kw_only=True)
class AlphaOnColor:
    """Lay transparent images on a background: what the eye sees on a page of that color."""

    color: tuple[int, int, int] = (255, 255, 255)

    def flatten(self, image: Image) -> Image:
        """The image on the background."""
        background = pillow("Image").new("RGBA", image.size, (*self.color, 255))
        flat: Image = pillow("Image").alpha_composite(background, image).convert("RGB")
        return flat


@attrs.frozen(kw_only=True)
class DropAlpha:
    """Keep the colors that lie hidden under transparency, as they were stored."""

    def flatten(self, image: Image) -> Image:
        """The color channels."""
        return image.convert("RGB")


def alpha_policy(alpha: Any) -> AlphaPolicy:
    """What becomes of transparency, also by its name."""
    kinds = {"white": AlphaOnColor, "drop": DropAlpha}
    policy: AlphaPolicy = named_policy(alpha, kinds, key="alpha", method="flatten")
    return policy


@attrs.frozen(kw_only=True)
class BrokenImage:
    """A file or record that gives no image."""

    name: str
    reason: str


class BrokenPolicy(Protocol):
    """Decides what becomes of a broken image."""

    def broken(self, image: BrokenImage) -> None:
        """Return to leave the image out, or raise."""
        ...


@attrs.frozen(kw_only=True)
class SkipBroken:
    """Leave broken images out. They are listed in the source's ``broken`` and announced."""

    def broken(self, image: BrokenImage) -> None:
        """Leave it out."""


@attrs.frozen(kw_only=True)
class RefuseBroken:
    """Stop at the first broken image."""

    def broken(self, image: BrokenImage) -> None:
        """Raise.

        Raises:
            DataError: Always.
        """
        raise DataError(
            image.reason, key=image.name, fix='repair or remove it, or pass on_broken="skip"'
        )


OnBroken = BrokenPolicy | Literal["skip", "error", "refuse"]
"""What becomes of a broken image."""


def named_policy(
    value: Any, kinds: Mapping[str, Callable[[], Any]], *, key: str, method: str
) -> Any:
    """A policy by its name, or an object that has its method.

    Args:
        value: The name, the object, or ``None`` for the first of ``kinds``.
        kinds: What makes a policy, by name.
        key: Where it was given.
        method: What an object must have.
    """
    if value is None or (isinstance(value, str) and value in kinds):
        return kinds[value or next(iter(kinds))]()
    if isinstance(value, str) or not callable(getattr(value, method, None)):
        raise InvalidValueError(
            "is not a known policy",
            key=key,
            value=value,
            fix=f"write one of {', '.join(map(repr, kinds))}, or pass an object with {method}()",
        )
    return value


def broken_policy(on_broken: OnBroken | None) -> BrokenPolicy:
    """What becomes of broken images; ``SkipBroken()`` when not given."""
    kinds = {"skip": SkipBroken, "error": RefuseBroken, "refuse": RefuseBroken}
    policy: BrokenPolicy = named_policy(on_broken, kinds, key="on_broken", method="broken")
    return policy


class ImageCheck(Protocol):
    """How closely images are looked at when a source is opened."""

    def size(self, file: Path | bytes) -> Size:
        """Width and height of the upright image; raises what Pillow raises."""
        ...


@attrs.frozen(kw_only=True)
class WholeImage:
    """Decode every pixel: finds truncated files before the training does."""

    def size(self, file: Path | bytes) -> Size:
        """Width and height of the upright image."""
        with _open(file) as image:
            if image.format in _SCALED and image.getexif().get(_ORIENTATION, 1) == 1:
                width, height = image.size
                # Every byte is decoded, but an eighth of the pixels along each side computed.
                image.draft(None, (width // 8, height // 8))
                image.load()
                return width, height
        width, height = decode(file).size
        return width, height


@attrs.frozen(kw_only=True)
class HeaderOnly:
    """Read only the size: fast. A file broken further down stops the run when it is read.

    PNG files are read whole all the same, because their orientation may come last.
    """

    def size(self, file: Path | bytes) -> Size:
        """Width and height of the upright image."""
        with _open(file) as image:
            width, height = image.size
            swapped = image.getexif().get(_ORIENTATION) in _SWAPPED
        return (height, width) if swapped else (width, height)


Check = ImageCheck | Literal["whole", "header"]
"""How closely images are looked at."""


def image_check(check: Check | None) -> ImageCheck:
    """How closely images are looked at; ``WholeImage()`` when not given."""
    kinds = {"whole": WholeImage, "header": HeaderOnly}
    found: ImageCheck = named_policy(check, kinds, key="check", method="size")
    return found


def pillow(module: str) -> ModuleType:
    """A module of Pillow."""
    return need(f"PIL.{module}", package="pillow")


def need(module: str, *, package: str, extra: str = "data") -> ModuleType:
    """Import an optional module.

    Args:
        module: Its name.
        package: What it is installed as.
        extra: Which of zerotune's extras brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise MissingDependencyError(
            "is needed to read these data and is not installed",
            key=package,
            fix=f"pip install 'zerotune[{extra}]'",
        ) from error


def decode(file: Path | bytes) -> Image:
    """An image as people see it: upright by its EXIF orientation, 8 bits, RGB or RGBA.

    Images of 16 bits are scaled to 8, where Pillow would clip them to white.
    """
    with _open(file) as image:
        image.load()
        upright = pillow("ImageOps").exif_transpose(image)
        return _eight_bits(upright)


def why(error: Exception) -> str:
    """A reason to give for an image that could not be decoded."""
    # Pillow's and the system's messages name the file, which the list does already.
    if type(error).__name__ == "UnidentifiedImageError":
        text = "of no known format"
    else:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"cannot be read as an image ({text})"


def readable_errors() -> tuple[type[Exception], ...]:
    """What Pillow raises for files that hold no whole image."""
    bomb: type[Exception] = pillow("Image").DecompressionBombError
    # Decoders of rare formats raise the last three on damaged headers.
    return (OSError, bomb, SyntaxError, ValueError, EOFError)


def write_broken(broken: Iterable[BrokenImage], path: str | os.PathLike[str]) -> None:
    """Write a list of broken images, one JSON object per line.

    Args:
        broken: The images, with their errors.
        path: The file, which is replaced.

    Raises:
        DataError: The file cannot be written.
    """
    lines = [json.dumps(attrs.asdict(image), ensure_ascii=False) + "\n" for image in broken]
    with system_errors(DataError, path, "the list of broken images cannot be written"):
        write_atomically(Path(path), "".join(lines).encode())


@contextmanager
def reading(file: Path) -> Iterator[IO[bytes]]:
    """A file that belongs to the data, opened."""
    purpose = "belongs to the data and cannot be read"
    with system_errors(DataError, file, purpose), reading_regular(file) as opened:
        yield opened


def bytes_of(file: Path | bytes) -> bytes:
    """What is in a file that belongs to the data."""
    if isinstance(file, bytes):
        return file
    with reading(file) as opened:
        return opened.read()


def _open(file: Path | bytes) -> Any:
    if isinstance(file, Path):
        check_regular(file)
    return pillow("Image").open(io.BytesIO(file) if isinstance(file, bytes) else file)


def _eight_bits(image: Image) -> Image:
    if image.mode.startswith("I"):
        import numpy as np

        values = np.asarray(image).astype(np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 0xFFFF:
            raise ValueError(f"pixels of mode {image.mode} beyond 16 bits have no known white")
        gray: Image = pillow("Image").fromarray((values // 257).astype(np.uint8))
        return gray.convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known white")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")
