"""Endless, resumable streams of one rank's micro batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import attrs
import torch
from torch.utils._pytree import tree_leaves

from zerotune._util.text import whole
from zerotune.backend.launch import rank_and_world_size
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.batches import stack_samples
from zerotune.diffusion.data.buckets import BucketAssignment
from zerotune.diffusion.data.order import BucketOrder, Draw, SampleOrder, derive_seed
from zerotune.errors import UNSET, DataError, InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerotune.diffusion.data.batches import Batch

T = TypeVar("T")

_MOST_INT64: Final = 2**63 - 1

_MOST_BATCHES: Final = 10**9
"""Larger than any valid position, because a resume skips batches one by one."""

_COMPARED: Final = 1024
"""Elements of each tensor of the first batch that a resumed run compares."""


@runtime_checkable
class BatchStream(Protocol):
    """Protocol: an endless, resumable iterator over micro batches."""

    def __next__(self) -> Batch:
        """Return this rank's next micro batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the stream position as JSON types, identical on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Args:
            state: Value that ``state_dict`` returned.
        """
        ...


# -- Streams.


class _OrderedStream(ABC):
    """One rank's micro batches of a dataset whose sample order is known in advance.

    The position is one number for all ranks; prefetched batches are discarded if it changes.
    """

    rank: int
    world_size: int

    _order: SampleOrder | BucketOrder
    _taken: int
    """Increase of the position per step of one micro batch on each rank."""

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        rank: int | None,
        world_size: int | None,
        **loading: Any,
    ) -> None:
        whole(micro_batch_size, key="micro_batch_size", fix="write 1")
        if rank is None or world_size is None:
            here = rank_and_world_size()
            rank = here[0] if rank is None else rank
            world_size = here[1] if world_size is None else world_size
        check_rank(rank, world_size)
        self._dataset, self.rank, self.world_size = dataset, rank, world_size
        self._loading = loading
        self._position = 0
        self._iterator: Iterator[Batch] | None = None

    @abstractmethod
    def _ahead(self) -> Iterator[list[Any]]:
        """Yield the contents of this rank's micro batches endlessly, from the current position."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._open()
        batch = next(self._iterator)
        # Counted here and not in the sampler, which runs ahead of what was consumed.
        self._position += self._taken
        return batch

    def _continue(self, order: SampleOrder | BucketOrder, position: int) -> None:
        self._order, self._position, self._iterator = order, position, None

    def _open(self) -> Iterator[Batch]:
        # Without its own generator, the loader would draw its workers' seed from the global
        # generator, and change all later random numbers of the model.
        generator = torch.Generator().manual_seed(
            derive_seed(self._order.seed, "workers", self.rank, self._position)
        )
        return iter(
            torch.utils.data.DataLoader(
                self._dataset,
                batch_sampler=self._ahead(),
                generator=generator,
                **self._loading,
            )
        )


