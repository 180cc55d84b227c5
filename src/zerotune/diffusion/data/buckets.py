"""Aspect-ratio buckets, which determine the training size and crop of each image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from zerotune._util.text import positive, validated
from zerotune.decisions import Decision
from zerotune.errors import DataError, InvalidValueError

Size = tuple[int, int]
"""Width and height in pixels, in this order, as in Pillow."""


@attrs.frozen(kw_only=True, order=True)
class Bucket:
    """Target image size in pixels."""

    width: int
    height: int

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self.width / self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@attrs.frozen(kw_only=True)
class ReferenceBucket(Bucket):
    """Bucket of images with the same target size and the same number of reference images."""

    references: int

    def __str__(self) -> str:
        return f"{super().__str__()} of {self.references}"


@attrs.frozen(kw_only=True)
class Placement:
    """How an image is fitted to its bucket: it is resized to ``resized``, then cropped."""

    bucket: Bucket
    original: Size
    """Size of the upright image."""
    resized: Size
    """Size after resizing: both sides are at least as long as the bucket's, and one is equal."""

    @property
    def scale(self) -> float:
        """Resize factor; a factor above 1 enlarges the image."""
        return max(
            self.bucket.width / self.original[0],
            self.bucket.height / self.original[1],
        )

    @property
    def excess(self) -> Size:
        """Number of columns and rows to crop after resizing; at least one of them is 0."""
        return self.resized[0] - self.bucket.width, self.resized[1] - self.bucket.height


@attrs.frozen(kw_only=True)
class BucketAssignment:
    """The bucket of each image in a dataset."""

    placements: tuple[Placement, ...]
    """One placement per image, in the order of the dataset."""
    decisions: tuple[Decision, ...] = ()

    @cached_property
    def members(self) -> dict[Bucket, tuple[int, ...]]:
        """Image indices by bucket; buckets are sorted by width."""
        found: dict[Bucket, list[int]] = {}
        for index, placement in enumerate(self.placements):
            found.setdefault(placement.bucket, []).append(index)
        # Sorted by fields, because buckets may be of several classes.
        return {bucket: tuple(found[bucket]) for bucket in sorted(found, key=attrs.astuple)}

    def table(self) -> str:
        """Format the size and the number of images of each bucket as a text table."""
        return "\n".join(f"{bucket!s:>11}  {len(of)}" for bucket, of in self.members.items())


