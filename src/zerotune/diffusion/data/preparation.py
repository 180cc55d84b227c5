"""Images of a source as tensors of their bucket's size, with SDXL's size and crop conditioning."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import attrs
import torch

from zerotune._util.text import probability, validated, whole
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import (
    AspectBuckets,
    BucketAssignment,
    Placement,
    ReferenceBucket,
    Size,
    place_in,
)
from zerotune.diffusion.data.images import AlphaOnColor, AlphaPolicy, alpha_policy, pillow
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
"""Key of a batch: what each place's squared error is multiplied by, (b, 1, h, w)."""
REFERENCE_IMAGES: Final = "reference_images"
"""Key of a batch: images (b, 3, h, w) in [-1, 1] that are edited, or (b, r, 3, h, w) where some
samples of the data have several."""

_BETWEEN_WORDS: Final = " ,;."

Resampling = Literal["lanczos", "bicubic", "bilinear", "box", "nearest"]


class Crop(Protocol):
    """Decides which part of a resized image is kept."""

    def corner(self, image: Image, excess: Size) -> Size:
        """Left and top of the part, each from 0 to the excess in that direction."""
        ...


@attrs.frozen(kw_only=True)
class CenterCrop:
    """Keep the middle."""

    def corner(self, image: Image, excess: Size) -> Size:  # noqa: ARG002
        """Half of the excess."""
        return excess[0] // 2, excess[1] // 2


@attrs.frozen(kw_only=True)
class Preparation:
    """How images become tensors. All of it is part of a latent cache's key."""

    alpha: AlphaPolicy = attrs.field(factory=AlphaOnColor, converter=alpha_policy)
    """``"white"`` lays transparent images on white, ``"drop"`` keeps the colors under it."""
    crop: Crop = attrs.field(factory=CenterCrop)
    resampling: Resampling = attrs.field(default="lanczos")
    """``"nearest"`` keeps pixel art crisp."""

    @resampling.validator
    def _known(self, _: Any, value: str) -> None:
        known = ("lanczos", "bicubic", "bilinear", "box", "nearest")
        if value not in known:
            raise InvalidValueError(
                "is not known", key="resampling", value=value, fix=f"one of {', '.join(known)}"
            )

    def apply(
        self, image: Image, placement: Placement, *, corner: Size | None = None
    ) -> tuple[Image, Size]:
        """Flatten, resize and crop.

        Args:
            image: RGB or RGBA.
            placement: How it comes into its bucket.
            corner: Left and top of the crop, where another image has decided.

        Returns:
            The RGB image in its bucket's size, and left and top of the crop in the resized one.
        """
        flat = self.alpha.flatten(image) if image.mode == "RGBA" else image
        kind = pillow("Image").Resampling[self.resampling.upper()]
        resized = flat.resize(placement.resized, kind)
        left, top = corner or self.crop.corner(resized, placement.excess)
        bucket = placement.bucket
        return resized.crop((left, top, left + bucket.width, top + bucket.height)), (left, top)


@attrs.frozen(kw_only=True)
class TagShuffle:
    """Captions that are lists of tags, in another order at each use.

    ``TagShuffle(kept=1)`` makes "zoe, smiling, red hat" into "zoe, red hat, smiling".
    """

    kept: int = attrs.field(default=0, validator=validated(whole, least=0, fix="write 0"))
    """Tags at the beginning that stay where they are."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of the other tags that are left out."""
    separator: str = attrs.field(default=",")
    """What stands between tags."""
    orders: int | None = attrs.field(default=None)
    """Different orders of each caption, which come in turn. When not given each use has its own,
    and no cache can hold the embeddings."""

    @separator.validator
    def _some(self, _: Any, value: str) -> None:
        if not value:
            raise InvalidValueError(
                "nothing stands between tags",
                key="TagShuffle.separator",
                value=value,
                fix='write ","',
            )

    @orders.validator
    def _counted(self, _: Any, value: int | None) -> None:
        if value is not None:
            whole(value, key="TagShuffle.orders", fix="write 8, or leave it out")

    def shuffled(self, caption: str, *, seed: int) -> str:
        """A caption in the order that a seed gives."""
        tags = [tag.strip() for tag in caption.split(self.separator) if tag.strip()]
        draw = random.Random(seed)  # noqa: S311 - an order, and no secret
        moved = [tag for tag in tags[self.kept :] if draw.random() >= self.dropout]
        draw.shuffle(moved)
        between = self.separator if self.separator[-1].isspace() else f"{self.separator} "
        return between.join([*tags[: self.kept], *moved])