class DataStream(_OrderedStream):
    """Endless stream of one rank's micro batches from a map-style dataset.

    The sample order does not depend on the number of ranks. Two ranks with micro batches of 4
    process the same samples per step as one rank with micro batches of 8. The position counts the
    samples that all ranks have consumed, so a run can resume with a different number of ranks or
    micro batch size.

    Args:
        dataset: Any object with ``__len__`` and ``__getitem__``, such as a
            ``torch.utils.data.Dataset`` or a Hugging Face dataset in torch format.
        micro_batch_size: Number of samples per micro batch on each rank.
        seed: Seed of the sample order.
        rank: Rank of this process; by default the process group's, or the launcher's if no group
            exists yet.
        world_size: Number of processes that share the data; default as for ``rank``.
        shuffle: ``False`` keeps the dataset's order in every epoch.
        num_workers: Number of worker processes that prefetch; 0 loads batches in this process.
        collate: Function that collates a list of samples; default ``stack_samples``.
        pin_memory: Page-lock batches for faster copies to a GPU.

    Attributes:
        rank: Rank whose micro batches the stream yields.
        world_size: Number of processes that share the data.
        decisions: A warning if the dataset has fewer than ``micro_batch_size * world_size``
            samples.

    Raises:
        InvalidValueError: ``micro_batch_size`` or ``rank`` is out of range.
        DataError: The dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Batch] = stack_samples,
        pin_memory: bool = False,
    ) -> None:
        loading = {"num_workers": num_workers, "collate_fn": collate, "pin_memory": pin_memory}
        super().__init__(dataset, micro_batch_size, rank, world_size, **loading)
        if len(dataset) == 0:
            raise DataError("is empty", "pass at least one sample", "dataset", 0)
        if hasattr(dataset, "assignment"):
            # Batches would mix sizes, and each image would keep the flip of its first epoch.
            raise DataError(
                "samples of this dataset differ in size, which DataStream does not support",
                "pass the dataset to BucketStream",
                "dataset",
                type(dataset).__name__,
            )
        self._size, self._taken = micro_batch_size, micro_batch_size * self.world_size
        self._order: SampleOrder = SampleOrder(length=len(dataset), seed=seed, shuffle=shuffle)
        self.decisions = _too_few(len(dataset), self._taken)
        announce(self.decisions, rank=self.rank)

    @property
    def position(self) -> int:
        """Number of samples that all ranks have consumed since the start of the run."""
        return self._position

    @property
    def epoch(self) -> float:
        """Number of epochs consumed; 1.5 is halfway through the second epoch."""
        return self._position / self._order.length

    @property
    def steps_per_epoch(self) -> float:
        """Mean number of micro batches per epoch on each rank."""
        return self._order.length / self._size / self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sample order, identical on every rank."""
        return {
            "position": self._position,
            "length": self._order.length,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the saved seed and ``shuffle`` setting.

        Raises:
            DataError: The state is invalid, or the length of the dataset has changed. In this case,
                the position of the stream is unchanged.
        """
        length = saved(state, "length", int)
        order = attrs.evolve(
            self._order,
            seed=saved(state, "seed", int, least=-_MOST_INT64),
            shuffle=saved(state, "shuffle", bool),
        )
        position = saved(state, "position", int)
        if length != self._order.length:
            raise DataError(
                f"the dataset had {length} samples when this state was saved",
                "use the same data, or start a new stream without this state",
                "dataset",
                self._order.length,
            )
        self._continue(order, position)

    def _ahead(self) -> Iterator[list[int]]:
        # Fills the window to the end of an epoch, so that each permutation is drawn once.
        order, step = self._order, self._taken
        position = self._position
        window: list[int] = []
        while True:
            if len(window) < step:
                end = position + len(window)
                rest_of_epoch = order.length - (end + step) % order.length
                window += order.between(end, end + step + rest_of_epoch)
            mine = window[self.rank * self._size : (self.rank + 1) * self._size]
            del window[:step]
            position += step
            yield mine


def _too_few(length: int, taken: int) -> tuple[Decision, ...]:
    if length >= taken:
        return ()
    return (
        Decision(
            "data",
            f"{length} samples",
            f"{taken} needed for one micro batch per rank",
            "some samples occur several times in one step; use more data or smaller micro batches",
            "warning",
        ),
    )


# -- Streams over a dataset whose samples lie in buckets.


@runtime_checkable
class BucketedDataset(Protocol):
    """Protocol: a dataset whose samples are grouped into buckets by size."""

    @property
    def assignment(self) -> BucketAssignment:
        """Bucket of each sample."""
        ...

    @property
    def identity(self) -> str:
        """Digest that changes if samples are added, removed, reordered or resized."""
        ...

    def __getitem__(self, draw: Draw) -> Mapping[str, Any]:
        """Return the tensors and strings of one sample; shapes are equal within a bucket."""
        ...


class BucketStream(_OrderedStream):
    """Endless stream of micro batches from a bucketed dataset, each from a single bucket.

    Every rank gets a full micro batch at every step. The sequence of micro batches does not depend
    on the number of ranks. Rank r of w gets every w-th micro batch, starting with micro batch r. A
    run that resumes with a different number of ranks continues the same sequence. With a different
    micro batch size, a resumed run continues with the images that have not been used yet.

    Args:
        dataset: Bucketed dataset, such as ``PreparedImages`` or ``CachedImages``.
        micro_batch_size: Number of samples per micro batch on each rank.
        seed: Seed of the sample order.
        rank: Rank of this process; by default the process group's, or the launcher's if no group
            exists yet.
        world_size: Number of processes that share the data; default as for ``rank``.
        shuffle: ``False`` yields one bucket after another, each in the dataset's order.
        num_workers: Number of worker processes that prefetch; 0 loads batches in this process.
        collate: Function that collates a list of samples; default ``stack_samples``.
        pin_memory: Page-lock batches for faster copies to a GPU.

    Attributes:
        rank: Rank whose micro batches the stream yields.
        world_size: Number of processes that share the data.
        decisions: A warning if a bucket has fewer images than a micro batch.

    Raises:
        InvalidValueError: ``micro_batch_size`` or ``rank`` is out of range.
    """

    def __init__(
        self,
        dataset: BucketedDataset,
        *,
        micro_batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Batch] = stack_samples,
        pin_memory: bool = False,
    ) -> None:
        loading = {"num_workers": num_workers, "collate_fn": collate, "pin_memory": pin_memory}
        super().__init__(dataset, micro_batch_size, rank, world_size, **loading)
        self._taken = self.world_size
        self._order: BucketOrder = BucketOrder(
            buckets=tuple(dataset.assignment.members.values()),
            micro_batch_size=micro_batch_size,
            seed=seed,
            shuffle=shuffle,
        )
        self._identity = dataset_digest(dataset)
        self.decisions = _small_buckets(dataset.assignment, micro_batch_size)
        announce(self.decisions, rank=self.rank)

    @property
    def epoch(self) -> float:
        """Number of epochs consumed; 1.5 is halfway through the second epoch."""
        return sum(self._order.used(self._position)) / self._order.length

    @property
    def steps_per_epoch(self) -> float:
        """Mean number of micro batches per epoch on each rank."""
        return self._order.length / self._order.micro_batch_size / self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sample order, identical on every rank."""
        return {
            "position": self._position,
            "origin": list(self._order.origin),
            "micro_batch_size": self._order.micro_batch_size,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "data": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with the saved seed and ``shuffle`` setting.

        Raises:
            DataError: The state is invalid, or the images or their buckets have changed. After this
                error, the stream's position is unchanged.
        """
        if saved(state, "data", str) != self._identity:
            raise DataError(
                "the images or their buckets have changed since this state was saved",
                "use the same data and buckets, or start a new stream without this state",
                "dataset",
                self._identity,
            )
        order = attrs.evolve(
            self._order,
            seed=saved(state, "seed", int, least=-_MOST_INT64),
            shuffle=saved(state, "shuffle", bool),
            micro_batch_size=saved(state, "micro_batch_size", int, least=1),
            origin=self._origin(saved(state, "origin", list)),
        )
        position, size = saved(state, "position", int), self._order.micro_batch_size
        if size != order.micro_batch_size:
            order = attrs.evolve(order, micro_batch_size=size, origin=order.used(position))
            position = 0
        self._continue(order, position)

    def _origin(self, found: list[Any]) -> tuple[int, ...]:
        """Return the saved number of used images of each bucket."""
        if len(found) not in (0, len(self._order.buckets)):
            raise no_place("origin", found)
        by_bucket = dict(enumerate(found))
        return tuple(saved(by_bucket, bucket, int, of="origin") for bucket in by_bucket)

    def _ahead(self) -> Iterator[list[Draw]]:
        for number, draws in enumerate(self._order.batches(self._position)):
            if number % self.world_size == self.rank:
                yield draws


def dataset_digest(dataset: BucketedDataset) -> str:
    """Return a digest of the samples and buckets, which determine the sample order."""
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
            "buckets",
            None,
            size,
            f"these buckets have fewer images than a micro batch: {', '.join(small)}; their "
            "images are repeated within a batch, and left out of some later epochs; set "
            f"minimum={size} to move them to buckets with more images",
            "warning",
        ),
    )


# -- Streams over ready-made batches.


class RepeatedBatches:
    """Endless batches from an iterable, such as a ``DataLoader``, a list or your own class.

    The iterable is restarted whenever it ends. A resumed run reads and discards the batches used
    before the checkpoint, so an iterable that shuffles must reproduce its order; otherwise, the
    trainer refuses to resume.

    Args:
        batches: A restartable iterable over this rank's micro batches.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._count = 0
        self.first: str | None = None
        """Digest of the first batch, which shows whether a resumed run reads the same order."""
        self._iterator: Iterator[Batch] | None = None

    @property
    def count(self) -> int:
        """Number of batches that each rank has consumed."""
        return self._count

    def __iter__(self) -> RepeatedBatches:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator, None) if self._iterator is not None else None
        if batch is None:
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                f"ended after {self._count} batches and cannot be restarted",
                "pass an iterable that can be restarted, such as a list instead of a generator",
                "data",
                type(self._batches).__name__,
            )
        if self._count == 0:
            self.first = _digest(batch)
        self._count += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that each rank has consumed."""
        return {"batches": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read and discard batches up to a saved position.

        Raises:
            DataError: The state is invalid, or the iterable yields no batch.
        """
        count = saved(state, "batches", int, most=_MOST_BATCHES)
        self._count, self._iterator = 0, None
        while self._count < count:
            next(self)