@attrs.frozen(kw_only=True)
class AspectBuckets:
    """Aspect-ratio buckets of at most ``area`` pixels, with sides that are multiples of ``step``.

    Each possible width gives a bucket with the largest height that fits, and each possible height
    gives a bucket with the largest width that fits. The largest square is also a bucket. Each image
    is assigned to the bucket with the nearest aspect ratio; ties go to the larger bucket.

    Raises:
        InvalidValueError: A value is out of range, or no size fits.
    """

    area: int = attrs.field(default=1024 * 1024, validator=validated(positive, fix="raise it"))
    """Maximum number of pixels per image."""
    step: int = attrs.field(default=64, validator=validated(positive, fix="raise it"))
    """Number that divides the width and height of every bucket, such as the combined downsampling
    factor of VAE and U-Net."""
    max_aspect: float = attrs.field(default=2.0)
    """Maximum ratio of the longer to the shorter side; images with a larger ratio are cropped."""

    def __attrs_post_init__(self) -> None:
        if self.max_aspect < 1:
            raise InvalidValueError(
                "the ratio of the longer to the shorter side must be at least 1",
                "write 1 to allow only squares",
                "max_aspect",
                self.max_aspect,
            )
        if self.step * self.step > self.area:
            raise InvalidValueError(
                f"is too small for any image with sides divisible by {self.step}",
                f"use at least {self.step**2}, or a smaller step",
                "area",
                self.area,
            )

    @cached_property
    def sizes(self) -> tuple[Bucket, ...]:
        """All buckets, sorted by width."""
        found: set[Size] = set()
        for side in range(self.step, int(math.sqrt(self.area * self.max_aspect)) + 1, self.step):
            other = self.area // side // self.step * self.step
            # The area may allow a longer other side than the aspect ratio does: cut it.
            other = min(other, int(side * self.max_aspect) // self.step * self.step)
            if other and max(side, other) <= self.max_aspect * min(side, other):
                found |= {(side, other), (other, side)}
        largest = {
            (w, h)
            for w, h in found
            if not any(w <= a and h <= b and (w, h) != (a, b) for a, b in found)
        }
        # Always include a square, even if it is smaller than its neighbours: most data are square.
        square = math.isqrt(self.area) // self.step * self.step
        largest.add((square, square))
        return tuple(Bucket(width=w, height=h) for w, h in sorted(largest))

    def nearest(self, size: Size, *, among: Iterable[Bucket] | None = None) -> Bucket:
        """Return the bucket whose aspect ratio is nearest to that of an image.

        Args:
            size: Width and height of the upright image.
            among: Candidate buckets; by default all buckets.

        Raises:
            DataError: A side is below 1.
        """
        if min(size) < 1:
            raise DataError("an image must have at least one pixel", key="size", value=size)
        wanted = math.log(size[0] / size[1])

        def distance(bucket: Bucket) -> tuple[float, int, int]:
            # Rounded so that mirrored shapes tie exactly on every machine.
            off = round(abs(math.log(bucket.aspect) - wanted), 9)
            return off, -bucket.width * bucket.height, bucket.width

        return min(self.sizes if among is None else among, key=distance)

    def place(self, size: Size, *, bucket: Bucket | None = None) -> Placement:
        """Return the placement of an image in a bucket.

        Args:
            size: Width and height of the upright image.
            bucket: Target bucket; by default the bucket with the nearest aspect ratio.
        """
        return place_in(size, self.nearest(size) if bucket is None else bucket)

    def assign(self, sizes: Sequence[Size], *, minimum: int = 1) -> BucketAssignment:
        """Assign every image to a bucket.

        Args:
            sizes: Width and height of each upright image.
            minimum: Minimum number of images per bucket, such as the micro batch size. Images from
                buckets below this minimum move to the remaining bucket with the nearest aspect
                ratio.

        Raises:
            DataError: ``sizes`` is empty, or an image has no pixels.
        """
        if not sizes:
            raise DataError("is empty", "pass at least one image", "sizes", 0)
        kinds = {size: self.nearest(size) for size in set(sizes)}
        counts: dict[Bucket, int] = {}
        for size in sizes:
            counts[kinds[size]] = counts.get(kinds[size], 0) + 1
        kept = [bucket for bucket, count in counts.items() if count >= minimum]
        # If no bucket is large enough, the fullest takes all images, so that none is left out.
        kept = kept or [max(counts, key=lambda bucket: (counts[bucket], bucket))]
        final = {
            size: bucket if bucket in kept else self.nearest(size, among=kept)
            for size, bucket in kinds.items()
        }
        placed = {size: self.place(size, bucket=bucket) for size, bucket in final.items()}
        placements = tuple(placed[size] for size in sizes)
        return BucketAssignment(
            placements=placements,
            decisions=(*_merged_buckets(counts, kept, minimum), *_enlarged_images(placements)),
        )


def place_in(size: Size, bucket: Bucket) -> Placement:
    """Place an image of ``size`` (width, height) in a bucket."""
    width, height = size
    # In whole numbers: a rounded scale may leave the image one pixel short of its bucket.
    if bucket.width * height >= bucket.height * width:
        resized = bucket.width, max(bucket.height, round(height * bucket.width / width))
    else:
        resized = max(bucket.width, round(width * bucket.height / height)), bucket.height
    return Placement(bucket=bucket, original=size, resized=resized)


def _merged_buckets(
    counts: dict[Bucket, int], kept: list[Bucket], minimum: int
) -> Iterable[Decision]:
    gone = sorted(set(counts) - set(kept))
    if gone:
        yield Decision(
            "buckets",
            len(counts),
            len(kept),
            f"{sum(counts[bucket] for bucket in gone)} images in buckets with fewer than "
            f"{minimum} images ({', '.join(map(str, gone))}) move to the nearest remaining buckets",
        )


def _enlarged_images(placements: Sequence[Placement]) -> Iterable[Decision]:
    scales = [placement.scale for placement in placements if placement.scale > 1]
    if scales:
        yield Decision(
            "images.scale",
            1.0,
            round(max(scales), 3),
            f"{len(scales)} of {len(placements)} images are smaller than their bucket and "
            f"are enlarged by a factor of up to {max(scales):.2f}; remove them or reduce the "
            "area of the buckets",
            "warning",
        )
