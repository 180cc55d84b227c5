"""Datasets of video clips (files or folders of frames), bucketed by length, height and width."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch

from zerotune._util.files import system_errors
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import BucketAssignment, Size
from zerotune.diffusion.data.clip_buckets import ClipItem, checked_rate, frame_numbers
from zerotune.diffusion.data.folder import CaptionFiles, caption_files
from zerotune.diffusion.data.images import (
    SUFFIXES,
    BrokenImage,
    OnBroken,
    check_choice,
    need,
    readable_errors,
    why,
)
from zerotune.diffusion.data.preparation import Augmentation, Preparation, PreparedImages, to_pixels
from zerotune.diffusion.data.sources import SizeIndex, scan, stamp_of, worded
from zerotune.diffusion.data.videos import CLIP_CHECKS, VIDEOS, FramesInFolder, VideoFile
from zerotune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotune.diffusion.data.clip_buckets import ClipBuckets
    from zerotune.diffusion.data.videos import Clip


# -- The source.


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
        place, rate = Path(root), checked_rate(frame_rate, key="frame_rate")
        with system_errors(DataError, place, "the clip folder cannot be read"):
            there = place.is_dir()
        if not there:
            raise DataError("is not a folder", "pass a folder of clips", "root", os.fspath(root))
        check_choice(check, tuple(CLIP_CHECKS), key="check")
        found, strays = _clips_in(place)
        videos = any(isinstance(files, Path) for files in found.values())
        self._errors: tuple[type[Exception], ...] = ()
        if videos:
            self._errors = (need("av", package="av", extra="video").error.FFmpegError,)
        chosen, decisions = (captions, ()) if captions else caption_files(place)
        words = chosen.read(place, found)
        index = SizeIndex("clips", str(place.resolve()), check)
        clips: dict[str, Clip] = {}

        def read(name: str) -> tuple[int, int, int]:
            (width, height), frames = CLIP_CHECKS[check](clips[name])
            return width, height, frames

        def look(name: str) -> tuple[Size, int]:
            files = found[name]
            clips[name] = (
                FramesInFolder(files=files, rate=rate)
                if isinstance(files, tuple)
                else VideoFile.open(files)
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
        folders = sum(isinstance(clip, FramesInFolder) for clip in self._clips)
        undeclared = Decision(
            "data.frame_rate",
            None,
            round(float(rate), 3),
            f"{folders} clips are folders of images, which do not declare a frame rate",
        )
        self.decisions = (*decisions, *((undeclared,) if folders else ()), *scanned)
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
        frames = source.frames(index, frame_numbers(placement))
        each = (to_pixels(one, placement, self.preparation, flipped=flipped) for one in frames)
        return torch.stack(list(each), dim=1)
