"""Pairs of a preferred and a rejected image that share a caption."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from zerotune._util.text import listing
from zerotune.decisions import Decision
from zerotune.diffusion.data.buckets import BucketAssignment, place_in
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import Augmentation, Preparation, PreparedImages
from zerotune.diffusion.data.sources import ImageSource
from zerotune.diffusion.data.streams import BucketedDataset
from zerotune.errors import DataError

REJECTED: Final = "rejected_"
"""Prefix of batch keys for the rejected image."""

_OF_THE_IMAGE: Final = ("images", "latents")


class PreferencePairs:
    """A bucketed dataset of pairs: a preferred and a rejected image that share a caption.

    A sample contains the tensors of the preferred image; the rejected image is in
    ``rejected_images`` or ``rejected_latents``. The rejected image has the same bucket and flip as
    the preferred image. Captions and masks of rejected images are ignored. ``encode_dataset``
    accepts and returns pairs::

        pairs = PreferencePairs(ImageFolder("liked"), ImageFolder("rejected"), buckets=buckets)

    Args:
        preferred: Source of preferred images and captions, such as ``ImageFolder``.
        rejected: Source of rejected images, with the same names as the preferred images; the
            extensions may differ.
        buckets: Target sizes of the images.
        minimum: Minimum number of pairs per bucket; see ``PreparedImages``.
        preparation: Settings for transparency, resizing and cropping.
        augmentation: Settings for flips and captions.

    Attributes:
        sets: The two datasets, ``"preferred"`` and ``"rejected"``.

    Raises:
        DataError: An image has no partner of the same name.
    """

    samples_each: Final = 2
    """Number of images per sample (a preferred and a rejected one)."""

    def __init__(
        self,
        preferred: ImageSource,
        rejected: ImageSource,
        *,
        buckets: Any,
        minimum: int = 1,
        preparation: Preparation | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        _check_partners(preferred, rejected)
        settings: Any = {"preparation": preparation, "augmentation": augmentation}
        first = PreparedImages(preferred, buckets=buckets, minimum=minimum, **settings)
        same: Any = first.assignment
        second = _Rejected(rejected, buckets=same, **settings)
        self.sets: Mapping[str, BucketedDataset] = MappingProxyType(
            {"preferred": first, "rejected": second}
        )

    @property
    def assignment(self) -> BucketAssignment:
        """Bucket of each pair."""
        return self.sets["preferred"].assignment

    @property
    def identity(self) -> str:
        """Digest that changes if images are added, removed, renamed or resized."""
        both = "\0".join(half.identity for half in self.sets.values())
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the sources and buckets."""
        halves = self.sets.values()
        return tuple(each for half in halves for each in getattr(half, "decisions", ()))

    def __len__(self) -> int:
        return len(self.assignment.placements)

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        other = self.sets["rejected"][use]
        beside = {f"{REJECTED}{name}": other[name] for name in _OF_THE_IMAGE if name in other}
        return {**self.sets["preferred"][use], **beside}

    def over(self, sets: Mapping[str, BucketedDataset]) -> PreferencePairs:
        """Return a copy that reads the images from other datasets, such as ``CachedImages``.

        Args:
            sets: The new datasets, with the same names as in the attribute ``sets``.
        """
        found = copy.copy(self)
        found.sets = MappingProxyType(dict(sets))
        return found


class _Rejected(PreparedImages):
    """Rejected images, placed in their partners' buckets; ``buckets`` is that assignment."""

    def _assign(self, buckets: Any, minimum: int) -> BucketAssignment:  # noqa: ARG002
        placed = enumerate(buckets.placements)
        return BucketAssignment(
            placements=tuple(
                place_in(self.source.item(index).size, partner.bucket) for index, partner in placed
            )
        )


def _check_partners(preferred: ImageSource, rejected: ImageSource) -> None:
    names = [_stems(source) for source in (preferred, rejected)]
    if names[0] == names[1]:
        return
    alone = sorted(set(names[0]) ^ set(names[1]))
    raise DataError(
        f"some images have no partner of the same name: {listing(alone)}"
        if alone
        else "several images share a name, and the two sources order them differently",
        key="rejected",
        value=f"{len(names[1])} images for {len(names[0])} preferred images",
        fix="give both images of a pair the same name, and repair images that were skipped as "
        "broken",
    )


def _stems(source: ImageSource) -> list[str]:
    found = (source.item(index).name for index in range(len(source)))
    return [str(PurePosixPath(name).with_suffix("")) for name in found]
