"""Batches in an order that is fixed by a seed, shared by all ranks, and resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune.errors import DataError, InvalidValueError

Batch = Mapping[str, torch.Tensor]
"""Tensors by name, batch first: ``"images"`` (b, c, h, w), ``"labels"`` (b,), …"""


@runtime_checkable
class BatchStream(Protocol):
    """Endless micro batches that can be left and continued."""

    def __next__(self) -> Batch:
        """This rank's next micro batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, the same on every rank; JSON types only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved place."""
        ...


class ImageTensors(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset that lies in memory.

    Args:
        images: (n, c, h, w) in [-1, 1].
        labels: (n,), integers; left out of the batches when not given.

    Raises:
        DataError: Lengths differ, or there is nothing.
    """

    def __init__(self, *, images: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        if len(images) == 0 or (labels is not None and len(labels) != len(images)):
            raise DataError(
                "images and labels must be as many, and at least one",
                key="labels",
                value=None if labels is None else len(labels),
                fix=f"{len(images)} images were given",
            )
        self._tensors = {"images": images} | ({} if labels is None else {"labels": labels})

    def __len__(self) -> int:
        return len(self._tensors["images"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self._tensors.items()}


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


class _RankBatches(torch.utils.data.Sampler[list[int]]):
    """One rank's part of every global micro batch, from a position on, endlessly."""

    def __init__(
        self, order: SampleOrder, *, start: int, size: int, rank: int, world_size: int
    ) -> None:
        self._order, self._start, self._size = order, start, size
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        # A window of whole epochs at a time, so that each permutation is drawn once.
        length, step = self._order.length, self._size * self._world_size
        position = self._start
        ahead: list[int] = []
        while True:
            if len(ahead) < step:
                end = position + len(ahead)
                ahead += self._order.between(end, end + step + length - (end + step) % length)
            mine = ahead[self._rank * self._size : (self._rank + 1) * self._size]
            del ahead[:step]
            position += step
            yield mine


class DataStream:
    """Endless micro batches of a map-style dataset, one rank's share.

    The order depends on the seed only: two ranks with micro batches of 4 see together what one
    rank with 8 sees. The place in it is one number, the samples all ranks have consumed, so a
    run can continue with another number of ranks or another batch size.

    Args:
        dataset: Anything with ``__len__`` and ``__getitem__``, such as a
            ``torch.utils.data.Dataset`` or a Hugging Face dataset in torch format.
        micro_batch_size: Samples per batch and rank.
        seed: Fixes the order.
        rank: This process.
        world_size: Processes that share the data.
        shuffle: ``False``: the dataset's own order, epoch after epoch.
        num_workers: Processes that read ahead; 0 reads in this process.
        collate: Makes a batch of a list of samples; torch's default when not given.
        pin_memory: Put batches in pinned memory, for faster copies to a GPU.

    Raises:
        InvalidValueError: A size or rank that cannot be.
        DataError: The dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Batch] | None = None,
        pin_memory: bool = False,
    ) -> None:
        check_share(micro_batch_size, rank, world_size)
        if len(dataset) == 0:
            raise DataError("is empty", key="dataset", value=0, fix="give at least one sample")
        if hasattr(dataset, "assignment"):
            # It would give samples of many sizes, each with the flip of its first epoch for ever.
            raise DataError(
                "its samples lie in buckets, which this stream does not know",
                key="dataset",
                value=type(dataset).__name__,
                fix="give it to BucketStream",
            )
        self._dataset = dataset
        self._size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._order = SampleOrder(length=len(dataset), seed=seed, shuffle=shuffle)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate,
            "pin_memory": pin_memory,
        }
        self._position = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def position(self) -> int:
        """Samples consumed by all ranks together since the start of the first epoch."""
        return self._position

    @property
    def epoch(self) -> float:
        """Epochs consumed; 1.5 is the middle of the second."""
        return self._position / self._order.length

    @property
    def steps_per_epoch(self) -> float:
        """Micro batches that each rank takes in one epoch, on average."""
        return self._order.length / self._size / self._world_size

    def __iter__(self) -> DataStream:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._open()
        batch: Batch = next(self._iterator)
        # Counted here and not in the sampler, which runs ahead of what was consumed.
        self._position += self._size * self._world_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the order, the same on every rank."""
        return {
            "position": self._position,
            "length": self._order.length,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved place, in the saved order.

        Raises:
            DataError: The dataset has another length, so the order would be another.
        """
        if state["length"] != self._order.length:
            raise DataError(
                f"the dataset had {state['length']} samples when this state was saved",
                key="dataset",
                value=self._order.length,
                fix="give the same data, or start a new stream and leave its state out",
            )
        self._order = attrs.evolve(self._order, seed=state["seed"], shuffle=state["shuffle"])
        self._position = int(state["position"])
        self._iterator = None

    def _open(self) -> Iterator[Any]:
        sampler = _RankBatches(
            self._order,
            start=self._position,
            size=self._size,
            rank=self._rank,
            world_size=self._world_size,
        )
        # Without a generator of its own the loader would draw its workers' seed from the global
        # one and shift every later random number of the model.
        generator = torch.Generator().manual_seed(
            derive_seed(self._order.seed, "workers", self._rank, self._position)
        )
        return iter(
            torch.utils.data.DataLoader(
                self._dataset, batch_sampler=sampler, generator=generator, **self._options
            )
        )


class RepeatedBatches:
    """Endless batches of any iterable of batches: a ``DataLoader``, a list, your own class.

    It is started again when it ends. To continue a run, as many batches as were consumed are
    read and thrown away; an iterable with a random order must fix it by its own seed.

    Args:
        batches: What gives this rank's micro batches each time it is iterated.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._count = 0
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> RepeatedBatches:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator, None) if self._iterator is not None else None
        if batch is None:
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                f"gave no batch ({self._count} before)",
                key="data",
                value=type(self._batches).__name__,
                fix="give something that can be iterated again and again, not a generator",
            )
        self._count += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches each rank has consumed."""
        return {"batches": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Skip to a saved place."""
        self._count, self._iterator = 0, None
        while self._count < int(state["batches"]):
            next(self)


def derive_seed(seed: int, *parts: object) -> int:
    """An independent seed for one purpose, the same on every machine; 0 to 2**63 - 1."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def check_share(micro_batch_size: int, rank: int, world_size: int) -> None:
    """Refuse a micro batch size or rank that cannot be."""
    if micro_batch_size < 1:
        raise InvalidValueError(
            "must be at least 1", key="micro_batch_size", value=micro_batch_size, fix="write 1"
        )
    if not 0 <= rank < world_size:
        raise InvalidValueError(
            f"lies between 0 and {world_size - 1}", key="rank", value=rank, fix="pass both"
        )
