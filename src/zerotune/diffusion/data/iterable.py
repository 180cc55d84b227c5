"""Training from sequential sources of images, such as streamed datasets and remote shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.buckets import AspectBuckets, Bucket, Placement
from zerotune.diffusion.data.images import (
    BrokenImage,
    Check,
    OnBroken,
    broken_policy,
    decode,
    image_check,
    readable_errors,
    why,
)
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import (
    Augmentation,
    Preparation,
    micro_conditioning,
    to_pixels,
)
from zerotune.diffusion.data.sources import Words, all_of
from zerotune.diffusion.data.streams import (
    Batch,
    check_micro_batch,
    check_rank,
    no_place,
    saved,
    stack_samples,
)
from zerotune.errors import DataError

_MOST_EPOCHS: Final = 10**6
"""Larger than any valid epoch, because a resume reads all samples up to the saved position."""


@attrs.frozen(kw_only=True)
class _Arrived:
    """A sample that waits for its micro batch."""

    draw: Draw
    encoded: bytes
    captions: tuple[str, ...]
    placement: Placement


class StreamedImages:
    """Endless stream of micro batches, each from one bucket, from samples that are read in order.

    Images are buffered, even across epochs, until their bucket can fill a micro batch. Every rank
    reads the whole stream but prepares only its share, so the order does not depend on the number
    of ranks. For local files, use ``TarShards`` or ``HuggingFaceImages``, where each rank reads
    only its share. A resumed run reads samples again from the beginning of an epoch, and discards
    those that it has already used.

    Args:
        samples: A restartable iterable that yields the same samples on all ranks, such as a
            ``webdataset.WebDataset`` over all shards or a streaming Hugging Face dataset. Its
            ``set_epoch`` method, if it has one, is called before each epoch.
        read: Function that takes a sample and returns its encoded image and its caption or list of
            captions.
        buckets: Target sizes of the images.
        micro_batch_size: Number of samples per micro batch on each rank.
        rank: Rank of this process.
        world_size: Number of processes that share the data.
        preparation: Settings for transparency, resizing and cropping.
        augmentation: Settings for flips and captions.
        check: ``"whole"``, the default, decodes every image on every rank. With ``"header"``, each
            rank decodes only its share, and a truncated image stops the run.
        on_broken: ``"skip"``, the default, skips unreadable images; ``"error"`` raises an error.

    Attributes:
        broken: Images skipped since the start or the last resume.

    Raises:
        InvalidValueError: ``micro_batch_size`` or ``rank`` is out of range.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        read: Callable[[Any], tuple[bytes, Words]],
        buckets: AspectBuckets,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        preparation: Preparation | None = None,
        augmentation: Augmentation | None = None,
        check: Check | None = None,
        on_broken: OnBroken | None = None,
    ) -> None:
        check_micro_batch(micro_batch_size)
        check_rank(rank, world_size)
        self._samples, self._read, self._buckets = samples, read, buckets
        self._size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._preparation = preparation or Preparation()
        self._augmentation = augmentation or Augmentation()
        self._check, self._policy = image_check(check), broken_policy(on_broken)
        self.broken: list[BrokenImage] = []
        self._waiting: dict[Bucket, list[_Arrived]] = {}
        self._epoch, self._count, self._last = 0, 0, ""
        self._arrived_in = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return self._epoch

    def __iter__(self) -> StreamedImages:
        return self

    def __next__(self) -> Batch:
        # Every rank assembles the micro batches of all ranks, so that all have the same position.
        step = [self._assemble() for _ in range(self._world_size)]
        return stack_samples([self._prepare(arrived) for arrived in step[self._rank]])

    def state_dict(self) -> dict[str, Any]:
        """Return the stream position and the positions of buffered images; equal on all ranks."""
        waiting = [arrived.draw for of in self._waiting.values() for arrived in of]
        return {
            "epoch": self._epoch,
            "count": self._count,
            "last": self._last,
            "waiting": sorted([draw.epoch, draw.index] for draw in waiting),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: read and discard the consumed samples.

        Raises:
            DataError: ``samples`` yields different or fewer samples than in the saved run, or the
                state is invalid.
        """
        waiting = {_saved_draw(each) for each in saved(state, "waiting", list)}
        epoch, count = saved(state, "epoch", int, most=_MOST_EPOCHS), saved(state, "count", int)
        last = saved(state, "last", str)
        self._waiting, self._iterator, self.broken = {}, None, []
        self._epoch = min([epoch for epoch, _ in waiting] + [epoch])
        self._count, self._last = 0, ""
        self._arrived_in = epoch
        sample, target = None, (epoch, count)
        while (self._epoch, self._count) < target:
            sample = self._take()
            if (self._epoch, self._count) > target:
                raise _other_samples(f"ends before sample {count} of epoch {epoch}")
            if (self._epoch, self._count - 1) in waiting:
                self._receive(sample)
        if last and (sample is None or self._digest(sample) != last):
            raise _other_samples("yields different samples than before")
        self._last = last

    def _assemble(self) -> list[_Arrived]:
        while True:
            for of in self._waiting.values():
                if len(of) >= self._size:
                    batch = of[: self._size]
                    del of[: self._size]
                    return batch
            sample = self._take()
            self._last = self._digest(sample)
            self._receive(sample)
            if self._epoch > self._arrived_in + 1:
                raise DataError(
                    f"yielded no readable image in epoch {self._arrived_in + 1}",
                    key="samples",
                    value=[image.name for image in self.broken[:3]],
                    fix="check the return value of the function passed as read=",
                )

    def _take(self) -> Any:
        """Return the next sample; start the next epoch if the current one is over."""
        for _ in range(2):
            if self._iterator is None:
                if hasattr(self._samples, "set_epoch"):
                    self._samples.set_epoch(self._epoch)
                self._iterator = iter(self._samples)
            for sample in self._iterator:
                self._count += 1
                return sample
            self._iterator = None
            self._epoch, self._count = self._epoch + 1, 0
        raise DataError(
            "yields no sample",
            key="samples",
            value=type(self._samples).__name__,
            fix="pass an iterable that can be restarted, such as a list instead of a generator",
        )

    def _receive(self, sample: Any) -> None:
        draw = Draw(index=self._count - 1, epoch=self._epoch)
        try:
            encoded, words = self._read(sample)
            captions = all_of(words)
            placement = self._buckets.place(self._check.size(encoded))
        except readable_errors() as error:
            self._leave_out(BrokenImage(name=f"sample {draw.index}", reason=why(error)))
            return
        arrived = _Arrived(draw=draw, encoded=encoded, captions=captions, placement=placement)
        self._arrived_in = draw.epoch
        self._waiting.setdefault(placement.bucket, []).append(arrived)

    def _leave_out(self, image: BrokenImage) -> None:
        self._policy.broken(image)
        if image in self.broken:  # Known from an earlier epoch.
            return
        self.broken.append(image)
        decision = Decision(
            key=f"data.broken.{image.name}",
            before=None,
            after="left out",
            reason=image.reason,
            severity="warning",
        )
        announce((decision,), rank=self._rank)

    def _prepare(self, arrived: _Arrived) -> dict[str, Any]:
        try:
            image = decode(arrived.encoded)
        except readable_errors() as error:
            raise DataError(
                why(error),
                key=f"sample {arrived.draw.index}",
                fix='pass check="whole", which detects broken images when they are read',
            ) from error
        pixels, corner = to_pixels(
            image,
            arrived.placement,
            self._preparation,
            flipped=self._augmentation.flips(arrived.draw),
        )
        return {
            "images": pixels,
            "captions": self._augmentation.words(arrived.captions, arrived.draw),
            **micro_conditioning(arrived.placement, corner),
        }

    def _digest(self, sample: Any) -> str:
        try:
            encoded, words = self._read(sample)
        except readable_errors():
            return "unreadable"
        return hashlib.sha256(encoded + "\0".join(all_of(words)).encode()).hexdigest()[:16]


def _saved_draw(found: Any) -> tuple[int, int]:
    """Return the saved epoch and index of a waiting sample."""
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise no_place("state.waiting", found)
    by_name = dict(zip(("epoch", "index"), found, strict=True))
    epoch = saved(by_name, "epoch", int, most=_MOST_EPOCHS, of="state.waiting")
    return epoch, saved(by_name, "index", int, of="state.waiting")


def _other_samples(reason: str) -> DataError:
    return DataError(
        reason,
        key="samples",
        fix="use the same data in the same order, or start a new stream without this state",
    )
