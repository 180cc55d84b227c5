"""Whatever somebody calls data, as endless resumable micro batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import TensorDataset

from zerotune.diffusion.data import (
    BatchStream,
    BucketedDataset,
    BucketStream,
    DataStream,
    ImageTensors,
    RepeatedBatches,
)
from zerotune.errors import DataError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_IMAGES_AND_LABELS: Final = 2
_IMAGE_BATCH_DIMS: Final = 4


def as_stream(data: Any, *, engine: Engine, seed: int) -> BatchStream | None:
    """A stream of this rank's micro batches.

    Args:
        data: A ``BatchStream`` is taken as it is. What has ``__len__`` and ``__getitem__`` and is
            no list or tuple is a dataset, shared over the ranks in an order fixed by ``seed``;
            one in buckets, such as ``PreparedImages``, gives batches of one bucket each.
            Any other iterable gives this rank's own batches. ``None`` is no data.
        engine: Tells rank, world size and micro batch size.
        seed: Fixes the order.
    """
    if data is None or isinstance(data, BatchStream):
        return data
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
        )
    if isinstance(data, Iterable):
        return RepeatedBatches(data)
    raise DataError(
        "is neither a dataset nor an iterable of batches",
        key="data",
        value=type(data).__name__,
        fix="give something with __len__ and __getitem__, or a DataLoader",
    )


def samples_by_name(data: Any) -> Any:
    """A dataset of dicts: this one, or what a ``TensorDataset`` of images and labels holds."""
    if isinstance(data, TensorDataset) and len(data.tensors) <= _IMAGES_AND_LABELS:
        images, *labels = data.tensors
        if images.ndim == _IMAGE_BATCH_DIMS and images.is_floating_point():
            return ImageTensors(images=images, labels=labels[0] if labels else None)
    if len(data):
        check_named(data[0], key="data[0]")
    return data


def check_named(found: Any, *, key: str) -> None:
    """Whether a sample or batch is a dict that a step can work with."""
    if isinstance(found, Mapping):
        odd = {name: type(value).__name__ for name, value in found.items() if not _collates(value)}
        if odd:
            raise DataError(
                "no tensors can be made of these",
                key=key,
                value=odd,
                fix="encode them before (zerotune.encode_dataset, or PreparedImages over "
                'DatasetImages(dataset, image="image", caption="text")), or leave them out',
            )
        return
    kinds = [type(each).__name__ for each in found] if isinstance(found, list | tuple) else []
    raise DataError(
        "samples and batches are dicts of tensors by name",
        key=key,
        value=f"{type(found).__name__} of {', '.join(kinds)}" if kinds else type(found).__name__,
        fix=_answer(found),
    )


def _collates(value: Any) -> bool:
    return value is not None and not isinstance(value, str | bytes) and not _is_picture(value)


def _is_picture(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL"


def _answer(found: Any) -> str:
    pair = isinstance(found, list | tuple) and len(found) > 0
    if _is_picture(found[0] if pair else found):
        take = (
            "image=0, caption=lambda _: ''" if pair else "image=lambda s: s, caption=lambda _: ''"
        )
        return f"PreparedImages over DatasetImages(dataset, {take}); see the page on data"
    if pair:
        return (
            'return {"images": …, "labels": …} with images (c, h, w) in [-1, 1], or give '
            "ImageTensors(images=…, labels=…)"
        )
    return 'return {"images": …}, images (c, h, w) in [-1, 1], or give ImageTensors(images=…)'


def needed(stream: BatchStream | None) -> BatchStream:
    """The stream, for training."""
    if stream is None:
        raise DataError(
            "there is nothing to train on",
            key="data",
            value=None,
            fix="Trainer(data=...): a dataset or an iterable of batches",
        )
    return stream
