"""Datasets of video clips (files or folders of frames), bucketed by length, height and width."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import attrs
import torch

from zerotune._util.files import check_regular, system_errors
from zerotune._util.text import validated, whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import AspectBuckets, Bucket, BucketAssignment, Placement, Size
from zerotune.diffusion.data.folder import CaptionFiles, caption_files
from zerotune.diffusion.data.images import (
    SUFFIXES,
    BrokenImage,
    OnBroken,
    bytes_of,
    check_choice,
    decode,
    image_size,
    need,
    readable_errors,
    reading,
    why,
)
from zerotune.diffusion.data.preparation import (
    Augmentation,
    Preparation,
    PreparedImages,
    to_pixels,
)
from zerotune.diffusion.data.sources import ImageItem, SizeIndex, scan, stamp_of, worded
from zerotune.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEOS: Final = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))
"""File extensions of videos, matched case-insensitively."""

_FINEST: Final = 60_060
"""Maximum denominator of a frame rate, so that 24000/1001 and similar rates stay exact."""

_HALF: Final = Fraction(1, 2)


# -- Videos, and folders of frames.


class Clip(Protocol):
    """Protocol for reading one stored clip."""

    @property
    def rate(self) -> Fraction:
        """Frames per second."""
        ...

    def first(self) -> tuple[Size, int]:
        """Return the upright first frame's width and height, and the declared number of frames."""
        ...

    def images(self) -> Iterator[Image]:
        """Return all frames as upright images, RGB or RGBA."""
        ...

    def picked(self, numbers: Sequence[int]) -> list[Image]:
        """Return the frames with the given indices.

        Args:
            numbers: Indices in ascending order; duplicates are allowed.
        """
        ...

    def content(self) -> str:
        """Return a hash of the stored clip."""
        ...


@attrs.frozen(kw_only=True)
class _FramesInFolder:
    files: tuple[Path, ...]
    rate: Fraction

    def first(self) -> tuple[Size, int]:
        return image_size(self.files[0], "header"), len(self.files)

    def images(self) -> Iterator[Image]:
        return map(decode, self.files)

    def picked(self, numbers: Sequence[int]) -> list[Image]:
        read = {number: decode(self.files[number]) for number in set(numbers)}
        return [read[number] for number in numbers]

    def content(self) -> str:
        # Hash each frame separately, so that the boundaries between frames count.
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(hashlib.sha256(bytes_of(file)).digest())
        return digest.hexdigest()