@attrs.frozen(kw_only=True)
class Augmentation:
    """What varies from epoch to epoch, drawn from the seed, the image and the epoch alone."""

    flip: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of uses that are mirrored left to right."""
    caption_dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of uses whose caption is empty, for guidance without a classifier."""
    tags: TagShuffle | None = None
    """Captions are lists of tags, which are shuffled."""
    prefix: str = ""
    """Words in front of each caption, such as a trigger word, ``"zoe, "``; shuffling and dropping
    tags leaves them there. An image without a caption has them alone."""
    suffix: str = ""
    """The same behind each caption."""
    seed: int = 0

    def flips(self, draw: Draw) -> bool:
        """Whether this use is mirrored."""
        return self._chance("flip", draw) < self.flip

    def drops_caption(self, draw: Draw) -> bool:
        """Whether this use goes without its caption."""
        return self._chance("caption", draw) < self.caption_dropout

    def words(self, captions: Sequence[str], draw: Draw) -> str:
        """The caption of one use, empty when it is dropped.

        Of several each comes once, in an order of the image's own, before one comes again.
        """
        if self.drops_caption(draw):
            return ""
        captions = captions or ("",)
        turn, place = divmod(draw.epoch, len(captions))
        order = list(range(len(captions)))
        seed = derive_seed(self.seed, "captions", turn, draw.index)
        random.Random(seed).shuffle(order)  # noqa: S311 - an order, and no secret
        return self._arranged(captions[order[place]], draw.index, order[place], turn)

    def all_words(self, captions: Sequence[str], index: int) -> Iterator[str]:
        """Every text that ``words`` may give for an image, but the empty one of dropped captions.

        Raises:
            InvalidValueError: Tags are in another order at each use.
        """
        self.check_countable()
        turns = 1 if self.tags is None or self.tags.orders is None else self.tags.orders
        for number, caption in enumerate(captions or ("",)):
            for turn in range(turns):
                yield self._arranged(caption, index, number, turn)

    def check_countable(self) -> None:
        """Refuse texts that no cache can hold.

        Raises:
            InvalidValueError: Tags are in another order at each use.
        """
        if self.tags is not None and self.tags.orders is None:
            raise InvalidValueError(
                "tags are in another order at each use, so their embeddings cannot be cached",
                key="augmentation.tags.orders",
                value=None,
                fix="write TagShuffle(orders=8): as many orders of each caption, all cached; or "
                "cache the latents alone (cache_latents) and let texts be encoded in training",
            )

    def _arranged(self, caption: str, index: int, number: int, turn: int) -> str:
        if self.tags is not None:
            which = turn if self.tags.orders is None else turn % self.tags.orders
            seed = derive_seed(self.seed, "tags", index, number, which)
            caption = self.tags.shuffled(caption, seed=seed)
        words = f"{self.prefix}{caption}{self.suffix}"
        return words if caption else words.strip(_BETWEEN_WORDS)

    def _chance(self, purpose: str, draw: Draw) -> float:
        return derive_seed(self.seed, purpose, draw.epoch, draw.index) / 2**63


