"""Aspect-ratio buckets: which size each image gets, and what is cut off. Arithmetic only."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.stream import Batch, check_share, derive_seed
from zerotune.errors import DataError, InvalidValueError

Size = tuple[int, int]
"""Width and height in pixels, in this order, as Pillow has it."""


@attrs.frozen(kw_only=True, order=True)
class Bucket:
    """A size that images are brought to."""

    width: int
    height: int

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self.width / self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@attrs.frozen(kw_only=True)
class Placement:
    """How one image comes into its bucket: resized to ``resized``, then cropped."""

    bucket: Bucket
    original: Size
    """Of the upright image."""
    resized: Size
    """At least as large as the bucket in both directions, and equal to it in one."""

    @property
    def scale(self) -> float:
        """Above 1 the image is enlarged."""
        return max(
            self.bucket.width / self.original[0],
            self.bucket.height / self.original[1],
        )

    @property
    def excess(self) -> Size:
        """Pixels to be cut off after resizing, horizontally and vertically; one of them is 0."""
        return self.resized[0] - self.bucket.width, self.resized[1] - self.bucket.height


@attrs.frozen(kw_only=True)
class BucketAssignment:
    """Which bucket each image of a dataset is in."""

    placements: tuple[Placement, ...]
    """One per image, in the order of the dataset."""
    decisions: tuple[Decision, ...] = ()

    @cached_property
    def members(self) -> dict[Bucket, tuple[int, ...]]:
        """Image numbers by bucket, buckets in order of width."""
        found: dict[Bucket, list[int]] = {}
        for index, placement in enumerate(self.placements):
            found.setdefault(placement.bucket, []).append(index)
        return {bucket: tuple(found[bucket]) for bucket in sorted(found)}

    def table(self) -> str:
        """One line per bucket: size and number of images."""
        return "\n".join(f"{bucket!s:>11}  {len(of)}" for bucket, of in self.members.items())


def _positive(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value <= 0:
        raise InvalidValueError("must be above 0", key=attribute.name, value=value, fix="raise it")


@attrs.frozen(kw_only=True)
class AspectBuckets:
    """All sizes of at most ``area`` pixels whose sides are multiples of ``step``.

    For each width the largest height that fits is a bucket, and for each height the largest
    width; the largest square is one too. An image goes to the bucket whose shape is nearest to
    its own (by ratio), the larger one if two are as near.

    Raises:
        InvalidValueError: A value out of range, or no size fits.
    """

    area: int = attrs.field(default=1024 * 1024, validator=_positive)
    """Most pixels of an image."""
    step: int = attrs.field(default=64, validator=_positive)
    """Sides are multiples of it; the VAE and the U-Net together must divide by it."""
    max_aspect: float = attrs.field(default=2.0)
    """Longest side over shortest. More extreme images are cropped to it."""

    def __attrs_post_init__(self) -> None:
        if self.max_aspect < 1:
            raise InvalidValueError(
                "the longest side over the shortest is at least 1",
                key="max_aspect",
                value=self.max_aspect,
                fix="write 1 for squares only",
            )
        if self.step * self.step > self.area:
            raise InvalidValueError(
                f"no size with sides divisible by {self.step} has so few pixels",
                key="area",
                value=self.area,
                fix=f"give at least {self.step**2}, or a smaller step",
            )

    @classmethod
    def one_megapixel(cls) -> AspectBuckets:
        """SDXL's training size: 1024² pixels, sides divisible by 64."""
        return cls()

    @classmethod
    def three_quarter_megapixel(cls) -> AspectBuckets:
        """0.75 of SDXL's area (about 886²), sides divisible by 64."""
        return cls(area=1024 * 768)

    @classmethod
    def pixel_art(cls) -> AspectBuckets:
        """128² pixels, sides divisible by 8. Resize with ``resampling="nearest"``."""
        return cls(area=128 * 128, step=8)

    @cached_property
    def sizes(self) -> tuple[Bucket, ...]:
        """Every bucket, narrowest first."""
        found: set[Size] = set()
        for side in range(self.step, int(math.sqrt(self.area * self.max_aspect)) + 1, self.step):
            other = self.area // side // self.step * self.step
            # The longest other side may be too long for this one: cut it to the ratio allowed.
            other = min(other, int(side * self.max_aspect) // self.step * self.step)
            if other and max(side, other) <= self.max_aspect * min(side, other):
                found |= {(side, other), (other, side)}
        largest = {
            (w, h)
            for w, h in found
            if not any(w <= a and h <= b and (w, h) != (a, b) for a, b in found)
        }
        # Always a square, smaller than its neighbours if need be: most data are squares.
        square = math.isqrt(self.area) // self.step * self.step
        largest.add((square, square))
        return tuple(Bucket(width=w, height=h) for w, h in sorted(largest))

    def nearest(self, size: Size, *, among: Iterable[Bucket] | None = None) -> Bucket:
        """The bucket whose shape is nearest to an image's.

        Args:
            size: Width and height of the upright image.
            among: Choose from these instead of all.

        Raises:
            DataError: A side is below 1.
        """
        if min(size) < 1:
            raise DataError("an image has at least one pixel", key="size", value=size)
        wanted = math.log(size[0] / size[1])

        def distance(bucket: Bucket) -> tuple[float, int, int]:
            # Rounded so that mirrored shapes tie exactly on every machine.
            off = round(abs(math.log(bucket.aspect) - wanted), 9)
            return off, -bucket.width * bucket.height, bucket.width

        return min(self.sizes if among is None else among, key=distance)

    def place(self, size: Size, *, bucket: Bucket | None = None) -> Placement:
        """How an image of this size comes into its bucket, or into the one given."""
        target = self.nearest(size) if bucket is None else bucket
        width, height = size
        # In whole numbers: a rounded scale may leave the image one pixel short of its bucket.
        if target.width * height >= target.height * width:
            resized = target.width, max(target.height, round(height * target.width / width))
        else:
            resized = max(target.width, round(width * target.height / height)), target.height
        return Placement(bucket=target, original=size, resized=resized)

    def assign(self, sizes: Sequence[Size], *, minimum: int = 1) -> BucketAssignment:
        """Give every image a bucket.

        Args:
            sizes: Width and height of each upright image.
            minimum: Images of a bucket with fewer go to the nearest bucket that has as many;
                the micro batch size is a good choice. What was moved is recorded.

        Raises:
            DataError: There is no image, or one without pixels.
        """
        if not sizes:
            raise DataError("is empty", key="sizes", value=0, fix="give at least one image")
        kinds = {size: self.nearest(size) for size in set(sizes)}
        counts: dict[Bucket, int] = {}
        for size in sizes:
            counts[kinds[size]] = counts.get(kinds[size], 0) + 1
        kept = [bucket for bucket, count in counts.items() if count >= minimum]
        # With nothing large enough, everything goes to the fullest, so no image is left out.
        kept = kept or [max(counts, key=lambda bucket: (counts[bucket], bucket))]
        final = {
            size: bucket if bucket in kept else self.nearest(size, among=kept)
            for size, bucket in kinds.items()
        }
        placed = {size: self.place(size, bucket=bucket) for size, bucket in final.items()}
        placements = tuple(placed[size] for size in sizes)
        return BucketAssignment(
            placements=placements,
            decisions=(*_merged(counts, kept, minimum), *_enlarged(placements)),
        )


def _merged(counts: dict[Bucket, int], kept: list[Bucket], minimum: int) -> Iterable[Decision]:
    gone = sorted(set(counts) - set(kept))
    if gone:
        yield Decision(
            key="buckets",
            before=len(counts),
            after=len(kept),
            reason=f"{sum(counts[bucket] for bucket in gone)} images of buckets with fewer than "
            f"{minimum} ({', '.join(map(str, gone))}) go to the nearest fuller bucket",
        )


def _enlarged(placements: Sequence[Placement]) -> Iterable[Decision]:
    scales = [placement.scale for placement in placements if placement.scale > 1]
    if scales:
        yield Decision(
            key="images.scale",
            before=1.0,
            after=round(max(scales), 3),
            reason=f"{len(scales)} of {len(placements)} images are smaller than their bucket and "
            f"are enlarged, at most {max(scales):.2f} times; leave them out or lower the area",
            severity="warning",
        )


# -- The order of micro batches that each hold images of one bucket.


@attrs.frozen(kw_only=True)
class Draw:
    """One use of one image. Flips and dropped captions depend on both numbers."""

    index: int
    """Number of the image in its dataset."""
    epoch: int
    """Which use of this image it is, from 0."""


@attrs.frozen(kw_only=True)
class BucketOrder:
    """An endless sequence of micro batches; every image is used once per epoch.

    Each bucket has an endless sequence of its own: one permutation per epoch, back to back, cut
    into micro batches of equal size. A micro batch belongs to the epoch of its first image, and
    the micro batches of one epoch are shuffled over all buckets. So no image is left over or
    used twice, whatever the sizes: the rest of a bucket is completed from its next epoch, which
    then has those images behind it. The sequence does not depend on the number of ranks.
    """

    buckets: tuple[tuple[int, ...], ...]
    """Image numbers of each bucket; none is empty."""
    micro_batch_size: int
    seed: int = 0
    shuffle: bool = True
    origin: tuple[int, ...] = ()
    """Images of each bucket that were used before this sequence begins; empty: none."""

    @property
    def length(self) -> int:
        """Images in all buckets."""
        return sum(map(len, self.buckets))

    def batches(self, start: int) -> Iterator[list[Draw]]:
        """Micro batches from number ``start`` on, endlessly."""
        epoch = self._first_epoch
        while self._batches_before(epoch + 1) <= start:
            epoch += 1
        offset = start - self._batches_before(epoch)
        while True:
            for bucket, number in self._epoch(epoch)[offset:]:
                yield self._draws(bucket, number)
            epoch, offset = epoch + 1, 0

    def used(self, position: int) -> tuple[int, ...]:
        """Images of each bucket that are behind the first ``position`` micro batches."""
        epoch = self._first_epoch
        while self._batches_before(epoch + 1) <= position:
            epoch += 1
        counts = [self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets))]
        for bucket, _ in self._epoch(epoch)[: position - self._batches_before(epoch)]:
            counts[bucket] += 1
        return tuple(
            done + count * self.micro_batch_size
            for done, count in zip(self._origin, counts, strict=True)
        )

    @cached_property
    def _origin(self) -> tuple[int, ...]:
        return self.origin or (0,) * len(self.buckets)

    @cached_property
    def _first_epoch(self) -> int:
        return min(
            done // len(bucket) for done, bucket in zip(self._origin, self.buckets, strict=True)
        )

    def _numbers_before(self, bucket: int, epoch: int) -> int:
        """Micro batches of a bucket that begin before an epoch of it."""
        images = epoch * len(self.buckets[bucket]) - self._origin[bucket]
        return max(0, -(-images // self.micro_batch_size))

    def _batches_before(self, epoch: int) -> int:
        return sum(self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets)))

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Bucket and number of each micro batch of an epoch, in order."""
        number = [self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets))]
        turns = [
            bucket
            for bucket, first in enumerate(number)
            for _ in range(first, self._numbers_before(bucket, epoch + 1))
        ]
        if self.shuffle:
            random.Random(derive_seed(self.seed, "batches", epoch)).shuffle(turns)  # noqa: S311
        # Turns are shuffled, a bucket's own micro batches are not: what was used of a bucket is
        # then the beginning of its sequence, and one number says all.
        order = []
        for bucket in turns:
            order.append((bucket, number[bucket]))
            number[bucket] += 1
        return order

    def _draws(self, bucket: int, number: int) -> list[Draw]:
        start = self._origin[bucket] + number * self.micro_batch_size
        draws = []
        for position in range(start, start + self.micro_batch_size):
            epoch, offset = divmod(position, len(self.buckets[bucket]))
            draws.append(Draw(index=self._permutation(bucket, epoch)[offset], epoch=epoch))
        return draws

    @cached_property
    def _permutations(self) -> dict[int, dict[int, list[int]]]:
        return {bucket: {} for bucket in range(len(self.buckets))}

    def _permutation(self, bucket: int, epoch: int) -> Sequence[int]:
        members = self.buckets[bucket]
        if not self.shuffle:
            return members
        known = self._permutations[bucket]
        if epoch not in known:
            order = list(members)
            seed = derive_seed(self.seed, "bucket", bucket, epoch)
            random.Random(seed).shuffle(order)  # noqa: S311
            # A micro batch looks at this epoch and the ones after; those before are done with.
            for old in [number for number in known if number < epoch - 1]:
                del known[old]
            known[epoch] = order
        return known[epoch]


# -- Endless micro batches of images in aspect-ratio buckets, one rank's share.


class Captions(tuple[str, ...]):
    """Captions of a batch, which "move" to a device by staying what they are."""

    def to(self, *_: Any, **__: Any) -> Captions:
        """Itself: text has no device. A loop may then move all values of a batch alike."""
        return self


@runtime_checkable
class BucketedDataset(Protocol):
    """A dataset whose samples have one of a few sizes."""

    @property
    def assignment(self) -> BucketAssignment:
        """The bucket of each sample."""
        ...

    @property
    def identity(self) -> str:
        """Changes when samples are added, removed, reordered or resized."""
        ...

    def __getitem__(self, draw: Draw) -> Mapping[str, Any]:
        """Tensors and strings of one sample; of equal shape within a bucket."""
        ...


def stack_samples(samples: list[Mapping[str, Any]]) -> Batch:
    """A batch of samples: tensors are stacked, strings become ``Captions``."""
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        batch[name] = Captions(values) if isinstance(first, str) else torch.stack(values)
    return batch


class _RankDraws(torch.utils.data.Sampler[list[Draw]]):
    def __init__(self, order: BucketOrder, *, start: int, rank: int, world_size: int) -> None:
        self._order, self._start = order, start
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[Draw]]:
        for number, draws in enumerate(self._order.batches(self._start)):
            if number % self._world_size == self._rank:
                yield draws


class BucketStream:
    """Endless micro batches of a bucketed dataset, each of one size.

    All ranks take equal steps of equal micro batches. Which micro batches there are, and in
    which order, depends on the data, the seed and the micro batch size, not on the number of
    ranks: rank r of w takes every w-th. A run continues exactly where it stopped with another
    number of ranks. With another micro batch size it continues with the images not used yet,
    in new company.

    Args:
        dataset: Such as ``PreparedImages`` or ``CachedImages``.
        micro_batch_size: Samples per batch and rank.
        seed: Fixes the order.
        rank: This process.
        world_size: Processes that share the data.
        shuffle: ``False``: each bucket in the dataset's order, one bucket after the other.
        num_workers: Processes that read ahead; 0 reads in this process.
        collate: Makes a batch of a list of samples; ``stack_samples`` when not given.
        pin_memory: Put tensors in pinned memory, for faster copies to a GPU.

    Attributes:
        decisions: What was chosen for buckets that hold less than a micro batch.

    Raises:
        InvalidValueError: A size or rank that cannot be.
    """

    def __init__(
        self,
        dataset: BucketedDataset,
        *,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Batch] = stack_samples,
        pin_memory: bool = False,
    ) -> None:
        check_share(micro_batch_size, rank, world_size)
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._order = BucketOrder(
            buckets=tuple(dataset.assignment.members.values()),
            micro_batch_size=micro_batch_size,
            seed=seed,
            shuffle=shuffle,
        )
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate,
            "pin_memory": pin_memory,
        }
        self._position = 0
        self._iterator: Iterator[Batch] | None = None
        self._identity = dataset_digest(dataset)
        self.decisions = _small_buckets(dataset.assignment, micro_batch_size)
        announce(self.decisions, rank=rank)

    @property
    def epoch(self) -> float:
        """Epochs consumed by all ranks together; 1.5 is the middle of the second."""
        return sum(self._order.used(self._position)) / self._order.length

    @property
    def steps_per_epoch(self) -> float:
        """Micro batches that each rank takes in one epoch, on average."""
        return self._order.length / self._order.micro_batch_size / self._world_size

    def __iter__(self) -> BucketStream:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._open()
        batch = next(self._iterator)
        # Counted here and not in the sampler, which runs ahead of what was consumed.
        self._position += self._world_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the order, the same on every rank."""
        return {
            "position": self._position,
            "origin": list(self._order.origin),
            "micro_batch_size": self._order.micro_batch_size,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "data": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved place, in the saved order.

        Raises:
            DataError: The images or their buckets are others, so the order would be another.
        """
        if state["data"] != self._identity:
            raise DataError(
                "the images or their buckets were others when this state was saved",
                key="dataset",
                value=self._identity,
                fix="give the same data and buckets, or start a new stream and leave its state out",
            )
        saved = attrs.evolve(
            self._order,
            seed=state["seed"],
            shuffle=state["shuffle"],
            micro_batch_size=state["micro_batch_size"],
            origin=tuple(state["origin"]),
        )
        self._position = int(state["position"])
        size = self._order.micro_batch_size
        if size != saved.micro_batch_size:
            saved = attrs.evolve(saved, micro_batch_size=size, origin=saved.used(self._position))
            self._position = 0
        self._order, self._iterator = saved, None

    def _open(self) -> Iterator[Batch]:
        sampler = _RankDraws(
            self._order, start=self._position, rank=self._rank, world_size=self._world_size
        )
        # Without a generator of its own the loader would draw its workers' seed from the global
        # one and shift every later random number of the model.
        generator = torch.Generator().manual_seed(
            derive_seed(self._order.seed, "workers", self._rank, self._position)
        )
        dataset: Any = self._dataset
        return iter(
            torch.utils.data.DataLoader(
                dataset, batch_sampler=sampler, generator=generator, **self._options
            )
        )


def dataset_digest(dataset: BucketedDataset) -> str:
    """Identifies samples and buckets: what the order of a stream depends on."""
    digest = hashlib.sha256(dataset.identity.encode())
    for bucket, members in dataset.assignment.members.items():
        digest.update(f"{bucket}:{members}\n".encode())
    return digest.hexdigest()[:32]


def _small_buckets(assignment: BucketAssignment, size: int) -> tuple[Decision, ...]:
    small = [f"{b} ({len(of)})" for b, of in assignment.members.items() if len(of) < size]
    if not small:
        return ()
    return (
        Decision(
            key="buckets",
            before=None,
            after=size,
            reason=f"buckets with fewer images than a micro batch give the same image several "
            f"times in it, and then less often: {', '.join(small)}; give minimum={size} to move "
            f"them to fuller buckets",
            severity="warning",
        ),
    )
