"""Decode images to upright RGB, with policies for transparency and broken files."""

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
"""File extensions of images, matched case-insensitively."""
_SWAPPED = frozenset((5, 6, 7, 8))
_ORIENTATION = 0x0112  # EXIF tag
_SCALED = frozenset(("JPEG", "MPO"))


class AlphaPolicy(Protocol):
    """Protocol for removing transparency from an image."""

    def flatten(self, image: Image) -> Image:
        """Convert an RGBA image to RGB.

        Args:
            image: RGBA image.
        """
        ...


@attrs.frozen(kw_only=True)
class AlphaOnColor:
    """Composite transparent images onto a background colour."""

    color: tuple[int, int, int] = (255, 255, 255)

    def flatten(self, image: Image) -> Image:
        """Composite the image onto the background.

        Args:
            image: An image with an alpha channel.
        """
        background = pillow("Image").new("RGBA", image.size, (*self.color, 255))
        flat: Image = pillow("Image").alpha_composite(background, image).convert("RGB")
        return flat


@attrs.frozen(kw_only=True)
class DropAlpha:
    """Remove the alpha channel and keep the stored colours."""

    def flatten(self, image: Image) -> Image:
        """Return the colour channels only."""
        return image.convert("RGB")


def alpha_policy(alpha: Any) -> AlphaPolicy:
    """Look up a transparency policy by name; a policy object is checked and returned."""
    kinds = {"white": AlphaOnColor, "drop": DropAlpha}
    policy: AlphaPolicy = named_policy(alpha, kinds, key="alpha", method="flatten")
    return policy


@attrs.frozen(kw_only=True)
class BrokenImage:
    """A file or record that cannot be decoded."""

    name: str
    reason: str


class BrokenPolicy(Protocol):
    """Protocol: handles a broken image."""

    def broken(self, image: BrokenImage) -> None:
        """Handle a broken image: return normally to skip it, or raise an error to stop the run.

        Args:
            image: Name of the image and reason for the failure.
        """
        ...


@attrs.frozen(kw_only=True)
class SkipBroken:
    """Skip broken images; the source lists them in ``broken`` and logs them."""

    def broken(self, image: BrokenImage) -> None:
        """Skip the image."""


@attrs.frozen(kw_only=True)
class RefuseBroken:
    """Stop at the first broken image."""

    def broken(self, image: BrokenImage) -> None:
        """Raise an error.

        Args:
            image: Name of the image, and why it cannot be read.

        Raises:
            DataError: Always.
        """
        raise DataError(
            image.reason,
            key=image.name,
            fix='repair or remove the file, or pass on_broken="skip"',
        )


OnBroken = BrokenPolicy | Literal["skip", "error", "refuse"]
"""Policy for broken images: ``"skip"``, ``"error"`` or a ``BrokenPolicy`` object."""


def named_policy(
    value: Any, kinds: Mapping[str, Callable[[], Any]], *, key: str, method: str
) -> Any:
    """Look up a policy by name; a policy object is checked and returned.

    Args:
        value: Policy name or object; ``None`` selects the first policy in ``kinds``.
        kinds: Policy factories by name.
        key: Name of the argument, for the error message.
        method: Method that a policy object must have.
    """
    if value is None or (isinstance(value, str) and value in kinds):
        return kinds[value or next(iter(kinds))]()
    if isinstance(value, str) or not callable(getattr(value, method, None)):
        raise InvalidValueError(
            "is not the name of a policy",
            key=key,
            value=value,
            fix=f"write one of {', '.join(map(repr, kinds))}, or pass an object with the method "
            f"{method}",
        )
    return value


def broken_policy(on_broken: OnBroken | None) -> BrokenPolicy:
    """Look up the policy for broken images by name; ``None`` selects ``SkipBroken()``."""
    kinds = {"skip": SkipBroken, "error": RefuseBroken, "refuse": RefuseBroken}
    policy: BrokenPolicy = named_policy(on_broken, kinds, key="on_broken", method="broken")
    return policy


class ImageCheck(Protocol):
    """Protocol for checking images when a source is opened."""

    def size(self, file: Path | bytes) -> Size:
        """Return the width and height of the upright image; Pillow's errors propagate.

        Args:
            file: Path or bytes of an encoded image.
        """
        ...


@attrs.frozen(kw_only=True)
class WholeImage:
    """Decode every image completely, which detects truncated files before training."""

    def size(self, file: Path | bytes) -> Size:
        """Return the width and height of the upright image."""
        with _open(file) as image:
            if image.format in _SCALED and image.getexif().get(_ORIENTATION, 1) == 1:
                width, height = image.size
                # Decodes every byte, but computes only an eighth of the pixels along each side.
                image.draft(None, (width // 8, height // 8))
                image.load()
                return width, height
        width, height = decode(file).size
        return width, height


@attrs.frozen(kw_only=True)
class HeaderOnly:
    """Read only the size of each image from its header.

    If an image is damaged after its header, the run fails when it reads the image. PNG files are
    always read completely, because the orientation may be stored at the end.
    """

    def size(self, file: Path | bytes) -> Size:
        """Return the width and height of the upright image.

        Args:
            file: Path or bytes of an encoded image.
        """
        with _open(file) as image:
            width, height = image.size
            swapped = image.getexif().get(_ORIENTATION) in _SWAPPED
        return (height, width) if swapped else (width, height)


Check = ImageCheck | Literal["whole", "header"]
"""How image files are checked: an ``ImageCheck``, or the name of one."""


def image_check(check: Check | None) -> ImageCheck:
    """Look up an image check by name; ``None`` selects ``WholeImage()``."""
    kinds = {"whole": WholeImage, "header": HeaderOnly}
    found: ImageCheck = named_policy(check, kinds, key="check", method="size")
    return found


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
            key=package,
            fix=f"pip install 'zerotune[{extra}]'",
        ) from error


def decode(file: Path | bytes) -> Image:
    """Decode an image to 8-bit RGB or RGBA, upright according to its EXIF orientation.

    16-bit images are scaled to 8 bits, whereas Pillow would clip them to white.
    """
    with _open(file) as image:
        image.load()
        upright = pillow("ImageOps").exif_transpose(image)
        return _eight_bits(upright)


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


def write_broken(broken: Iterable[BrokenImage], path: str | os.PathLike[str]) -> None:
    """Write each broken image's name and defect to a file, one JSON object per line.

    Args:
        broken: Broken images, such as a source's ``broken`` attribute.
        path: File to write; an existing file is replaced.

    Raises:
        DataError: The file cannot be written.
    """
    lines = [json.dumps(attrs.asdict(image), ensure_ascii=False) + "\n" for image in broken]
    with system_errors(DataError, path, "the list of broken images cannot be written"):
        write_atomically(Path(path), "".join(lines).encode())


@contextmanager
def reading(file: Path) -> Iterator[IO[bytes]]:
    """Open a dataset file for reading."""
    purpose = "this dataset file cannot be read"
    with system_errors(DataError, file, purpose), reading_regular(file) as opened:
        yield opened


def bytes_of(file: Path | bytes) -> bytes:
    """Return the bytes of a dataset file."""
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
    return image.convert("RGBA" if image.has_transparency_data else "RGB")
