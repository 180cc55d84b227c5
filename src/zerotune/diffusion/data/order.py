"""The order of samples and micro batches: fixed by a seed, the same on all ranks, resumable."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

import attrs
import torch


def derive_seed(seed: int, *parts: object) -> int:
    """An independent seed for one purpose, the same on every machine; 0 to 2**63 - 1."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@attrs.frozen(kw_only=True)
class SampleOrder:
    """An endless sequence of sample numbers: one permutation per epoch, back to back.

    A batch may hold the end of one epoch and the start of the next. That is what lets every
    epoch use each sample exactly once while all ranks take equal steps, whatever the sizes.
    """

    length: int
    """Samples of the dataset."""
    seed: int
    shuffle: bool = True

    def between(self, start: int, stop: int) -> list[int]:
        """Sample numbers at positions ``start`` to ``stop - 1`` of the sequence."""
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
        epoch = self._epoch_at(start)
        offset = start - self._batches_before(epoch)
        while True:
            for bucket, number in self._epoch(epoch)[offset:]:
                yield self._draws(bucket, number)
            epoch, offset = epoch + 1, 0

    def used(self, position: int) -> tuple[int, ...]:
        """Images of each bucket that are behind the first ``position`` micro batches."""
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

    @cached_property
    def _first_epoch(self) -> int:
        return min(
            done // len(bucket) for done, bucket in zip(self._origin, self.buckets, strict=True)
        )

    def _epoch_at(self, position: int) -> int:
        """The epoch to which a micro batch belongs."""
        first, many = self._first_epoch, 1
        while self._batches_before(first + many) <= position:
            many *= 2
        later = range(first + 1, first + many + 1)
        return first + bisect_right(later, position, key=self._batches_before)

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
