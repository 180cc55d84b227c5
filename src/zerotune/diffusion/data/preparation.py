"""Conversion of images to bucket-sized tensors, with SDXL's size and crop conditioning."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs
import torch

from zerotune._util.text import probability, validated, whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import (
    AspectBuckets,
    BucketAssignment,
    Placement,
    ReferenceBucket,
    place_in,
)
from zerotune.diffusion.data.images import check_choice, pillow
from zerotune.diffusion.data.order import Draw, derive_seed
from zerotune.diffusion.data.sources import (
    MASK,
    REFERENCES,
    EncodedSource,
    ImageItem,
    ImageSource,
    companions_of,
    has_several_references,
    same_shape,
)
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from PIL.Image import Image

LOSS_MASKS: Final = "loss_masks"
"""Batch key of loss masks (b, 1, h, w), which multiply the squared error at each position."""
REFERENCE_IMAGES: Final = "reference_images"
"""Batch key of reference images (b, 3, h, w) in [-1, 1], or (b, r, 3, h, w) if some samples have
several references."""

_BETWEEN_WORDS: Final = " ,;."

Resampling = Literal["lanczos", "bicubic", "bilinear", "box", "nearest"]


@attrs.frozen(kw_only=True)
class Preparation:
    """Settings for converting images to tensors; every setting is part of the latent cache key."""

    alpha: Literal["white", "black", "drop"] = attrs.field(default="white")
    """``"white"`` and ``"black"`` composite transparent images onto this colour; ``"drop"`` keeps
    their stored colours."""
    resampling: Resampling = attrs.field(default="lanczos")
    """Resize filter; ``"nearest"`` keeps pixel art sharp."""

    def __attrs_post_init__(self) -> None:
        check_choice(self.alpha, ("white", "black", "drop"), key="alpha")
        known = ("lanczos", "bicubic", "bilinear", "box", "nearest")
        check_choice(self.resampling, known, key="resampling")

    def apply(self, image: Image, placement: Placement) -> Image:
        """Remove transparency, resize, and keep the middle.

        Args:
            image: Image, RGB or RGBA.
            placement: Placement of the image in its bucket.

        Returns:
            The bucket-sized RGB image.
        """
        if image.mode == "RGBA" and self.alpha != "drop":
            background = pillow("Image").new("RGBA", image.size, self.alpha)
            image = pillow("Image").alpha_composite(background, image)
        kind = pillow("Image").Resampling[self.resampling.upper()]
        resized = as_rgb(image).resize(placement.resized, kind)
        left, top = (excess // 2 for excess in placement.excess)
        bucket = placement.bucket
        return resized.crop((left, top, left + bucket.width, top + bucket.height))


@attrs.frozen(kw_only=True)
class TagShuffle:
    """Shuffle the tags of a caption at each use.

    ``TagShuffle(kept=1)`` may turn "zoe, smiling, red hat" into "zoe, red hat, smiling".
    """

    kept: int = attrs.field(default=0, validator=validated(whole, least=0, fix="write 0"))
    """Number of leading tags that keep their position."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Probability of dropping each of the remaining tags."""
    separator: str = attrs.field(default=",")
    """Separator of tags."""
    orders: int | None = attrs.field(default=None)
    """Number of random tag orders per caption; the orders are used in turn. By default, each use
    has a new random order, so text embeddings cannot be cached."""

    @separator.validator
    def _some(self, _: Any, value: str) -> None:
        if not value:
            raise InvalidValueError(
                "the separator is empty", 'write ","', "TagShuffle.separator", value
            )

    @orders.validator
    def _counted(self, _: Any, value: int | None) -> None:
        if value is not None:
            whole(value, key="TagShuffle.orders", fix="write 8, or omit orders")

    def shuffled(self, caption: str, *, seed: int) -> str:
        """Return a caption with its tags shuffled.

        Args:
            caption: Tags with separators.
            seed: Seed for shuffling and dropout.
        """
        tags = [tag.strip() for tag in caption.split(self.separator) if tag.strip()]
        draw = random.Random(seed)  # noqa: S311 - an order, and no secret
        moved = [tag for tag in tags[self.kept :] if draw.random() >= self.dropout]
        draw.shuffle(moved)
        between = self.separator if self.separator[-1].isspace() else f"{self.separator} "
        return between.join([*tags[: self.kept], *moved])