class PreparedImages:
    """A bucketed dataset of images and captions.

    A sample holds ``images`` (3, h, w) in [-1, 1], ``captions`` (text), and what SDXL calls
    micro-conditioning, each (2,), vertical before horizontal: ``original_sizes`` of the upright
    image, ``crop_corners`` in the resized one, ``target_sizes`` of the bucket. Where the source has
    them beside its images, also ``loss_masks`` and ``reference_images``; see ``tensors``.

    Args:
        source: Such as ``ImageFolder``.
        buckets: The sizes to bring images to.
        minimum: Images of buckets with fewer go to a fuller one; see ``AspectBuckets.assign``.
        preparation: Alpha, resizing, cropping.
        augmentation: Flips, and which captions.

    Attributes:
        companions: What lies beside the images: ``"mask"``, ``"reference"``.
        assignment: The bucket of each image.
        decisions: What was chosen for the source and the buckets.
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
        """What was chosen for the source and the buckets."""
        return (*getattr(self.source, "decisions", ()), *self.assignment.decisions)

    @cached_property
    def identity(self) -> str:
        """Changes when images are added, removed, renamed or resized."""
        digest = hashlib.sha256()
        for index in range(len(self.source)):
            item = self.source.item(index)
            digest.update(f"{item.name}\0{item.size}\n".encode())
        return digest.hexdigest()

    @cached_property
    def contents(self) -> tuple[str, ...]:
        """A hash of each stored image. Reads every file once."""
        return tuple(self.source.content(index) for index in range(len(self.source)))

    def __len__(self) -> int:
        return len(self.source)

    def caption(self, draw: Draw) -> str:
        """The caption of one use, empty when it is dropped."""
        return self.augmentation.words(self.source.item(draw.index).captions, draw)

    def texts(self) -> tuple[str, ...]:
        """All texts that ``caption`` may give, each once: what a cache of texts must hold.

        Raises:
            InvalidValueError: They cannot be counted, since tags are shuffled anew at each use.
        """
        self.augmentation.check_countable()
        known = (text for index in range(len(self)) for text in self._words_of(index))
        return tuple(dict.fromkeys(("", *known)))

    def texts_of(self, index: int) -> tuple[str, ...]:
        """All texts that ``caption`` may return for an image, the empty one if it can occur."""
        known = tuple(dict.fromkeys(self._words_of(index)))
        dropped = self.augmentation.caption_dropout > 0
        return ("", *(text for text in known if text)) if dropped or not known else known

    def _words_of(self, index: int) -> Iterator[str]:
        return self.augmentation.all_words(self.source.item(index).captions, index)

    def pixels(self, index: int, *, flipped: bool) -> tuple[torch.Tensor, Size]:
        """One image (3, h, w) in [-1, 1], and left and top of its crop in the image shown."""
        placement = self.assignment.placements[index]
        return to_pixels(self.source.image(index), placement, self.preparation, flipped=flipped)

    def tensors(self, index: int, *, flipped: bool) -> tuple[dict[str, torch.Tensor], Size]:
        """One image and what lies beside it, all cut alike, and left and top of the crop as shown.

        Returns:
            ``images`` as ``pixels`` gives them; where images have masks ``loss_masks`` (1, h, w) in
            [0, 1], ones for those without; where they have references ``reference_images``
            (3, h, w) in [-1, 1], or (r, 3, h, w) where some images have several.
        """
        if not self.companions:
            pixels, corner = self.pixels(index, flipped=flipped)
            return {"images": pixels}, corner
        placement, source = self.assignment.placements[index], cast("EncodedSource", self.source)
        beside = {kind: source.companion(index, kind) for kind in sorted(self.companions)}
        alike = {
            kind: image
            for kind, image in beside.items()
            if image is not None and same_shape(image.size, placement.original)
        }
        (pixels, *others), corner = all_to_pixels(
            [source.image(index), *alike.values()], placement, self.preparation, flipped=flipped
        )
        cut = dict(zip(alike, others, strict=True))
        found = {"images": pixels}
        if MASK in beside:
            mask = (cut[MASK][:1] + 1) / 2 if MASK in cut else torch.ones_like(pixels[:1])
            found[LOSS_MASKS] = mask
        edited = [
            cut[kind]
            if kind in cut
            else self._of_its_own_shape(beside[kind], placement, flipped=flipped)
            for kind in REFERENCES
            if beside.get(kind) is not None
        ]
        if edited:
            several = has_several_references(source)
            found[REFERENCE_IMAGES] = torch.stack(edited) if several else edited[0]
        return found, corner

    def _of_its_own_shape(self, image: Any, placement: Placement, *, flipped: bool) -> torch.Tensor:
        own = place_in(image.size, placement.bucket)
        return to_pixels(image, own, self.preparation, flipped=flipped)[0]

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        if not 0 <= use.index < len(self):
            raise IndexError(use.index)
        tensors, corner = self.tensors(use.index, flipped=self.augmentation.flips(use))
        return {
            **tensors,
            "captions": self.caption(use),
            **micro_conditioning(self.assignment.placements[use.index], corner),
        }


def _assign_by_references(
    items: Sequence[ImageItem], buckets: Any, minimum: int
) -> BucketAssignment:
    """Buckets of images that have equally many references, by their number."""
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
) -> tuple[torch.Tensor, Size]:
    """An image in its bucket (3, h, w) in [-1, 1], and left and top of its crop as shown."""
    (pixels,), corner = all_to_pixels([image], placement, preparation, flipped=flipped)
    return pixels, corner


def all_to_pixels(
    images: Iterable[Image], placement: Placement, preparation: Preparation, *, flipped: bool
) -> tuple[list[torch.Tensor], Size]:
    """Images that belong together, all cut where the first of them is; as ``to_pixels``."""
    tensors: list[torch.Tensor] = []
    corner: Size | None = None
    for image in images:
        part, corner = preparation.apply(image, placement, corner=corner)
        if flipped:
            part = part.transpose(pillow("Image").Transpose.FLIP_LEFT_RIGHT)
        tensors.append(to_tensor(part))
    left, top = corner or (0, 0)
    return tensors, (placement.excess[0] - left if flipped else left, top)


def shrunk(masks: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    """Masks (b, 1, h, w) over other sides: the mean of what each place covers."""
    return torch.nn.functional.interpolate(masks, size=tuple(sides), mode="area")


def micro_conditioning(placement: Placement, corner: Size) -> dict[str, torch.Tensor]:
    """SDXL's size and crop conditioning, each (2,), vertical before horizontal."""
    width, height = placement.original
    bucket = placement.bucket
    return {
        "original_sizes": torch.tensor([height, width]),
        "crop_corners": torch.tensor([corner[1], corner[0]]),
        "target_sizes": torch.tensor([bucket.height, bucket.width]),
    }


def to_tensor(image: Image) -> torch.Tensor:
    """An RGB image as (3, h, w) in [-1, 1]."""
    import numpy as np

    values = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.uint8))
    return values.permute(2, 0, 1).contiguous().float().div_(127.5).sub_(1)
