"""Seeded, resumable order of samples and micro batches, the same on all ranks."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import attrs
import torch

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
class BucketOrder:
    """An endless sequence of micro batches, each from one bucket.

    Each bucket has an endless sequence of images: one permutation per epoch, concatenated and cut
    into micro batches of equal size. The micro batches of an epoch are shuffled across buckets. A
    bucket's last micro batch of an epoch is filled up with images from the next epoch; the next
    epoch then skips these images. The sequence does not depend on the number of ranks.
    """

    buckets: tuple[tuple[int, ...], ...]
    """Image indices of each bucket; no bucket is empty."""
    micro_batch_size: int
    seed: int = 0
    shuffle: bool = True
    origin: tuple[int, ...] = ()
    """For each bucket, the number of images used before a change of the micro batch size; an empty
    tuple if it has not changed."""

    @property
    def length(self) -> int:
        """Number of images."""
        return sum(map(len, self.buckets))

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

    @cached_property
    def _origin(self) -> tuple[int, ...]:
        return self.origin or (0,) * len(self.buckets)

    def _epoch_at(self, position: int) -> int:
        """Return the epoch of the micro batch at a position."""
        first = min(
            done // len(images) for done, images in zip(self._origin, self.buckets, strict=True)
        )
        many = 1
        while self._batches_before(first + many) <= position:
            many *= 2
        later = range(first + 1, first + many + 1)
        return first + bisect_right(later, position, key=self._batches_before)

    def _numbers_before(self, bucket: int, epoch: int) -> int:
        """Return the number of a bucket's micro batches that begin before an epoch."""
        images = epoch * len(self.buckets[bucket]) - self._origin[bucket]
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
            random.Random(derive_seed(self.seed, "batches", epoch)).shuffle(turns)  # noqa: S311
        # The order of buckets is shuffled, but not the micro batches within a bucket. So the used
        # part of a bucket is the beginning of its sequence, and one number describes it.
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
            draws.append(Draw(index=self._images(bucket, epoch)[offset], epoch=epoch))
        return draws

    @cached_property
    def _known(self) -> dict[int, dict[int, list[int]]]:
        return {}

    def _images(self, bucket: int, epoch: int) -> Sequence[int]:
        """Return a bucket's images in the order of an epoch; recent orders are cached."""
        if not self.shuffle:
            return self.buckets[bucket]
        known = self._known.setdefault(bucket, {})
        if epoch not in known:
            order = list(self.buckets[bucket])
            random.Random(derive_seed(self.seed, "bucket", bucket, epoch)).shuffle(order)  # noqa: S311
            known[epoch] = order
            # A micro batch needs its own and later epochs, so the oldest permutations can go.
            for old in list(known)[:-_REMEMBERED]:
                del known[old]
        return known[epoch]