@attrs.frozen(kw_only=True)
class Augmentation:
    """Random variations of images and captions, determined by the seed."""

    flip: float = attrs.field(default=0.0, validator=validated(probability))
    """Probability of mirroring an image horizontally."""
    caption_dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Probability of replacing the caption with the empty text, for classifier-free guidance."""
    tags: TagShuffle | None = None
    """How to shuffle the tags within a caption; ``None`` keeps their order."""
    prefix: str = ""
    """Text before each caption, such as the trigger word ``"zoe, "``. Tag shuffling and dropout
    never change this text. An image without a caption gets only the prefix and suffix."""
    suffix: str = ""
    """Text after each caption; tag shuffling and dropout never change it."""
    seed: int = 0

    def flips(self, draw: Draw) -> bool:
        """Return whether the image is mirrored.

        Args:
            draw: Index of the image and number of its previous uses.
        """
        return self._happens(self.flip, "flip", draw)

    def words(self, captions: Sequence[str], draw: Draw) -> str:
        """Return the caption for one use of an image; empty if the caption is dropped.

        If an image has several captions, they are used in random order, and none is repeated until
        all have been used.

        Args:
            captions: All captions of the image.
            draw: Index of the image and number of its previous uses.
        """
        if self._happens(self.caption_dropout, "caption", draw):
            return ""
        captions = captions or ("",)
        turn, place = divmod(draw.epoch, len(captions))
        order = list(range(len(captions)))
        if len(order) > 1:
            seed = derive_seed(self.seed, "captions", turn, draw.index)
            random.Random(seed).shuffle(order)  # noqa: S311 - an order, and no secret
        return self._arranged(captions[order[place]], draw.index, order[place], turn)

    def all_words(self, captions: Sequence[str], index: int) -> Iterator[str]:
        """Yield every non-empty text that ``words`` may return for an image.

        Args:
            captions: All captions of the image.
            index: Index of the image.

        Raises:
            InvalidValueError: Tags are shuffled anew at each use.
        """
        self.check_countable()
        turns = 1 if self.tags is None or self.tags.orders is None else self.tags.orders
        for number, caption in enumerate(captions or ("",)):
            for turn in range(turns):
                yield self._arranged(caption, index, number, turn)

    def check_countable(self) -> None:
        """Check that the captions can be enumerated for a cache.

        Raises:
            InvalidValueError: Tags are shuffled anew at each use.
        """
        if self.tags is not None and self.tags.orders is None:
            raise InvalidValueError(
                "tags are shuffled anew at each use, so their embeddings cannot be cached",
                "use TagShuffle(orders=8) to cache 8 orders of each caption, or cache only "
                "the latents (cache_latents) and encode captions during training",
                "augmentation.tags.orders",
                None,
            )

    def _arranged(self, caption: str, index: int, number: int, turn: int) -> str:
        if self.tags is not None:
            which = turn if self.tags.orders is None else turn % self.tags.orders
            seed = derive_seed(self.seed, "tags", index, number, which)
            caption = self.tags.shuffled(caption, seed=seed)
        words = f"{self.prefix}{caption}{self.suffix}"
        return words if caption else words.strip(_BETWEEN_WORDS)

    def _happens(self, chance: float, purpose: str, draw: Draw) -> bool:
        # Small images are read as fast as numbers are drawn, so none is drawn without need.
        return chance > 0 and (
            derive_seed(self.seed, purpose, draw.epoch, draw.index) / 2**63 < chance
        )


class PreparedImages:
    """A bucketed dataset of images and captions.

    A sample contains ``images`` (3, h, w) in [-1, 1] and ``captions`` (text). It also contains
    SDXL's micro-conditioning: ``original_sizes`` of the upright image, ``crop_corners`` in the
    resized image, and ``target_sizes`` of the bucket. These are tensors (2,) with the vertical
    value first. If the source has masks or references, a sample also contains ``loss_masks`` or
    ``reference_images``; see ``tensors``.

    Args:
        source: Source of images, such as ``ImageFolder``.
        buckets: Target sizes of the images.
        minimum: Minimum number of images per bucket; images from buckets below this minimum move to
            the nearest bucket with enough images.
        preparation: Settings for transparency, resizing and cropping.
        augmentation: Settings for flips and captions.

    Attributes:
        companions: Kinds of files that accompany the images: ``"mask"``, ``"reference"``.
        assignment: Bucket of each image.
        decisions: Decisions of the source and the buckets.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        buckets: AspectBuckets,
        minimum: int = 1,
        preparation: Preparation | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.source = source
        self.companions = companions_of(source)
        self.preparation = preparation or Preparation()
        self.augmentation = augmentation or Augmentation()
        self.assignment: BucketAssignment = self._assign(buckets, minimum)
        announce(self.assignment.decisions)

    def _assign(self, buckets: Any, minimum: int) -> BucketAssignment:
        items = [self.source.item(index) for index in range(len(self.source))]
        if has_several_references(self.source):
            return _assign_by_references(items, buckets, minimum)
        return buckets.assign([item.size for item in items], minimum=minimum)  # type: ignore[no-any-return]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the source and the buckets."""
        return (*getattr(self.source, "decisions", ()), *self.assignment.decisions)

    @cached_property
    def identity(self) -> str:
        """Digest that changes if images are added, removed, renamed or resized."""
        digest = hashlib.sha256()
        for index in range(len(self.source)):
            item = self.source.item(index)
            digest.update(f"{item.name}\0{item.size}\n".encode())
        return digest.hexdigest()

    @cached_property
    def contents(self) -> tuple[str, ...]:
        """A hash of each stored image; computing the hashes reads every file once."""
        return tuple(self.source.content(index) for index in range(len(self.source)))

    def __len__(self) -> int:
        return len(self.source)

    def caption(self, draw: Draw) -> str:
        """Return the caption for one use of an image; empty if the caption is dropped.

        Args:
            draw: Index of the image and number of its previous uses.
        """
        return self.augmentation.words(self.source.item(draw.index).captions, draw)

    def texts(self) -> tuple[str, ...]:
        """Return all texts that ``caption`` may return, without duplicates, for a cache.

        Raises:
            InvalidValueError: Tags are shuffled anew at each use, so captions cannot be enumerated.
        """
        self.augmentation.check_countable()
        known = (text for index in range(len(self)) for text in self._words_of(index))
        return tuple(dict.fromkeys(("", *known)))

    def texts_of(self, index: int) -> tuple[str, ...]:
        """Return all texts that ``caption`` may return for an image, including the empty text.

        Args:
            index: Index of the image.
        """
        known = tuple(dict.fromkeys(self._words_of(index)))
        dropped = self.augmentation.caption_dropout > 0
        return ("", *(text for text in known if text)) if dropped or not known else known

    def _words_of(self, index: int) -> Iterator[str]:
        return self.augmentation.all_words(self.source.item(index).captions, index)

    def pixels(self, index: int, *, flipped: bool) -> torch.Tensor:
        """Return an image (3, h, w) in [-1, 1].

        Args:
            index: Index of the image.
            flipped: Whether to mirror the image.
        """
        placement = self.assignment.placements[index]
        return to_pixels(self.source.image(index), placement, self.preparation, flipped=flipped)

    def tensors(self, index: int, *, flipped: bool) -> dict[str, torch.Tensor]:
        """Return an image with its mask and references.

        Args:
            index: Index of the image.
            flipped: Whether to mirror the images.

        Returns:
            The tensors by name. ``images`` is the image that ``pixels`` returns. If the source has
            masks, ``loss_masks`` is (1, h, w) in [0, 1], all ones for an image without a mask. If
            the source has references, ``reference_images`` is (3, h, w) in [-1, 1], or (r, 3, h, w)
            if some images have several references.
        """
        pixels = self.pixels(index, flipped=flipped)
        found = {"images": pixels}
        if not self.companions:
            return found
        placement, source = self.assignment.placements[index], cast("EncodedSource", self.source)

        def cut(image: Image) -> torch.Tensor:
            alike = same_shape(image.size, placement.original)
            own = placement if alike else place_in(image.size, placement.bucket)
            return to_pixels(image, own, self.preparation, flipped=flipped)

        beside = {
            kind: cut(image)
            for kind in sorted(self.companions)
            if (image := source.companion(index, kind)) is not None
        }
        if MASK in self.companions:
            whole = torch.ones_like(pixels[:1])
            found[LOSS_MASKS] = (beside[MASK][:1] + 1) / 2 if MASK in beside else whole
        edited = [beside[kind] for kind in REFERENCES if kind in beside]
        if edited:
            several = has_several_references(source)
            found[REFERENCE_IMAGES] = torch.stack(edited) if several else edited[0]
        return found

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        if not 0 <= use.index < len(self):
            raise IndexError(use.index)
        flipped = self.augmentation.flips(use)
        return {
            **self.tensors(use.index, flipped=flipped),
            "captions": self.caption(use),
            **micro_conditioning(self.assignment.placements[use.index], flipped=flipped),
        }


