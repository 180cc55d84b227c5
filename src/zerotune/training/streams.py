"""Whatever somebody calls data, as endless resumable micro batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zerotune.diffusion.data import (
    BatchStream,
    BucketedDataset,
    BucketStream,
    DataStream,
    RepeatedBatches,
)
from zerotune.errors import DataError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


def as_stream(data: Any, *, engine: Engine, seed: int) -> BatchStream | None:
    """A stream of this rank's micro batches.

    Args:
        data: A ``BatchStream`` is taken as it is. What has ``__len__`` and ``__getitem__`` and is
            no list or tuple is a dataset, shared over the ranks in an order fixed by ``seed``;
            one in buckets, such as ``PreparedImages``, gives batches of one bucket each.
            Any other iterable gives this rank's own batches. ``None`` is no data.
        engine: Tells rank, world size and micro batch size.
        seed: Fixes the order.

    Raises:
        DataError: None of these.
    """
    if data is None or isinstance(data, BatchStream):
        return data
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_dataset and not isinstance(data, list | tuple):
        stream = BucketStream if isinstance(data, BucketedDataset) else DataStream
        return stream(
            data,
            micro_batch_size=engine.plan.micro_batch_size,
            seed=seed,
            rank=engine.group.rank,
            world_size=engine.group.world_size,
        )
    if isinstance(data, Iterable):
        return RepeatedBatches(data)
    raise DataError(
        "is neither a dataset nor an iterable of batches",
        key="data",
        value=type(data).__name__,
        fix="give something with __len__ and __getitem__, or a DataLoader",
    )


def needed(stream: BatchStream | None) -> BatchStream:
    """The stream, for training.

    Raises:
        DataError: There is none.
    """
    if stream is None:
        raise DataError(
            "there is nothing to train on",
            key="data",
            value=None,
            fix="Trainer(data=...): a dataset or an iterable of batches",
        )
    return stream
