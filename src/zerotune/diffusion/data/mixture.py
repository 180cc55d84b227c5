"""Several datasets in one run, each as often as it should come."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch

from zerotune._util.text import did_you_mean
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import BucketAssignment
from zerotune.diffusion.data.order import Draw, Share
from zerotune.diffusion.data.preparation import LOSS_MASKS
from zerotune.diffusion.data.sources import MASK, companions_of
from zerotune.diffusion.data.streams import BatchStream, BucketedDataset, shares_of
from zerotune.errors import DataError, InvalidValueError

_FINEST_SHARE: Final = 10**6
"""Most parts that a share is counted in."""


class Mixture:
    """Several bucketed datasets as one, each with its own sizes, captions and masks.

    ::

        data = Mixture({"zoe": zoe, "people": people}, repeats={"zoe": 10})

    An epoch holds each image of a set as often as ``repeats`` says. Where that is not a whole
    number, some images come once more than others in one epoch and once less in the next; after e
    epochs each was used between ``floor(e * repeats)`` and ``ceil(e * repeats)`` times. A set that
    is through begins again in another order. Samples of several sets share a micro batch where
    their buckets are of one size. ``encode_dataset`` takes a mixture and gives one.

    Args:
        sets: Datasets by name: ``PreparedImages``, ``PreparedClips``, or ``CachedImages`` of one
            family.
        repeats: Uses of each image of a set in an epoch, above 0; 1 for sets that are not named.
        probabilities: In place of ``repeats``, the part that each set has in all samples; their
            sum is 1. An epoch then is as many samples as all sets hold together.

    Attributes:
        sets: The datasets by name.
        shares: Numbers and repeats of each set.
        companions: What lies beside the images of any set. An image of a set without masks counts
            everywhere.
        decisions: What is mixed, and what was chosen for each set.

    Raises:
        DataError: Something cannot be mixed: no sets, one without buckets, images with and without
            references, pixels and caches, images and clips.
        InvalidValueError: A number of repeats, or a probability, that cannot be.
    """

    def __init__(
        self,
        sets: Mapping[str, BucketedDataset],
        *,
        repeats: Mapping[str, float | Fraction] | None = None,
        probabilities: Mapping[str, float | Fraction] | None = None,
    ) -> None:
        _check_sets(sets)
        self.sets: Mapping[str, Any] = MappingProxyType(dict(sets))
        self.companions = frozenset[str]().union(*map(companions_of, self.sets.values()))
        each = _repeats(self.sets, repeats, probabilities)
        ends = [0, *itertools.accumulate(len(dataset) for dataset in self.sets.values())]
        self.shares: tuple[Share, ...] = tuple(
            Share(name=name, images=range(start, end), repeats=each[name])
            for name, (start, end) in zip(self.sets, itertools.pairwise(ends), strict=True)
        )
        self._check_alike()
        self._own = (self._mixed(),)
        announce(self._own)

    @cached_property
    def assignment(self) -> BucketAssignment:
        """The bucket of each image of all sets."""
        found = [dataset.assignment.placements for dataset in self.sets.values()]
        return BucketAssignment(placements=tuple(itertools.chain.from_iterable(found)))

    @cached_property
    def identity(self) -> str:
        """Changes when one of the sets does."""
        known = [dataset.identity for dataset in self.sets.values()]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What is mixed, and what was chosen for each set."""
        theirs = (getattr(dataset, "decisions", ()) for dataset in self.sets.values())
        return (*self._own, *itertools.chain.from_iterable(theirs))

    def over(self, sets: Mapping[str, BucketedDataset]) -> Mixture:
        """The same mixture of the same images in another form, such as encoded.

        Args:
            sets: A dataset for each name of ``sets``.
        """
        return Mixture(sets, repeats={share.name: share.repeats for share in self.shares})

    def __len__(self) -> int:
        return self.shares[-1].images.stop

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        for share in self.shares:
            if use.index in share.images:
                inner = attrs.evolve(use, index=use.index - share.images.start)
                return self._with_mask(share.name, dict(self.sets[share.name][inner]))
        raise IndexError(use.index)

    def _with_mask(self, name: str, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with a mask, if others have one: micro batches hold samples of all sets."""
        if MASK not in self.companions or LOSS_MASKS in sample:
            return sample
        over = sample.get("latents", sample.get("images"))
        if over is None:
            raise DataError(
                "its samples have no masks, those of others have, and neither latents nor images "
                "tell how large one is",
                key=f"sets[{name!r}]",
                value=sorted(sample),
                fix=f"let its samples hold {LOSS_MASKS!r}, ones of (1, h, w)",
            )
        return {**sample, LOSS_MASKS: torch.ones(1, *over.shape[-2:])}

    def _check_alike(self) -> None:
        """Refuse sets whose samples cannot share a micro batch."""
        sets = self.sets.items()
        clips = {
            name: hasattr(dataset.assignment.placements[0].bucket, "frames")
            for name, dataset in sets
        }
        _check_equal(
            clips,
            "some are images and others are clips",
            fix="put the images into a ClipFolder, with a length of 1: ClipBuckets(frames=(1, 17))",
        )
        _check_equal(
            {share.name: sorted(self[share.images.start]) for share in self.shares},
            "samples of some hold what those of others lack",
            fix="give pixels of all, or let encode_dataset encode the whole mixture; references "
            "lie beside the images of all sets or of none",
        )
        _check_equal(
            {name: getattr(dataset, "settings", None) for name, dataset in sets},
            "some were encoded by other models or settings than others",
            fix="let encode_dataset encode the whole mixture",
        )

    def _mixed(self) -> Decision:
        """How often each set comes."""
        uses = {share.name: len(share.images) * share.repeats for share in self.shares}
        total = sum(uses.values())
        parts = [
            f"{share.name} {float(uses[share.name] / total):.1%} "
            f"({len(share.images)} images, each {float(share.repeats):g} times in an epoch)"
            for share in self.shares
        ]
        return Decision(
            key="data.mixture",
            before=f"{len(self)} images in {len(self.shares)} sets",
            after=", ".join(parts),
            reason="a set that is through begins again in another order",
        )


def _check_sets(sets: Any) -> None:
    if not isinstance(sets, Mapping) or not sets:
        raise DataError(
            "are datasets by name, at least one",
            key="sets",
            value=type(sets).__name__,
            fix='write Mixture({"zoe": zoe, "people": people})',
        )
    for name, dataset in sets.items():
        why = fix = ""
        if isinstance(dataset, BatchStream):
            why = "can only be read from its beginning, so the share of its images is unknown"
            fix = "give images that lie on a disk: TarShards, HuggingFaceImages or ImageFolder"
        elif not isinstance(dataset, BucketedDataset):
            why = "has no buckets"
            fix = "write PreparedImages(…, buckets=AspectBuckets(…)) of it"
        elif shares_of(dataset):
            why, fix = "is a mixture itself", "put all sets into one mixture"
        elif not dataset.assignment.placements:
            why, fix = "is empty", "give at least one image"
        if why:
            key, value = f"sets[{name!r}]", type(dataset).__name__
            raise DataError(why, key=key, value=value, fix=fix)


def _repeats(
    sets: Mapping[str, Any],
    repeats: Mapping[str, float | Fraction] | None,
    probabilities: Mapping[str, float | Fraction] | None,
) -> dict[str, Fraction]:
    """Uses of each image of each set in an epoch."""
    if probabilities is None:
        known = _fractions(repeats or {}, sets, key="repeats")
        return {name: known.get(name, Fraction(1)) for name in sets}
    if repeats is not None:
        raise InvalidValueError(
            "says how often each set comes, and probabilities say it too",
            key="repeats",
            value=dict(repeats),
            fix="give one of them",
        )
    parts = _fractions(probabilities, sets, key="probabilities")
    missing = sorted(set(sets) - set(parts))
    if missing or abs(float(sum(parts.values())) - 1) > len(parts) / _FINEST_SHARE:
        raise InvalidValueError(
            f"lack {', '.join(missing)}" if missing else "have another sum than 1",
            key="probabilities",
            value=dict(probabilities),
            fix="give one for each set, such as 0.8 and 0.2",
        )
    everything = sum(map(len, sets.values()))
    return {name: part * everything / len(sets[name]) for name, part in parts.items()}


def _fractions(
    given: Mapping[str, Any], sets: Mapping[str, Any], *, key: str
) -> dict[str, Fraction]:
    found = {}
    for name, value in given.items():
        if name not in sets:
            close = did_you_mean(name, sets) or list(sets)
            raise InvalidValueError(
                "there is no such set",
                key=f"{key}[{name!r}]",
                value=value,
                fix=f"did you mean {' or '.join(close)}?",
            )
        if not (isinstance(value, int | float | Fraction) and 0 < value < math.inf):
            raise InvalidValueError(
                "is not above 0", key=f"{key}[{name!r}]", value=value, fix="leave the set out"
            )
        found[name] = Fraction(value).limit_denominator(_FINEST_SHARE)
        if not found[name]:
            raise InvalidValueError(
                f"is less than one in {_FINEST_SHARE:,}",
                key=f"{key}[{name!r}]",
                value=value,
                fix="leave the set out",
            )
    return found


def _check_equal(found: Mapping[str, Any], why: str, *, fix: str) -> None:
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise DataError(why, key="sets", value=dict(found), fix=fix)