@attrs.frozen(kw_only=True)
class _VideoFile:
    path: Path
    rate: Fraction

    @classmethod
    def open(cls, path: Path) -> _VideoFile:
        with _container(path) as (_, stream):
            rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise ValueError("the file does not declare a frame rate")
        return cls(path=path, rate=Fraction(rate))

    def first(self) -> tuple[Size, int]:
        with _container(self.path) as (_, stream):
            count = int(stream.frames)
            if not count and stream.duration is not None and stream.time_base is not None:
                count = int(stream.duration * stream.time_base * self.rate)
        width, height = next(self.images()).size
        return (width, height), count

    def images(self) -> Iterator[Image]:
        with _container(self.path) as (container, _):
            for frame in container.decode(video=0):
                image: Image = frame.to_image()
                turned = int(getattr(frame, "rotation", 0) or 0)
                yield image.rotate(turned, expand=True) if turned else image

    def picked(self, numbers: Sequence[int]) -> list[Image]:
        wanted, read = set(numbers), {}
        count = 0
        for count, image in enumerate(self.images(), start=1):
            if count - 1 in wanted:
                read[count - 1] = image
            if len(read) == len(wanted):
                return [read[number] for number in numbers]
        raise ValueError(f"the clip ends after {count} frames, but frame {max(wanted)} is needed")

    def content(self) -> str:
        digest = hashlib.sha256()
        with reading(self.path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return digest.hexdigest()


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


_CLIP_CHECKS: Final = {"whole": _whole, "first": _first}


# -- The source.


@attrs.frozen(kw_only=True)
class ClipItem(ImageItem):
    """Metadata of a clip."""

    frames: int
    """Number of frames."""
    rate: Fraction
    """Frames per second."""


class ClipSource(Protocol):
    """Protocol: clips with captions, in a fixed order that is the same on all ranks."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> ClipItem:
        """Return the name, size, length and caption of a clip.

        Args:
            index: Index of the clip.
        """
        ...

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Return frames of a clip as upright images, RGB or RGBA.

        Args:
            index: Index of the clip.
            numbers: Indices of the frames.
        """
        ...

    def content(self, index: int) -> str:
        """Return a hash of the stored clip.

        Args:
            index: Index of the clip.
        """
        ...


class ClipFolder:
    """All clips of a folder and its subfolders, sorted by name.

    A clip is either a video file or a subfolder that contains images and no videos. Video files
    require PyAV (``zerotune[video]``). The images of a subfolder are frames in natural order:
    ``9.png`` comes before ``10.png``.

    Args:
        root: The folder. Names that begin with a dot are ignored.
        frame_rate: Frames per second of clips that are folders of images.
        captions: Caption files, as for ``ImageFolder``: ``cat.txt`` describes ``cat.mp4`` or the
            folder ``cat``.
        check: ``"whole"``, the default, decodes every frame at the start; ``"first"`` decodes only
            the first frame of each clip.
        on_broken: ``"skip"``, the default, skips broken clips; ``"error"`` raises an error.

    Attributes:
        broken: Skipped clips with reasons.
        decisions: Records of automatic choices and skipped clips.

    Raises:
        DataError: There are no clips, or a caption file is malformed.
        InvalidValueError: ``frame_rate`` is not above 0.
        MissingDependencyError: Pillow is not installed, or there are videos and PyAV is not
            installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        frame_rate: float = 24.0,
        captions: CaptionFiles | None = None,
        check: Literal["whole", "first"] = "whole",
        on_broken: OnBroken = "skip",
    ) -> None:
        place, rate = Path(root), _checked_rate(frame_rate, key="frame_rate")
        with system_errors(DataError, place, "the clip folder cannot be read"):
            there = place.is_dir()
        if not there:
            raise DataError("is not a folder", "pass a folder of clips", "root", os.fspath(root))
        check_choice(check, tuple(_CLIP_CHECKS), key="check")
        found, strays = _clips_in(place)
        videos = any(isinstance(files, Path) for files in found.values())
        self._errors: tuple[type[Exception], ...] = ()
        if videos:
            self._errors = (need("av", package="av", extra="video").error.FFmpegError,)
        chosen, decisions = (captions, ()) if captions else caption_files(place)
        words = chosen.read(place, found)
        index = SizeIndex("clips", str(place.resolve()), check, count=3)
        clips: dict[str, Clip] = {}

        def read(name: str) -> tuple[int, int, int]:
            (width, height), frames = _CLIP_CHECKS[check](clips[name])
            return width, height, frames

        def look(name: str) -> tuple[Size, int]:
            files = found[name]
            clips[name] = (
                _FramesInFolder(files=files, rate=rate)
                if isinstance(files, tuple)
                else _VideoFile.open(files)
            )
            width, height, frames = index.get(name, lambda: read(name))
            return (width, height), frames

        def item(name: str, seen: tuple[Size, int]) -> ClipItem:
            size, count = seen
            captions = worded(words.get(name, ""))
            return ClipItem(name=name, size=size, frames=count, rate=clips[name].rate, **captions)

        self._items, self.broken, scanned = scan(
            {
                name: stamp_of((files,) if isinstance(files, Path) else files)
                for name, files in found.items()
            },
            look,
            item,
            index=index,
            on_broken=on_broken,
            strays=strays,
            errors=self._errors,
        )
        self._clips: list[Clip] = [clips[each.name] for each in self._items]
        folders = sum(isinstance(clip, _FramesInFolder) for clip in self._clips)
        self.decisions = (*decisions, *_rate_decision(rate, folders), *scanned)
        announce(self.decisions)

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> ClipItem:
        """Return the name, size, length and caption of a clip."""
        return self._items[index]

    def frames(self, index: int, numbers: Sequence[int]) -> list[Image]:
        """Return frames of a clip as upright images, RGB or RGBA.

        Raises:
            DataError: The clip is broken or shorter than declared.
        """
        unreadable: tuple[type[Exception], ...] = (*readable_errors(), *self._errors, IndexError)
        try:
            return self._clips[index].picked(numbers)
        except unreadable as error:
            raise DataError(
                why(error),
                'open the source with check="whole", which detects short clips early',
                self._items[index].name,
            ) from error

    def content(self, index: int) -> str:
        """Return a hash of the video file or of all frames."""
        return self._clips[index].content()


def _clips_in(root: Path) -> tuple[dict[str, Path | tuple[Path, ...]], list[BrokenImage]]:
    """Return videos and folders of frames by name, and images that belong to neither."""
    found: dict[str, Path | tuple[Path, ...]] = {}
    strays = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = Path(folder)
        seen = [place / name for name in files if not name.startswith(".")]
        videos = [path for path in seen if path.suffix.lower() in VIDEOS]
        images = [path for path in seen if path.suffix.lower() in SUFFIXES]
        found |= {path.relative_to(root).as_posix(): path for path in videos}
        if images and place != root and not videos:
            found[place.relative_to(root).as_posix()] = tuple(sorted(images, key=_natural))
        else:
            strays += [
                BrokenImage(
                    name=path.relative_to(root).as_posix(),
                    reason="is an image outside a folder of frames",
                )
                for path in sorted(images)
            ]
    # Sorted, because directory order differs between machines.
    return dict(sorted(found.items())), strays


def _natural(path: Path) -> list[Any]:
    """Return a key that sorts numbers in names by value: 9 before 10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)] + [path.name]


