"""Convert data to endless, resumable micro batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import TensorDataset

from zerotune.backend.distributed import ProcessGroup
from zerotune.diffusion.data import BucketStream, DataStream, ImageTensors
from zerotune.diffusion.data.sources import ImageSource
from zerotune.diffusion.data.streams import BatchStream, BucketedDataset, RepeatedBatches
from zerotune.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_IMAGES_AND_LABELS: Final = 2

_IMAGE_BATCH_DIMS: Final = 4


def as_stream(data: Any, *, engine: Engine, seed: int, **loading: Any) -> BatchStream | None:
    """Return a stream of this rank's micro batches.

    Args:
        data: A ``BatchStream`` (returned unchanged), a dataset, an iterable of this rank's batches,
            or ``None``. Any object with ``__len__`` and ``__getitem__`` counts as a dataset, except
            lists and tuples. A dataset is sharded across the ranks; each batch of a bucketed
            dataset such as ``PreparedImages`` comes from one bucket.
        engine: Provides rank, world size and micro batch size.
        seed: Seed of the order in which a dataset's samples are read.
        loading: ``num_workers`` and ``pin_memory``; accepted only with a dataset.
    """
    if data is None or isinstance(data, BatchStream):
        _check_not_reading(loading, data)
        if isinstance(data, DataStream | BucketStream):
            _check_ranks(data, engine.group)
        return data
    if isinstance(data, str | os.PathLike | ImageSource):
        name = data if isinstance(data, str | os.PathLike) else type(data).__name__
        source = f"{name}(…)" if name is not data else f"ImageFolder({os.fspath(name)!r})"
        raise DataError(
            "contains images of different sizes, which cannot form a batch",
            f"write data=PreparedImages({source}, buckets=AspectBuckets(area=1024 * 1024)), or "
            "encode latents and text embeddings once with zerotune.encode_dataset",
            "data",
            name,
        )
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_dataset and not isinstance(data, list | tuple):
        if not isinstance(data, BucketedDataset):
            data = samples_by_name(data)
        stream = BucketStream if isinstance(data, BucketedDataset) else DataStream
        return stream(
            data,
            micro_batch_size=engine.plan.micro_batch_size,
            seed=seed,
            rank=engine.group.rank,
            world_size=engine.group.world_size,
            **loading,
        )
    if isinstance(data, Iterable):
        _check_not_reading(loading, data)
        return RepeatedBatches(data)
    raise DataError(
        "is neither a dataset nor an iterable of batches",
        "pass a dataset with __len__ and __getitem__, or a DataLoader",
        "data",
        type(data).__name__,
    )


def _check_ranks(stream: DataStream | BucketStream, group: ProcessGroup) -> None:
    """Check that a stream yields the batches of this rank, and not those of another."""
    if (stream.rank, stream.world_size) != (group.rank, group.world_size):
        raise InvalidValueError(
            f"the stream yields the batches of rank {stream.rank} of {stream.world_size}, but this "
            f"is rank {group.rank} of {group.world_size}; the ranks would repeat or skip samples",
            "create the stream without rank and world_size, which are then the launcher's, or "
            "pass the dataset",
            "data",
            f"{type(stream).__name__}(rank={stream.rank}, world_size={stream.world_size})",
        )


def _check_not_reading(loading: Mapping[str, Any], data: Any) -> None:
    if loading:
        raise InvalidValueError(
            "apply to datasets only, because an iterable of batches loads its batches itself",
            "pass the dataset, or pass num_workers and pin_memory to the loader or stream",
            "workers, pin",
            type(data).__name__,
        )


def samples_by_name(data: Any) -> Any:
    """Return a dataset of dicts; a ``TensorDataset`` of images and labels is wrapped."""
    if isinstance(data, TensorDataset) and len(data.tensors) <= _IMAGES_AND_LABELS:
        images, *labels = data.tensors
        if images.ndim == _IMAGE_BATCH_DIMS and images.is_floating_point():
            return ImageTensors(images=images, labels=labels[0] if labels else None)
    if len(data):
        check_named(data[0], key="data[0]")
    return data


def check_named(batch: Any, *, key: str) -> None:
    """Check that a sample or batch is a dict of tensors."""
    if isinstance(batch, Mapping):
        odd = {
            name: type(value).__name__
            for name, value in batch.items()
            if value is None
            or isinstance(value, str | bytes)
            or type(value).__module__.startswith("PIL.")
        }
        if odd:
            raise DataError(
                "cannot be converted to tensors",
                "encode these values first with zerotune.encode_dataset or PreparedImages("
                'DatasetImages(dataset, image="image", caption="text"), buckets=…), or omit them',
                key,
                odd,
            )
        return
    kinds = [type(each).__name__ for each in batch] if isinstance(batch, list | tuple) else []
    raise DataError(
        "is not a dict; samples and batches are dicts that map names to tensors",
        'return {"images": …} with images (c, h, w) in [-1, 1], use ImageTensors(images=…, '
        "labels=…), or, for pictures, PreparedImages(DatasetImages(dataset, image=…, caption=…), "
        "buckets=…)",
        key,
        f"{type(batch).__name__} of {', '.join(kinds)}" if kinds else type(batch).__name__,
    )
