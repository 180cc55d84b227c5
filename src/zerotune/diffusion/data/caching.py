"""Fill caches of latents and text embeddings, and train from them.

``cache_latents`` and ``cache_texts`` shard the work across ranks; ``CachedImages`` reads the caches
during training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

import torch
from typing_extensions import Unpack

from zerotune._util.text import whole
from zerotune.diffusion.data.batches import row_of, stack_named
from zerotune.diffusion.data.buckets import BucketAssignment
from zerotune.diffusion.data.cache import cache_names, hash_key
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import (
    LOSS_MASKS,
    REFERENCE_IMAGES,
    PreparedImages,
    micro_conditioning,
    shrunk,
)
from zerotune.diffusion.data.sources import REFERENCE
from zerotune.diffusion.data.streams import check_rank
from zerotune.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from zerotune.diffusion.data.cache import TensorCache

EncodeImages = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""Function that encodes images (b, 3, h, w) in [-1, 1] as named tensors, batch first, such as
``{"latents": …}``."""

EncodeTexts = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Function that encodes captions as named tensors, batch first, such as
``{"prompt_embeds": …}``."""

Progress = Callable[[int, int], None]
"""Function that is called with two counts for this rank: finished items and total items."""

TEXTS: Final = "texts"
"""Cache kind for text embeddings."""

EDITS: Final = "edits"
"""Cache kind for embeddings of captions that are encoded together with the image to edit."""

EncodeEdits = Callable[[Sequence[str], torch.Tensor], Mapping[str, torch.Tensor]]
"""Function like ``EncodeTexts`` that also receives the images to edit: (b, 3, h, w) in [-1, 1], or
(b, r, 3, h, w) for several images per caption."""

ReadImages = Callable[[Mapping[str, torch.Tensor]], torch.Tensor | None]
"""Function that takes a batch and returns the images for the text encoder, or ``None``."""


class CacheOptions(TypedDict, total=False):
    """Options of the functions that fill a cache."""

    batch_size: int
    """Number of images or texts per call of the encoder."""
    shard_size: int
    """Number of images or texts per file."""
    rank: int
    """Rank of this process; default 0."""
    world_size: int
    """Number of processes that share the work; default 1."""
    progress: Progress | None
    """Function that is called at the start and after each batch, to report progress."""
    release: Callable[[], None] | None
    """Function that frees the encoder, such as ``lambda: vae.to("cpu")``. It is called when this
    rank has finished, even if it had no work."""
    barrier: Callable[[], None] | None
    """Function that waits for all ranks; required with more than one rank."""


def cache_latents(
    dataset: PreparedImages,
    *,
    cache: TensorCache,
    encode: EncodeImages,
    encode_references: EncodeImages | None = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Encode all images whose latents are not cached yet. Collective.

    The key of an image is a hash of its stored bytes, mask, references, bucket, preparation and
    mirroring. Masks are stored at latent size as ``loss_masks``, and encoded references as
    ``reference_latents``. If some images have several references, ``reference_latents`` has the
    shape (b, r, …). A file is written after every ``shard_size`` images. After an interruption,
    another call therefore encodes only the missing images, even with a different number of ranks.

    Args:
        dataset: Images to encode; if the augmentation flips images, the mirrored images are encoded
            as well.
        cache: Cache to fill.
        encode: Function that runs the VAE on a batch of equally sized images. The function returns
            named tensors (b, …): the mean of the latents, plus the standard deviation if the loop
            samples new latents in each epoch.
        encode_references: Function that encodes reference images; default ``encode``.
        **options: Fields of ``CacheOptions``; by default 4 images per call and 256 per file.

    Raises:
        DataError: An image is broken, or the encoder returns the wrong number of tensors or
            non-finite values.
        InvalidValueError: ``batch_size`` or ``rank`` is out of range, or ``barrier`` is missing
            although there are several ranks.
    """
    images = CachedImages(dataset, latents=cache)
    shapes: dict[str, tuple[int, bool]] = {}
    for index in range(len(dataset)):
        for flipped in images.sides:
            shapes.setdefault(images.latent_key(index, flipped=flipped), (index, flipped))

    def bucket(key: str) -> Any:
        return dataset.assignment.placements[shapes[key][0]].bucket

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        loaded = [dataset.tensors(shapes[key][0], flipped=shapes[key][1]) for key in keys]
        return _rows_by_key(
            keys, _encoded(stack_named(loaded), encode, encode_references or encode)
        )

    options = {"batch_size": 4, "shard_size": 256, **options}
    _compute_missing(shapes, compute, cache=cache, bucket=bucket, **options)