def _assign_by_references(
    items: Sequence[ImageItem], buckets: Any, minimum: int
) -> BucketAssignment:
    """Assign images to buckets separately for each number of references."""
    placements: dict[int, Placement] = {}
    decisions: list[Decision] = []
    for count in sorted({item.references for item in items}):
        members = [index for index, item in enumerate(items) if item.references == count]
        found = buckets.assign([items[index].size for index in members], minimum=minimum)
        decisions += found.decisions
        for index, placed in zip(members, found.placements, strict=True):
            size = {"width": placed.bucket.width, "height": placed.bucket.height}
            bucket = ReferenceBucket(**size, references=count)
            placements[index] = attrs.evolve(placed, bucket=bucket)
    return BucketAssignment(
        placements=tuple(placements[index] for index in range(len(items))),
        decisions=tuple(decisions),
    )


def to_pixels(
    image: Image, placement: Placement, preparation: Preparation, *, flipped: bool
) -> torch.Tensor:
    """Return an image (3, h, w) in [-1, 1], mirrored if ``flipped``."""
    part = preparation.apply(image, placement)
    if flipped:
        part = part.transpose(pillow("Image").Transpose.FLIP_LEFT_RIGHT)
    return to_tensor(part)


def shrunk(masks: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    """Resize masks (b, 1, h, w) by area averaging."""
    return torch.nn.functional.interpolate(masks, size=tuple(sides), mode="area")


def micro_conditioning(placement: Placement, *, flipped: bool) -> dict[str, torch.Tensor]:
    """Return SDXL's size and crop conditioning as tensors (2,), vertical before horizontal."""
    width, height = placement.original
    bucket = placement.bucket
    left, top = (excess // 2 for excess in placement.excess)
    left = placement.excess[0] - left if flipped else left
    rows = torch.tensor([[height, width], [top, left], [bucket.height, bucket.width]])
    return dict(zip(("original_sizes", "crop_corners", "target_sizes"), rows.unbind(), strict=True))


def as_rgb(image: Image) -> Image:
    """Return an image in RGB, itself if it is (Pillow would copy it)."""
    return image if image.mode == "RGB" else image.convert("RGB")


def to_tensor(image: Image) -> torch.Tensor:
    """Convert an RGB image to a tensor (3, h, w) in [-1, 1]."""
    import numpy as np

    values = torch.from_numpy(np.array(as_rgb(image)))
    return values.permute(2, 0, 1).contiguous().float().div_(127.5).sub_(1)
