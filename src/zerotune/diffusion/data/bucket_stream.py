"""Endless micro batches of images in aspect-ratio buckets, one rank's share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.bucket_order import BucketOrder, Draw
from zerotune.diffusion.data.buckets import BucketAssignment
from zerotune.diffusion.data.stream import Batch, check_share, derive_seed
from zerotune.errors import DataError


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
