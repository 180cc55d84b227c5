"""Samples of images, and batches of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from zerotune.decisions import Decision, announce
from zerotune.errors import DataError

_LOOKED_AT: Final = 64

_MOST_UNSIGNED: Final = 2.0
"""Maximum value of images without negative values. Standardised images and latents exceed it, but
have negative values."""

_MOST_STANDARDISED: Final = 100.0

Batch = Mapping[str, torch.Tensor]
"""Tensors by name, batch first: ``"images"`` (b, c, h, w), ``"labels"`` (b,), …"""


class ImageTensors(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """An in-memory dataset of images and optional labels.

    Args:
        images: Images (n, c, h, w) in [-1, 1].
        labels: Integer labels (n,).

    Attributes:
        decisions: A warning if the images appear to be in [0, 1].

    Raises:
        DataError: ``images`` is empty, has a different length than ``labels``, or contains values
            clearly outside [-1, 1], such as integers up to 255.
    """

    def __init__(self, *, images: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        if len(images) == 0 or (labels is not None and len(labels) != len(images)):
            raise DataError(
                "images and labels must have the same length, at least 1",
                f"pass at least one image, and one label per image ({len(images)})",
                "labels",
                None if labels is None else len(labels),
            )
        self.decisions = _check_range(images)
        announce(self.decisions)
        self._tensors = {"images": images} | ({} if labels is None else {"labels": labels})

    def __len__(self) -> int:
        return len(self._tensors["images"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self._tensors.items()}


_IMAGE_DIMS: Final = 4

_MOST_CHANNELS: Final = 4
"""Maximum number of channels of an image."""


def check_float(images: torch.Tensor, *, key: str) -> None:
    """Check that images are floating-point tensors (b, c, h, w), not integers from 0 to 255."""
    if not isinstance(images, torch.Tensor):
        raise DataError(
            "images must be a tensor",
            "convert an array with torch.from_numpy(images)",
            key,
            type(images).__name__,
        )
    if images.ndim == _IMAGE_DIMS and images.shape[-1] <= _MOST_CHANNELS < min(images.shape[1:3]):
        raise DataError(
            "images must have their channels before height and width: (b, c, h, w)",
            "write images.permute(0, 3, 1, 2)",
            key,
            tuple(images.shape),
        )
    if not images.is_floating_point():
        raise DataError(
            "images must be floating-point numbers in [-1, 1]",
            "convert integers from 0 to 255 with images.float() / 127.5 - 1",
            key,
            str(images.dtype).removeprefix("torch."),
        )


def _check_range(images: torch.Tensor) -> tuple[Decision, ...]:
    """Reject images that cannot be in [-1, 1], or warn; only the first images are checked."""
    check_float(images, key="images")
    least, most = (float(value) for value in images[:_LOOKED_AT].aminmax())
    if (least >= 0 and most > _MOST_UNSIGNED) or max(-least, most) > _MOST_STANDARDISED:
        raise DataError(
            f"images must be in [-1, 1], but the values range from {least:g} to {most:g}",
            "convert them with images / "
            + (f"{most / 2:g} - 1" if least >= 0 else f"{max(-least, most):g}"),
            "images",
            tuple(images.shape),
        )
    if least < 0 or not 0 < most <= 1:
        return ()
    return (
        Decision(
            "data.images",
            "in [-1, 1]",
            f"values from {least:g} to {most:g}, unchanged",
            "no value is negative, so the images appear to be in [0, 1]; convert them with "
            "images * 2 - 1",
            "warning",
        ),
    )


class Captions(tuple[str, ...]):
    """Tuple of captions with a no-op ``.to()``, because loops move all batch values to a device."""

    def to(self, *_: Any, **__: Any) -> Captions:
        """Return the captions unchanged, because text has no device."""
        return self


_MASK: Final = "_mask"
"""Suffix of mask keys: ``prompt_embeds_mask`` marks the text positions of ``prompt_embeds``."""


def stack_samples(samples: list[Any]) -> Batch:
    """Collate samples: stack tensors (``stack_named``) and put strings into ``Captions``.

    Numbers, arrays, and samples that are not mappings are collated by torch's ``default_collate``.

    Args:
        samples: Samples of one batch, all with the same keys.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        return torch.utils.data.default_collate(samples)  # type: ignore[no-any-return]
    names = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    batch: dict[str, Any] = stack_named([{n: each[n] for n in names} for each in samples])
    for name in first.keys() - batch.keys():
        values = [each[name] for each in samples]
        spoken = isinstance(first[name], str)
        batch[name] = Captions(values) if spoken else torch.utils.data.default_collate(values)
    return {name: batch[name] for name in first}


def stack_named(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the tensors of several samples by name.

    Tensors with the same name must have equal shapes; only tensors that come with a mask may differ
    in length. Shorter tensors and their masks are padded with zeros; ``row_of`` removes the
    padding.
    """
    batch = {}
    for name in rows[0] if rows else ():
        tensors = [row[name] for row in rows]
        if any(each != name and _masked(each) == _masked(name) for each in rows[0]):
            longest = max(map(len, tensors))
            # Zeros of length 0 for the longest tensors.
            tensors = [
                torch.cat([one, one.new_zeros(longest - len(one), *one.shape[1:])])
                for one in tensors
            ]
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise DataError(
                "samples of one batch have tensors of different shapes",
                "give the tensors equal shapes; for text embeddings that differ in length "
                "and have no mask, set train_micro_batch_size_per_gpu to 1",
                name,
                shapes,
            )
        batch[name] = torch.stack(tensors)
    return batch


def row_of(batch: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one sample of a batch, with padding removed."""
    row = {name: tensor[index] for name, tensor in batch.items()}
    for name in list(row):
        if name + _MASK in row:
            marked = row[name + _MASK].nonzero()
            length = int(marked.max()) + 1 if len(marked) else 1
            row |= {each: row[each][:length] for each in (name, name + _MASK)}
    return row


def _masked(name: str) -> str:
    """Return the name of the text tensor that a mask belongs to; other names are unchanged.

    Pipelines name the mask of ``prompt_embeds`` either ``prompt_embeds_mask`` or
    ``prompt_attention_mask``.
    """
    return name.replace(_MASK, "").replace("_attention", "_embeds")
