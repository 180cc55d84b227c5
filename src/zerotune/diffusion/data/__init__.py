"""Batches for training: sources of images, aspect-ratio buckets, order, caches."""

from __future__ import annotations

from zerotune.diffusion.data.bucket_order import BucketOrder, Draw
from zerotune.diffusion.data.bucket_stream import (
    BucketedDataset,
    BucketStream,
    Captions,
    stack_samples,
)
from zerotune.diffusion.data.buckets import AspectBuckets, Bucket, BucketAssignment, Placement
from zerotune.diffusion.data.stream import (
    Batch,
    BatchStream,
    DataStream,
    ImageTensors,
    RepeatedBatches,
    SampleOrder,
    derive_seed,
)

__all__ = [
    "AspectBuckets",
    "Batch",
    "BatchStream",
    "Bucket",
    "BucketAssignment",
    "BucketOrder",
    "BucketStream",
    "BucketedDataset",
    "Captions",
    "DataStream",
    "Draw",
    "ImageTensors",
    "Placement",
    "RepeatedBatches",
    "SampleOrder",
    "derive_seed",
    "stack_samples",
]
