"""Pairs of images of one caption, of which one was preferred and one rejected."""

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
"""What the name of a batch's tensor begins with that is of the rejected image."""

_OF_THE_IMAGE: Final = ("images", "latents")


class PreferencePairs:
    """A bucketed dataset of pairs: a sample holds both images of one caption.

    It is the preferred image's sample with ``rejected_images``, or ``rejected_latents``, beside it.
    The rejected image comes into the bucket of the preferred one and is mirrored with it; its own
    caption and masks are not read. ``encode_dataset`` takes pairs and gives pairs::

        pairs = PreferencePairs(ImageFolder("liked"), ImageFolder("rejected"), buckets=buckets)

    Args:
        preferred: Such as ``ImageFolder``, with the captions.
        rejected: Images of the same names, whatever their endings.
        buckets: The sizes to bring images to.
        minimum: As of ``PreparedImages``.
        preparation: Alpha, resizing, cropping, of both.
        augmentation: Flips of both, and which captions.

    Attributes:
        sets: The datasets of both, ``"preferred"`` and ``"rejected"``.

    Raises:
        DataError: An image has no partner.
    """

    samples_each: Final = 2
    """Images that the model is given for each sample."""

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
        """The bucket of each pair."""
        return self.sets["preferred"].assignment

    @property
    def identity(self) -> str:
        """Changes when images are added, removed, renamed or resized."""
        both = "\0".join(half.identity for half in self.sets.values())
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen for the sources and the buckets."""
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
        """The same pairs of the same images in another form, such as encoded.

        Args:
            sets: A dataset for each name of ``sets``.
        """
        found = copy.copy(self)
        found.sets = MappingProxyType(dict(sets))
        return found


class _Rejected(PreparedImages):
    """Images in the buckets of their partners, whose assignment is given in the place of sizes."""

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
        f"images without a partner of the same name: {listing(alone)}"
        if alone
        else "several images of one name, and another order of them",
        key="rejected",
        value=f"{len(names[1])} images for {len(names[0])} preferred ones",
        fix="give both images of a pair one name, one in each folder; a file that is left out as "
        "broken leaves its partner alone",
    )


def _stems(source: ImageSource) -> list[str]:
    found = (source.item(index).name for index in range(len(source)))
    return [str(PurePosixPath(name).with_suffix("")) for name in found]