def _rate_decision(rate: Fraction, folders: int) -> tuple[Decision, ...]:
    if not folders:
        return ()
    return (
        Decision(
            "data.frame_rate",
            None,
            round(float(rate), 3),
            f"{folders} clips are folders of images, which do not declare a frame rate",
        ),
    )


def _checked_rate(value: float | Fraction, *, key: str) -> Fraction:
    if not 0 < value < float("inf"):
        raise InvalidValueError(
            "must be a finite number above 0", "write the number of frames per second", key, value
        )
    return Fraction(value).limit_denominator(_FINEST)


# -- Buckets of frames, height and width.


@attrs.frozen(kw_only=True, order=True)
class ClipBucket(Bucket):
    """Target size of a clip: width, height and number of frames."""

    frames: int

    def __str__(self) -> str:
        return f"{super().__str__()}x{self.frames}"


@attrs.frozen(kw_only=True)
class ClipPlacement(Placement):
    """How a clip is fitted to its bucket: frames are selected, resized and cropped."""

    bucket: ClipBucket
    start: int
    """Index of the first selected frame."""
    step: Fraction
    """Number of source frames per selected frame; may be fractional."""
    fps: Fraction
    """Frames per second in training."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Indices of the source frames that are nearest to the frame times in training."""
        return tuple(
            self.start + int(number * self.step + _HALF) for number in range(self.bucket.frames)
        )


def _rising(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(lengths)))


def _frames_per_second(value: float | Fraction) -> Fraction:
    return _checked_rate(value, key="ClipBuckets.fps")