def _encoded(
    loaded: Mapping[str, torch.Tensor], encode: EncodeImages, encode_references: EncodeImages
) -> dict[str, torch.Tensor]:
    """Return what the cache stores: latents of images and references, and shrunk masks."""
    found = dict(encode(loaded["images"]))
    if REFERENCE_IMAGES in loaded:
        references = loaded[REFERENCE_IMAGES]
        several = references.ndim == 5
        edited = encode_references(references.flatten(0, 1) if several else references)
        samples = references.shape[: 2 if several else 1]
        for name, tensor in edited.items():
            found[f"reference_{name}"] = tensor.reshape(*samples, *tensor.shape[1:])
    if LOSS_MASKS in loaded:
        sides = next(iter(found.values())).shape[-2:]
        found[LOSS_MASKS] = shrunk(loaded[LOSS_MASKS], sides)
    return found


def cache_texts(
    captions: Iterable[str],
    *,
    cache: TensorCache,
    encode: EncodeTexts,
    **options: Unpack[CacheOptions],
) -> None:
    """Encode all captions that are not cached yet. Collective.

    The empty caption is always encoded; duplicate captions are encoded only once.

    Args:
        captions: All captions.
        cache: Cache to fill.
        encode: Function that encodes a list of captions as named tensors, batch first.
        **options: Fields of ``CacheOptions``; by default 16 captions per call and 1,024 per file.
    """
    texts = {text_key(text): text for text in (*captions, "")}

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        return _rows_by_key(keys, encode([texts[key] for key in keys]))

    options = {"batch_size": 16, "shard_size": 1024, **options}
    _compute_missing(texts, compute, cache=cache, **options)