def _digest(batch: Batch) -> str:
    tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    strided = [each.detach().flatten() for each in tensors if each.layout is torch.strided]
    few = [each[:: max(1, each.numel() // _COMPARED)].tolist() for each in strided]
    return hashlib.sha256(repr(few).encode()).hexdigest()[:32]


# -- Shared by all streams.


def saved(
    state: Any,
    key: Any,
    kind: type[T],
    *,
    least: int = 0,
    most: int = _MOST_INT64,
    of: str = "state",
) -> T:
    """Check and return one field of a stream's saved state.

    Args:
        state: The saved state.
        key: Name of the field.
        kind: Required type.
        least: Minimum of an integer field.
        most: Maximum of an integer field.
        of: What to call ``state`` in the error message.
    """
    value: Any = state.get(key, UNSET) if isinstance(state, Mapping) else UNSET
    if isinstance(value, int) and kind is int:
        fits = not isinstance(value, bool) and least <= value <= most
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise no_place(f"{of}.{key}", value)
    found: T = value
    return found


def no_place(key: str, value: Any) -> DataError:
    """Return the exception for an invalid saved state."""
    return DataError(
        "is missing from the saved position of this stream"
        if value is UNSET
        else "is not a valid saved position",
        "pass a state that state_dict() returned, or start a new stream without a state",
        key,
        value,
    )


def check_rank(rank: int, world_size: int) -> None:
    """Check that a rank is below the number of ranks."""
    if not 0 <= rank < world_size:
        raise InvalidValueError(
            f"must be between 0 and {world_size - 1}", "pass both rank and world_size", "rank", rank
        )
