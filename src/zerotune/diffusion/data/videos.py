"""Videos, and folders of frames."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from zerotune._util.files import check_regular
from zerotune.diffusion.data.buckets import Size
from zerotune.diffusion.data.images import bytes_of, decode, image_size, need, reading

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEOS: Final = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))
"""File extensions of videos, matched case-insensitively."""


@attrs.frozen(kw_only=True)
class FramesInFolder:
    """A clip whose frames are the image files of a folder."""

    files: tuple[Path, ...]
    rate: Fraction

    def first(self) -> tuple[Size, int]:
        """Return the size of the first frame and the number of frames."""
        return image_size(self.files[0], "header"), len(self.files)

    def images(self) -> Iterator[Image]:
        """Decode all frames, in order."""
        return map(decode, self.files)

    def picked(self, numbers: Sequence[int]) -> list[Image]:
        """Decode the frames with these numbers."""
        read = {number: decode(self.files[number]) for number in set(numbers)}
        return [read[number] for number in numbers]

    def content(self) -> str:
        """Return a hash of the frames."""
        # Hash each frame separately, so that the boundaries between frames count.
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(hashlib.sha256(bytes_of(file)).digest())
        return digest.hexdigest()


@attrs.frozen(kw_only=True)
class VideoFile:
    """A clip in a video file."""

    path: Path
    rate: Fraction

    @classmethod
    def open(cls, path: Path) -> VideoFile:
        """Read a video's frame rate."""
        with _container(path) as (_, stream):
            rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise ValueError("the file does not declare a frame rate")
        return cls(path=path, rate=Fraction(rate))

    def first(self) -> tuple[Size, int]:
        """Return the size of the first frame and the number of frames."""
        with _container(self.path) as (_, stream):
            count = int(stream.frames)
            if not count and stream.duration is not None and stream.time_base is not None:
                count = int(stream.duration * stream.time_base * self.rate)
        width, height = next(self.images()).size
        return (width, height), count

    def images(self) -> Iterator[Image]:
        """Decode all frames, in order."""
        with _container(self.path) as (container, _):
            for frame in container.decode(video=0):
                image: Image = frame.to_image()
                turned = int(getattr(frame, "rotation", 0) or 0)
                yield image.rotate(turned, expand=True) if turned else image

    def picked(self, numbers: Sequence[int]) -> list[Image]:
        """Decode the frames with these numbers."""
        wanted, read = set(numbers), {}
        count = 0
        for count, image in enumerate(self.images(), start=1):
            if count - 1 in wanted:
                read[count - 1] = image
            if len(read) == len(wanted):
                return [read[number] for number in numbers]
        raise ValueError(f"the clip ends after {count} frames, but frame {max(wanted)} is needed")

    def content(self) -> str:
        """Return a hash of the frames."""
        digest = hashlib.sha256()
        with reading(self.path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return digest.hexdigest()


Clip: TypeAlias = FramesInFolder | VideoFile


@contextmanager
def _container(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a video, and yield it with its first video stream."""
    check_regular(path)
    with need("av", package="av", extra="video").open(os.fspath(path)) as container:
        if not container.streams.video:
            raise ValueError("the file contains no images")
        yield container, container.streams.video[0]


def _whole(clip: Clip) -> tuple[Size, int]:
    """Decode every frame, and return the common size and the number of frames."""
    sizes = [image.size for image in clip.images()]
    if len(set(sizes)) != 1:
        found = ", ".join(f"{width}x{height}" for width, height in sorted(set(sizes)))
        raise ValueError(f"its frames have different sizes: {found}" if sizes else "no frames")
    return sizes[0], len(sizes)


def _first(clip: Clip) -> tuple[Size, int]:
    """Decode the first frame, and trust the declared number of frames."""
    size, count = clip.first()
    if count < 1:
        raise ValueError('the file does not declare its length; use check="whole"')
    return size, count


CLIP_CHECKS: Final = {"whole": _whole, "first": _first}
