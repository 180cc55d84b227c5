"""Batches for training: sources of images, aspect-ratio buckets, order, caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune._util.lazy import lazy_attribute
from zerotune.diffusion.data.buckets import AspectBuckets, Bucket, BucketAssignment, Placement
from zerotune.diffusion.data.cache import (
    CachedImages,
    CacheSettings,
    TensorCache,
    cache_latents,
    cache_texts,
    hash_weights,
)
from zerotune.diffusion.data.folder import ImageFolder, MetadataFile, TextBeside
from zerotune.diffusion.data.images import (
    AlphaOnColor,
    BrokenImage,
    DropAlpha,
    HeaderOnly,
    RefuseBroken,
    SkipBroken,
    WholeImage,
    write_broken,
)
from zerotune.diffusion.data.iterable import StreamedImages
from zerotune.diffusion.data.order import BucketOrder, Draw, SampleOrder, derive_seed
from zerotune.diffusion.data.preparation import (
    Augmentation,
    CenterCrop,
    DetailCrop,
    Preparation,
    PreparedImages,
)
from zerotune.diffusion.data.sources import ImageItem, ImageSource, JoinedSources, RepeatedSource
from zerotune.diffusion.data.streams import (
    Batch,
    BatchStream,
    BucketedDataset,
    BucketStream,
    Captions,
    DataStream,
    ImageTensors,
    RepeatedBatches,
    stack_samples,
)
from zerotune.diffusion.data.tar_shards import TarShards

if TYPE_CHECKING:
    from zerotune.diffusion.data.tools.hugging_face import DatasetImages, HuggingFaceImages
    from zerotune.diffusion.data.tools.priors import PriorPreservation

__all__ = [
    # Sources
    "ImageSource",
    "ImageItem",
    "ImageFolder",
    "TextBeside",
    "MetadataFile",
    "TarShards",
    "HuggingFaceImages",
    "DatasetImages",
    "RepeatedSource",
    "JoinedSources",
    "WholeImage",
    "HeaderOnly",
    "SkipBroken",
    "RefuseBroken",
    "BrokenImage",
    "write_broken",
    # Buckets
    "AspectBuckets",
    "Bucket",
    "BucketAssignment",
    "Placement",
    # Samples
    "PreparedImages",
    "Preparation",
    "AlphaOnColor",
    "DropAlpha",
    "CenterCrop",
    "DetailCrop",
    "Augmentation",
    "ImageTensors",
    # Caches
    "TensorCache",
    "CacheSettings",
    "hash_weights",
    "cache_latents",
    "cache_texts",
    "CachedImages",
    # Streams
    "BatchStream",
    "Batch",
    "Captions",
    "BucketStream",
    "BucketedDataset",
    "BucketOrder",
    "Draw",
    "stack_samples",
    "StreamedImages",
    "DataStream",
    "SampleOrder",
    "RepeatedBatches",
    "PriorPreservation",
    "derive_seed",
]

_TOOLS = {
    "DatasetImages": "tools.hugging_face",
    "HuggingFaceImages": "tools.hugging_face",
    "PriorPreservation": "tools.priors",
}

__getattr__ = lazy_attribute(globals(), _TOOLS)


def __dir__() -> list[str]:
    return sorted({*globals(), *_TOOLS})