@attrs.frozen(kw_only=True)
class ClipBuckets:
    """Buckets for clips: one for every pair of a size in ``sizes`` and a length in ``frames``.

    A clip is assigned to the bucket with the greatest length for which it has enough frames, and
    with the nearest aspect ratio. A clip that is longer than its bucket loses frames at both ends.

    Raises:
        InvalidValueError: The VAE does not support one of the lengths, or ``fps`` is not above 0.
    """

    sizes: AspectBuckets
    """Widths and heights of the buckets, the same for every length."""
    compression: int = attrs.field(default=4, validator=validated(whole, fix="write 1"))
    """Number of video frames that the VAE encodes as one latent frame
    (``family.parts.latents.frames``). The first latent frame encodes only one video frame."""
    frames: tuple[int, ...] = attrs.field(default=(17, 33, 49, 81), converter=_rising)
    """Lengths in frames, each 1 more than a multiple of ``compression``; 1 is a still image."""
    fps: Fraction | None = attrs.field(
        default=None, converter=attrs.converters.optional(_frames_per_second)
    )
    """Frame rate in training; frames are dropped or repeated to reach it. By default, each clip
    keeps its own frame rate."""

    @frames.validator
    def _check_lengths(self, _attribute: Any, value: tuple[int, ...]) -> None:
        for frames in value:
            whole(frames, key="frames", fix="write a number of frames, such as 17")
            if (frames - 1) % self.compression:
                below = frames - (frames - 1) % self.compression
                raise InvalidValueError(
                    f"must be 1 more than a multiple of {self.compression}, because the VAE "
                    f"compresses every {self.compression} frames after the first into one latent "
                    "frame",
                    f"write {below} or {below + self.compression}",
                    "frames",
                    frames,
                )
        if not value:
            raise InvalidValueError("no length is given", "write (17,)", "frames", value)

    def step(self, item: ClipItem) -> Fraction:
        """Return the number of source frames per selected frame.

        Args:
            item: Metadata of the clip.
        """
        return Fraction(1) if self.fps is None else item.rate / self.fps

    def length(self, item: ClipItem) -> int | None:
        """Return the greatest length for which a clip has enough frames; ``None`` if there is none.

        Args:
            item: Metadata of the clip.
        """
        available = int((item.frames - 1) / self.step(item)) + 1
        return max((length for length in self.frames if length <= available), default=None)

    def assign(self, items: Sequence[ClipItem], *, minimum: int = 1) -> BucketAssignment:
        """Assign every clip to a bucket.

        Args:
            items: Metadata of the clips.
            minimum: Minimum number of clips per bucket, such as the micro batch size. Clips from
                buckets below this minimum move to the nearest bucket of the same length that has
                enough clips.

        Raises:
            DataError: There are no clips, or a clip is too short for all lengths.
        """
        if not items:
            raise DataError("is empty", "pass at least one clip", "clips", 0)
        lengths = [self.length(item) for item in items]
        self._refuse_short(items, lengths)
        placements: dict[int, Placement] = {}
        decisions: list[Decision] = []
        for length in sorted(set(cast("list[int]", lengths))):
            members = [index for index, found in enumerate(lengths) if found == length]
            part = self.sizes.assign([items[index].size for index in members], minimum=minimum)
            decisions += part.decisions
            for index, flat in zip(members, part.placements, strict=True):
                placements[index] = self._placed(items[index], flat, length)
        ordered = tuple(placements[index] for index in range(len(items)))
        decisions += self._frame_decisions(items, ordered)
        return BucketAssignment(placements=ordered, decisions=tuple(decisions))

    def _placed(self, item: ClipItem, flat: Placement, length: int) -> ClipPlacement:
        step = self.step(item)
        last = int((length - 1) * step + _HALF)
        return ClipPlacement(
            bucket=ClipBucket(width=flat.bucket.width, height=flat.bucket.height, frames=length),
            original=flat.original,
            resized=flat.resized,
            start=(item.frames - 1 - last) // 2,
            step=step,
            fps=self.fps or item.rate,
        )

    def _refuse_short(self, items: Sequence[ClipItem], lengths: Sequence[int | None]) -> None:
        short = [item for item, length in zip(items, lengths, strict=True) if length is None]
        if short:
            named = ", ".join(f"{item.name} ({item.frames})" for item in short[:5])
            raise DataError(
                f"{len(short)} of {len(items)} clips are too short for the shortest length: "
                + named
                + (", …" if len(short) > 5 else ""),
                "add a shorter length (1 is a still image), reduce fps, or remove these clips",
                "frames",
                self.frames,
            )

    def _frame_decisions(
        self, items: Sequence[ClipItem], placements: Sequence[Placement]
    ) -> Iterator[Decision]:
        slow = [item.name for item in items if self.step(item) < 1]
        if slow:
            yield Decision(
                "clips.fps",
                None,
                str(self.fps),
                f"{len(slow)} of {len(items)} clips ({slow[0]}, …) have a lower frame rate "
                "than the target, so some frames are repeated",
                "warning",
            )
        spans = [numbers[-1] - numbers[0] + 1 for numbers in map(_frame_numbers, placements)]
        there = sum(item.frames for item in items)
        if sum(spans) < there:
            yield Decision(
                "clips.frames",
                there,
                sum(spans),
                "clips that are longer than their bucket lose frames at both ends; to use "
                "all frames, cut long clips into several clips",
            )


def _frame_numbers(placement: Placement) -> tuple[int, ...]:
    return cast("ClipPlacement", placement).numbers


# -- The dataset.


class PreparedClips(PreparedImages):
    """A bucketed dataset of clips and captions; supports the same caches and streams as images.

    A sample has the same keys as a sample of ``PreparedImages``; ``images`` has the shape (3,
    frames, h, w). All frames of a clip are cropped and mirrored in the same way; the first frame
    determines the crop.

    Args:
        source: Source of clips, such as ``ClipFolder``.
        buckets: Target lengths and sizes of the clips.
        minimum: Minimum number of clips per bucket; see ``ClipBuckets.assign``.
        preparation: Settings for transparency, resizing and cropping.
        augmentation: Settings for flips and captions.

    Raises:
        DataError: A clip is too short for all buckets.
    """

    def __init__(
        self,
        source: ClipSource,
        *,
        buckets: ClipBuckets,
        minimum: int = 1,
        preparation: Preparation | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__(
            cast("Any", source),
            buckets=cast("Any", buckets),
            minimum=minimum,
            preparation=preparation,
            augmentation=augmentation,
        )

    def _assign(self, buckets: Any, minimum: int) -> BucketAssignment:
        items = [self.source.item(index) for index in range(len(self.source))]
        return buckets.assign(items, minimum=minimum)  # type: ignore[no-any-return]

    def pixels(self, index: int, *, flipped: bool) -> torch.Tensor:
        """Return a clip (3, frames, h, w) in [-1, 1]."""
        placement = self.assignment.placements[index]
        source: Any = self.source
        frames = source.frames(index, _frame_numbers(placement))
        each = (to_pixels(one, placement, self.preparation, flipped=flipped) for one in frames)
        return torch.stack(list(each), dim=1)
