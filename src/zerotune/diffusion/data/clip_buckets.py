"""Buckets of frames, height and width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final, cast

import attrs

from zerotune._util.text import validated, whole
from zerotune.decisions import Decision
from zerotune.diffusion.data.buckets import AspectBuckets, Bucket, BucketAssignment, Placement
from zerotune.diffusion.data.sources import ImageItem
from zerotune.errors import DataError, InvalidValueError

FINEST: Final = 60_060
"""Maximum denominator of a frame rate, so that 24000/1001 and similar rates stay exact."""

_HALF: Final = Fraction(1, 2)


@attrs.frozen(kw_only=True)
class ClipItem(ImageItem):
    """Metadata of a clip."""

    frames: int
    """Number of frames."""
    rate: Fraction
    """Frames per second."""


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
    return checked_rate(value, key="ClipBuckets.fps")


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
        spans = [numbers[-1] - numbers[0] + 1 for numbers in map(frame_numbers, placements)]
        there = sum(item.frames for item in items)
        if sum(spans) < there:
            yield Decision(
                "clips.frames",
                there,
                sum(spans),
                "clips that are longer than their bucket lose frames at both ends; to use "
                "all frames, cut long clips into several clips",
            )


def frame_numbers(placement: Placement) -> tuple[int, ...]:
    """Return the numbers of the frames that a placement reads."""
    return cast("ClipPlacement", placement).numbers


def checked_rate(value: float | Fraction, *, key: str) -> Fraction:
    """Return a rate in frames per second as a fraction."""
    if not 0 < value < float("inf"):
        raise InvalidValueError(
            "must be a finite number above 0", "write the number of frames per second", key, value
        )
    return Fraction(value).limit_denominator(FINEST)
