"""Seeded, resumable order of samples and micro batches, the same on all ranks."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Final

import attrs
import torch

RUN: Final = 8
"""Number of consecutive micro batches from one group of buckets; 2, 4 or 8 ranks share them
equally."""
_REMEMBERED: Final = 4


def derive_seed(seed: int, *parts: object) -> int:
    """Derive a seed in [0, 2**63) for one purpose; the result is the same on every machine.

    Args:
        seed: Seed of the run.
        parts: Values that identify the purpose, such as a name and an epoch; they are converted to
            strings.
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@attrs.frozen(kw_only=True)
class SampleOrder:
    """An endless sequence of sample indices: one permutation per epoch, concatenated.

    A batch may contain the end of one epoch and the start of the next. Every epoch uses each sample
    exactly once and every batch is full, for any number of samples and any batch size.
    """

    length: int
    """Number of samples in the dataset."""
    seed: int
    shuffle: bool = True

    def between(self, start: int, stop: int) -> list[int]:
        """Return the sample indices at positions ``start`` to ``stop - 1`` of the sequence.

        Args:
            start: First position.
            stop: End position, exclusive.
        """
        found: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            taken = min(stop - start, self.length - offset)
            found += self._epoch(epoch)[offset : offset + taken]
            start += taken
        return found

    def _epoch(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


@attrs.frozen(kw_only=True)
class Draw:
    """A single use of an image; flips and caption dropout are drawn anew for each use."""

    index: int
    """Index of the image in its dataset."""
    epoch: int
    """Number of previous uses of the image."""


@attrs.frozen(kw_only=True)
class Share:
    """One set of images in a mixture."""

    name: str
    images: range
    """Indices of the set's images, counted across all sets."""
    repeats: Fraction
    """Number of uses of each image per epoch."""


@attrs.frozen(kw_only=True)
class _Lane:
    """The images of one set in one bucket."""

    share: int
    images: tuple[int, ...]
    repeats: Fraction = Fraction(1)

    def before(self, epoch: int) -> int:
        """Return the number of image uses before an epoch, summed over all images."""
        return epoch * self.repeats.numerator * len(self.images) // self.repeats.denominator


@attrs.frozen(kw_only=True)
class BucketOrder:
    """An endless sequence of micro batches, each from one bucket.

    Each bucket has an endless sequence of images: one permutation per epoch, concatenated and cut
    into micro batches of equal size. The micro batches of an epoch are shuffled across buckets. A
    bucket's last micro batch of an epoch is filled up with images from the next epoch; the next
    epoch then skips these images. The sequence does not depend on the number of ranks.

    After e epochs, an image of a set with ``repeats`` r has been used at least ``floor(e * r)`` and
    at most ``ceil(e * r)`` times. With fractional ``repeats``, a permutation may continue in
    the next epoch.
    """

    buckets: tuple[tuple[int, ...], ...]
    """Image indices of each bucket; no bucket is empty."""
    micro_batch_size: int
    seed: int = 0
    shuffle: bool = True
    origin: tuple[int, ...] = ()
    """For each bucket, the number of images used before a change of the micro batch size; an empty
    tuple if it has not changed."""
    shares: tuple[Share, ...] = ()
    """Sets of the mixture; empty for a single set that uses each image once per epoch."""
    groups: tuple[int, ...] = ()
    """Group number of each bucket. ``RUN`` consecutive micro batches come from one group of
    buckets, so that all ranks have equal work in a step. An empty tuple disables grouping."""

    @property
    def length(self) -> float:
        """Number of image uses per epoch."""
        return float(sum(self._rates))

    def batches(self, start: int) -> Iterator[list[Draw]]:
        """Yield the micro batches endlessly.

        Args:
            start: Index of the first micro batch.
        """
        epoch = self._epoch_at(start)
        offset = start - self._batches_before(epoch)
        while True:
            for bucket, number in self._epoch(epoch)[offset:]:
                yield self._draws(bucket, number)
            epoch, offset = epoch + 1, 0

    def used(self, position: int) -> tuple[int, ...]:
        """Return how many images of each bucket are used before a micro batch.

        Args:
            position: Index of the micro batch.
        """
        epoch = self._epoch_at(position)
        counts = [self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets))]
        for bucket, _ in self._epoch(epoch)[: position - self._batches_before(epoch)]:
            counts[bucket] += 1
        return tuple(
            done + count * self.micro_batch_size
            for done, count in zip(self._origin, counts, strict=True)
        )

    def used_of_shares(self, position: int) -> tuple[int, ...]:
        """Return how many images of each set are used before a micro batch.

        Args:
            position: Index of the micro batch.
        """
        counts = [0] * max(1, len(self.shares))
        for bucket, done in enumerate(self.used(position)):
            epoch = self._epoch_of(bucket, done)
            slots = self._slots(bucket, epoch)[: done - self._before(bucket, epoch)]
            for lane in self._lanes[bucket]:
                start, many = lane.before(epoch), lane.before(epoch + 1) - lane.before(epoch)
                counts[lane.share] += start + sum(slot < many for slot in slots)
                slots = [slot - many for slot in slots if slot >= many]
        return tuple(counts)

    @cached_property
    def _origin(self) -> tuple[int, ...]:
        return self.origin or (0,) * len(self.buckets)

    @cached_property
    def _lanes(self) -> tuple[tuple[_Lane, ...], ...]:
        """Lanes of each bucket: one for each set with images in the bucket."""
        if not self.shares:
            return tuple((_Lane(share=0, images=bucket),) for bucket in self.buckets)
        starts = [share.images.start for share in self.shares]
        lanes = []
        for bucket in self.buckets:
            members: dict[int, list[int]] = {}
            for image in bucket:
                members.setdefault(bisect_right(starts, image) - 1, []).append(image)
            lanes.append(
                tuple(
                    _Lane(share=number, images=tuple(of), repeats=self.shares[number].repeats)
                    for number, of in sorted(members.items())
                )
            )
        return tuple(lanes)

    @cached_property
    def _rates(self) -> tuple[Fraction, ...]:
        """Average number of image uses per epoch in each bucket."""
        return tuple(
            sum((len(lane.images) * lane.repeats for lane in lanes), Fraction(0))
            for lanes in self._lanes
        )

    def _before(self, bucket: int, epoch: int) -> int:
        """Return the number of image uses in a bucket before an epoch."""
        return sum(lane.before(epoch) for lane in self._lanes[bucket])

    def _epoch_of(self, bucket: int, position: int) -> int:
        """Return the epoch of the image use at a position in a bucket's sequence."""
        # Rounding down leaves each lane less than one use behind its rate.
        first = int(position / self._rates[bucket])
        last = int((position + len(self._lanes[bucket])) / self._rates[bucket]) + 1
        later = range(first + 1, last + 1)
        return first + bisect_right(later, position, key=lambda epoch: self._before(bucket, epoch))

    @cached_property
    def _first_epoch(self) -> int:
        return min(self._epoch_of(bucket, done) for bucket, done in enumerate(self._origin))

    def _epoch_at(self, position: int) -> int:
        """Return the epoch of the micro batch at a position."""
        first, many = self._first_epoch, 1
        while self._batches_before(first + many) <= position:
            many *= 2
        later = range(first + 1, first + many + 1)
        return first + bisect_right(later, position, key=self._batches_before)

    def _numbers_before(self, bucket: int, epoch: int) -> int:
        """Return the number of a bucket's micro batches that begin before an epoch."""
        images = self._before(bucket, epoch) - self._origin[bucket]
        return max(0, -(-images // self.micro_batch_size))

    def _batches_before(self, epoch: int) -> int:
        return sum(self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets)))

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Return bucket and index of each micro batch of an epoch, in order."""
        number = [self._numbers_before(bucket, epoch) for bucket in range(len(self.buckets))]
        turns = [
            bucket
            for bucket, first in enumerate(number)
            for _ in range(first, self._numbers_before(bucket, epoch + 1))
        ]
        if self.shuffle:
            draw = random.Random(derive_seed(self.seed, "batches", epoch))  # noqa: S311
            draw.shuffle(turns)
            turns = self._in_runs(turns, sum(number), draw)
        # The order of buckets is shuffled, but not the micro batches within a bucket. So the used
        # part of a bucket is the beginning of its sequence, and one number describes it.
        order = []
        for bucket in turns:
            order.append((bucket, number[bucket]))
            number[bucket] += 1
        return order

    def _in_runs(self, turns: list[int], start: int, draw: random.Random) -> list[int]:
        """Join turns of one group into runs; each run begins at a multiple of ``RUN``."""
        if len(set(self.groups)) < 2:
            return turns
        alike: dict[int, list[int]] = {}
        for bucket in turns:
            alike.setdefault(self.groups[bucket], []).append(bucket)
        runs = [of[at : at + RUN] for of in alike.values() for at in range(0, len(of), RUN)]
        loose = [bucket for run in runs if len(run) < RUN for bucket in run]
        runs = [run for run in runs if len(run) == RUN]
        draw.shuffle(runs)
        gap = -start % RUN
        if runs and len(loose) < gap:
            loose += runs.pop()
        return [*loose[:gap], *(bucket for run in runs for bucket in run), *loose[gap:]]

    def _draws(self, bucket: int, number: int) -> list[Draw]:
        start = self._origin[bucket] + number * self.micro_batch_size
        draws = []
        for position in range(start, start + self.micro_batch_size):
            epoch = self._epoch_of(bucket, position)
            slot = self._slots(bucket, epoch)[position - self._before(bucket, epoch)]
            draws.append(self._use(bucket, epoch, slot))
        return draws

    def _use(self, bucket: int, epoch: int, slot: int) -> Draw:
        """Return the image use at an index of an epoch's unshuffled uses."""
        for lane in self._lanes[bucket]:
            start, stop, many = lane.before(epoch), lane.before(epoch + 1), len(lane.images)
            if slot < stop - start:
                turn, place = divmod(start + slot, many)
                # A pass that lies within one epoch is shuffled by the epoch's permutation.
                whole = start <= turn * many and (turn + 1) * many <= stop
                images = lane.images if whole else self._turn(bucket, lane, turn)
                return Draw(index=images[place], epoch=turn)
            slot -= stop - start
        raise AssertionError("every use in an epoch belongs to a set")

    @cached_property
    def _known(self) -> dict[tuple[object, ...], list[int]]:
        return {}

    def _shuffled(self, *key: object, of: Sequence[int]) -> Sequence[int]:
        """Return the key's permutation of ``of``; recent permutations are cached."""
        if not self.shuffle:
            return of
        if key not in self._known:
            order = list(of)
            random.Random(derive_seed(self.seed, *key)).shuffle(order)  # noqa: S311
            # A micro batch needs its own and later epochs, so the oldest permutations can go.
            alike = [known for known in self._known if known[:-1] == key[:-1]]
            for old in alike[: 1 - _REMEMBERED]:
                del self._known[old]
            self._known[key] = order
        return self._known[key]

    def _slots(self, bucket: int, epoch: int) -> Sequence[int]:
        many = self._before(bucket, epoch + 1) - self._before(bucket, epoch)
        return self._shuffled("bucket", bucket, epoch, of=range(many))

    def _turn(self, bucket: int, lane: _Lane, turn: int) -> Sequence[int]:
        return self._shuffled("turn", lane.share, bucket, turn, of=lane.images)
