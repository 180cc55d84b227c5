"""Batches for training: sources of images, aspect-ratio buckets, order, caches."""

from __future__ import annotations

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
    "Batch",
    "BatchStream",
    "DataStream",
    "ImageTensors",
    "RepeatedBatches",
    "SampleOrder",
    "derive_seed",
]