def cache_edits(
    dataset: PreparedImages,
    *,
    cache: TensorCache,
    encode: EncodeEdits,
    read: ReadImages | None = None,
    **options: Unpack[CacheOptions],
) -> None:
    """Encode each caption together with the image to edit. Collective.

    Use this function instead of ``cache_texts`` if the text encoder reads the caption and the image
    together. Every caption is encoded with its image, and again with the mirrored image if the
    augmentation flips images. If captions are dropped, the empty caption is encoded as well.

    Args:
        dataset: Images with captions and references.
        cache: Cache to fill, of the kind ``EDITS``.
        encode: Function that encodes captions and images as named tensors, batch first.
        read: Function that takes a batch and returns the images for the encoder; by default the
            reference images.
        **options: Fields of ``CacheOptions``; by default 4 texts per call and 64 per file.

    Raises:
        DataError: The dataset has no references, an image is broken, or the encoder returns the
            wrong number of tensors or non-finite values.
        InvalidValueError: Tags are shuffled anew at each use, so captions cannot be enumerated.
    """
    if read is None:
        check_edits(dataset)
        read = itemgetter(REFERENCE_IMAGES)
    images = CachedImages(dataset, latents=cache, texts=cache)
    found = {
        images.words_key(text, index, flipped=flipped): (text, index, flipped)
        for index in range(len(dataset))
        for text in dataset.texts_of(index)
        for flipped in images.sides
    }

    def compute(keys: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        wanted = [found[key] for key in keys]
        loaded = [dataset.tensors(index, flipped=flipped) for _, index, flipped in wanted]
        edited = cast("torch.Tensor", read(stack_named(loaded)))
        return _rows_by_key(keys, encode([text for text, _, _ in wanted], edited))

    def bucket(key: str) -> Any:
        return dataset.assignment.placements[found[key][1]].bucket

    options = {"batch_size": 4, "shard_size": 64, **options}
    _compute_missing(found, compute, cache=cache, bucket=bucket, **options)


def check_edits(dataset: PreparedImages) -> None:
    """Check that images have references and that captions can be enumerated."""
    dataset.augmentation.check_countable()
    if REFERENCE not in dataset.companions:
        raise DataError(
            "the text encoder reads the image to edit, but no image has a reference",
            "add a reference for each image, such as cat.reference.png for cat.png (docs/data.md)",
            "dataset.companions",
            sorted(dataset.companions),
        )


def text_key(caption: str) -> str:
    """Return the cache key of a caption."""
    return hash_key("text", caption)


class CachedImages:
    """A bucketed dataset of cached latents and, with ``texts``, of cached text embeddings.

    A sample contains the cached tensors, and the same sizes and crops as a sample of
    ``PreparedImages``. Without ``texts``, it also contains ``captions``. Order, flips and dropped
    captions are the same as with ``PreparedImages``, so a run may switch from pixels to latents.
    Samples are read without decoding any image.

    Args:
        dataset: Dataset from which the caches were filled.
        latents: Filled cache of latents.
        texts: Filled cache of text embeddings.

    Raises:
        DataError: An image or caption is not cached; raised when a sample is read.
        InvalidValueError: ``texts`` is given although tags are shuffled anew at each use.
    """

    def __init__(
        self, dataset: PreparedImages, *, latents: TensorCache, texts: TensorCache | None = None
    ) -> None:
        if texts is not None:
            dataset.augmentation.check_countable()
        self._dataset, self._latents, self._texts = dataset, latents, texts
        _ = dataset.contents  # Computed once here, and not in each worker.
        flip = dataset.augmentation.flip
        self.sides = tuple(side for side, share in ((False, 1 - flip), (True, flip)) if share > 0)

    @property
    def assignment(self) -> BucketAssignment:
        """Bucket of each image."""
        return self._dataset.assignment

    @property
    def companions(self) -> frozenset[str]:
        """Kinds of files that accompany the images, such as masks and references."""
        return self._dataset.companions

    @property
    def identity(self) -> str:
        """Digest of the images, the same as with ``PreparedImages``."""
        return self._dataset.identity

    @property
    def settings(self) -> str:
        """String that identifies the encoders' settings."""
        return cache_names(cache for cache in (self._latents, self._texts) if cache is not None)

    def __len__(self) -> int:
        return len(self._dataset)

    def latent_key(self, index: int, *, flipped: bool) -> str:
        """Return the cache key of an image: a hash of its stored bytes and preparation.

        Args:
            index: Index of the image.
            flipped: Whether the image is mirrored.
        """
        # Companions are part of the key: if other images have masks, an image without one gets a
        # mask of ones.
        return hash_key(
            self._dataset.contents[index],
            self._dataset.assignment.placements[index],
            self._dataset.preparation,
            flipped,
            *sorted(self._dataset.companions),
        )

    def words_key(self, caption: str, index: int, *, flipped: bool) -> str:
        """Return the cache key of a caption, or of a caption and image that are encoded together.

        Args:
            caption: Caption; the empty string if the caption is dropped.
            index: Index of the image.
            flipped: Whether the image is mirrored.
        """
        if self._texts is None or self._texts.settings.kind != EDITS:
            return text_key(caption)
        return hash_key("edit", caption, self.latent_key(index, flipped=flipped))

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        if not 0 <= use.index < len(self):
            raise IndexError(use.index)
        flipped = self._dataset.augmentation.flips(use)
        sample: dict[str, Any] = self._latents.read(self.latent_key(use.index, flipped=flipped))
        caption = self._dataset.caption(use)
        if self._texts is None:
            sample["captions"] = caption
        else:
            sample |= self._texts.read(self.words_key(caption, use.index, flipped=flipped))
        placement = self._dataset.assignment.placements[use.index]
        return sample | micro_conditioning(placement, flipped=flipped)


def _compute_missing(
    keys: Iterable[str],
    compute: Callable[[list[str]], dict[str, dict[str, torch.Tensor]]],
    *,
    cache: TensorCache,
    batch_size: int = 1,
    shard_size: int = 1,
    bucket: Callable[[str], Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
    release: Callable[[], None] | None = None,
    barrier: Callable[[], None] | None = None,
) -> None:
    """Compute this rank's share of the missing entries, in batches from one bucket."""
    if barrier is None and world_size > 1:
        raise InvalidValueError(
            "is required, so that no rank reads the cache before all ranks have written it",
            "pass torch.distributed.barrier",
            "barrier",
            None,
        )
    check_rank(rank, world_size)
    cache.refresh()
    # Divided by key, not by missing entries: a rank that looks later finds fewer missing, so
    # dividing these would leave gaps.
    mine = [key for key in keys if int(key, 16) % world_size == rank and key not in cache]
    place = bucket or (lambda _key: 0)
    batches = [
        batch
        for _, alike in groupby(sorted(mine, key=lambda key: (place(key), key)), key=place)
        for batch in _chunked_keys(alike, batch_size)
    ]
    report = progress or (lambda _done, _total: None)
    done = 0
    report(done, len(mine))
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for batch in batches:
        with torch.no_grad():
            waiting |= compute(batch)
        done += len(batch)
        if len(waiting) >= shard_size or done == len(mine):
            cache.write(waiting)
            waiting = {}
        report(done, len(mine))
    if release is not None:
        release()
    if barrier is not None:
        barrier()
        cache.refresh()


def _chunked_keys(keys: Iterable[str], size: int) -> Iterator[list[str]]:
    whole(size, key="batch_size", fix="write 1")
    waiting = iter(keys)
    while chunk := list(islice(waiting, size)):
        yield chunk


def _rows_by_key(
    keys: list[str], encoded: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    for name, tensor in encoded.items():
        if len(tensor) != len(keys):
            raise DataError(
                f"the encoder received {len(keys)} inputs and returned {len(tensor)} rows",
                "return tensors whose first dimension is the batch",
                name,
            )
    # Cloned: a view would keep the whole batch alive until its file is written.
    return {
        key: {name: tensor.detach().cpu().clone() for name, tensor in row_of(encoded, row).items()}
        for row, key in enumerate(keys)
    }
