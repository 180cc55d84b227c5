"""Batches for training: sources of images, aspect-ratio buckets, order, caches."""

from __future__ import annotations

from zerotune.diffusion.data.buckets import (
    AspectBuckets,
    Bucket,
    BucketAssignment,
    BucketedDataset,
    BucketOrder,
    BucketStream,
    Captions,
    Draw,
    Placement,
    stack_samples,
)
from zerotune.diffusion.data.cache import (
    CachedImages,
    CacheSettings,
    TensorCache,
    cache_latents,
    cache_texts,
    hash_weights,
)
from zerotune.diffusion.data.folder import ImageFolder, MetadataFile, TextBeside
from zerotune.diffusion.data.hugging_face import DatasetImages, HuggingFaceImages
from zerotune.diffusion.data.pictures import (
    AlphaOnColor,
    BrokenImage,
    DropAlpha,
    HeaderOnly,
    RefuseBroken,
    SkipBroken,
    WholeImage,
    write_broken,
)
from zerotune.diffusion.data.prepared import (
    Augmentation,
    CenterCrop,
    DetailCrop,
    Preparation,
    PreparedImages,
)
from zerotune.diffusion.data.priors import PriorPreservation
from zerotune.diffusion.data.source import ImageItem, ImageSource, JoinedSources, RepeatedSource
from zerotune.diffusion.data.stream import (
    Batch,
    BatchStream,
    DataStream,
    ImageTensors,
    RepeatedBatches,
    SampleOrder,
    derive_seed,
)
from zerotune.diffusion.data.streamed import StreamedImages
from zerotune.diffusion.data.tar_shards import TarShards

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
