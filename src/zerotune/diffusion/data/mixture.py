"""A mixture of several datasets in one run, with a weight for each dataset."""

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
"""Maximum denominator of a repeat count."""


class Mixture:
    """A bucketed dataset that mixes several datasets, each with its own sizes, captions and masks.

    ::

        data = Mixture({"zoe": zoe, "people": people}, repeats={"zoe": 10})

    In each epoch, every image of a set is used ``repeats`` times; an exhausted set restarts in a
    new order. With fractional ``repeats`` r, an image is used between ``floor(e * r)`` and
    ``ceil(e * r)`` times in e epochs. Samples from different sets can share a micro batch if their
    buckets have the same size. ``encode_dataset`` accepts and returns mixtures.

    Args:
        sets: Datasets by name: ``PreparedImages``, ``PreparedClips``, or ``CachedImages`` of one
            family.
        repeats: Number of times each image is used per epoch, by set name; above 0, default 1.
        probabilities: Fraction of samples from each set, by set name; pass it instead of
            ``repeats``. The fractions add up to 1. With probabilities, the length of an epoch is
            the total number of samples in all sets.

    Attributes:
        sets: The datasets by name.
        shares: For each set, its images and its number of repeats.
        companions: Kinds of companion files (masks, references) that at least one set has. If one
            set has masks, images of the other sets get a mask of ones.
        decisions: The decision that records the sets' weights, followed by the decisions of all
            sets.

    Raises:
        DataError: There is no set, a set has no buckets, or the sets differ in kind (images or
            clips, pixels or caches, with or without references).
        InvalidValueError: A repeat count or probability is invalid.
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
        """Bucket of each image in all sets."""
        found = [dataset.assignment.placements for dataset in self.sets.values()]
        return BucketAssignment(placements=tuple(itertools.chain.from_iterable(found)))

    @cached_property
    def identity(self) -> str:
        """Digest that changes if any set changes."""
        known = [dataset.identity for dataset in self.sets.values()]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decision that records the sets' weights, followed by the decisions of all sets."""
        theirs = (getattr(dataset, "decisions", ()) for dataset in self.sets.values())
        return (*self._own, *itertools.chain.from_iterable(theirs))

    def over(self, sets: Mapping[str, BucketedDataset]) -> Mixture:
        """Return a copy that reads the images from other datasets, such as ``CachedImages``.

        Args:
            sets: The new datasets, with the same names as in the attribute ``sets``.
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
        """Add a mask of ones if other sets have masks, because micro batches mix the sets."""
        if MASK not in self.companions or LOSS_MASKS in sample:
            return sample
        over = sample.get("latents", sample.get("images"))
        if over is None:
            raise DataError(
                "this set has no masks but other sets do; the mask size is unknown, because "
                "its samples contain neither latents nor images",
                key=f"sets[{name!r}]",
                value=sorted(sample),
                fix=f"add {LOSS_MASKS!r} to the samples of this set: a tensor of ones (1, h, w)",
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
            "some sets contain images and others contain clips",
            fix="read the images as clips of one frame, with ClipBuckets(frames=(1, 17))",
        )
        _check_equal(
            {share.name: sorted(self[share.images.start]) for share in self.shares},
            "the samples of the sets have different keys",
            fix="use pixels in all sets, or encode the whole mixture with encode_dataset; use "
            "references in all sets or in none",
        )
        _check_equal(
            {name: getattr(dataset, "settings", None) for name, dataset in sets},
            "the sets were encoded with different models or settings",
            fix="encode the whole mixture with encode_dataset",
        )

    def _mixed(self) -> Decision:
        """Return a decision about how often each set is used."""
        uses = {share.name: len(share.images) * share.repeats for share in self.shares}
        total = sum(uses.values())
        parts = [
            f"{share.name} {float(uses[share.name] / total):.1%} ({len(share.images)} "
            f"images, each {float(share.repeats):g} times per epoch)"
            for share in self.shares
        ]
        return Decision(
            key="data.mixture",
            before=f"{len(self)} images in {len(self.shares)} sets",
            after=", ".join(parts),
            reason="an exhausted set restarts in a new order",
        )


def _check_sets(sets: Any) -> None:
    if not isinstance(sets, Mapping) or not sets:
        raise DataError(
            "pass at least one dataset by name",
            key="sets",
            value=type(sets).__name__,
            fix='write Mixture({"zoe": zoe, "people": people})',
        )
    for name, dataset in sets.items():
        why = fix = ""
        if isinstance(dataset, BatchStream):
            why = "is a sequential source, whose number of images is unknown"
            fix = "use images on a local disk: TarShards, HuggingFaceImages or ImageFolder"
        elif not isinstance(dataset, BucketedDataset):
            why = "has no buckets"
            fix = "pass PreparedImages(source, buckets=AspectBuckets(…))"
        elif shares_of(dataset):
            why, fix = "is a mixture itself", "put all sets into one mixture"
        elif not dataset.assignment.placements:
            why, fix = "is empty", "pass at least one image"
        if why:
            key, value = f"sets[{name!r}]", type(dataset).__name__
            raise DataError(why, key=key, value=value, fix=fix)


def _repeats(
    sets: Mapping[str, Any],
    repeats: Mapping[str, float | Fraction] | None,
    probabilities: Mapping[str, float | Fraction] | None,
) -> dict[str, Fraction]:
    """Return the number of uses per epoch of each image, by set."""
    if probabilities is None:
        known = _fractions(repeats or {}, sets, key="repeats")
        return {name: known.get(name, Fraction(1)) for name in sets}
    if repeats is not None:
        raise InvalidValueError(
            "conflicts with probabilities, which also define how often each set is used",
            key="repeats",
            value=dict(repeats),
            fix="use one of them",
        )
    parts = _fractions(probabilities, sets, key="probabilities")
    missing = sorted(set(sets) - set(parts))
    if missing or abs(float(sum(parts.values())) - 1) > len(parts) / _FINEST_SHARE:
        raise InvalidValueError(
            f"lack {', '.join(missing)}" if missing else "do not add up to 1",
            key="probabilities",
            value=dict(probabilities),
            fix="write one fraction per set, such as 0.8 and 0.2; they must add up to 1",
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
                "is not the name of a set",
                key=f"{key}[{name!r}]",
                value=value,
                fix=f"did you mean {' or '.join(close)}?",
            )
        if not (isinstance(value, int | float | Fraction) and 0 < value < math.inf):
            raise InvalidValueError(
                "must be above 0",
                key=f"{key}[{name!r}]",
                value=value,
                fix="remove the set from the mixture, or write a number above 0",
            )
        found[name] = Fraction(value).limit_denominator(_FINEST_SHARE)
        if not found[name]:
            raise InvalidValueError(
                f"is too small: the minimum is 1/{_FINEST_SHARE:,}",
                key=f"{key}[{name!r}]",
                value=value,
                fix="remove the set from the mixture, or write a larger number",
            )
    return found


def _check_equal(found: Mapping[str, Any], why: str, *, fix: str) -> None:
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise DataError(why, key="sets", value=dict(found), fix=fix)
