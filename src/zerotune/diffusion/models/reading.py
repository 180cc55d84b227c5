"""Families whose text encoder reads an image together with each text.

An embedding then belongs to both, in caches too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerotune.diffusion.data.cache import EDITS, check_edits, hash_key
from zerotune.diffusion.data.streams import row_of, stack_named
from zerotune.diffusion.models.family import Drawing
from zerotune.diffusion.models.pipeline import FrozenParts
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.errors import DataError


class ReadingFamily(PipelineFamily):
    """A family whose text encoder reads images. Mix it into the family of its model.

    The images are the references of a batch; a family that reads others overrides ``read_images``
    and ``check_dataset``.
    """

    reads_references: ClassVar[bool] = True

    @abstractmethod
    def read(
        self, parts: FrozenParts, caption: str, pictures: list[Any], device: torch.device
    ) -> dict[str, Tensor]:
        """What ``encode_prompt`` makes of one caption and its PIL images, (1, …)."""

    @abstractmethod
    def pictures_of(self, parts: FrozenParts, images: Tensor) -> list[list[Any]]:
        """The PIL images of each sample, in the size that the encoder is given."""

    def embed_edits(
        self,
        parts: FrozenParts,
        captions: Sequence[str],
        references: Tensor,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """What ``encode_prompt`` makes of each caption and its images."""
        pairs = zip(captions, self.pictures_of(parts, references), strict=True)
        encoded = (self.read(parts, caption, pictures, device) for caption, pictures in pairs)
        return stack_named([row_of(one, 0) for one in encoded])

    def check_dataset(self, dataset: Any) -> None:
        """Refuse images without references, too."""
        super().check_dataset(dataset)
        check_edits(dataset)

    def texts_of(self, batch: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """With the images of the batch that are read."""
        return self.encode_texts(
            captions, device=self.clean_device(batch), references=self.read_images(batch)
        )

    def empty_texts_of(
        self, batch: Mapping[str, Any], *, device: torch.device
    ) -> dict[str, Tensor]:
        """The empty text with the image of each sample.

        Raises:
            DataError: The batch is one of caches.
        """
        images = self.read_images(batch)
        if images is None:
            raise DataError(
                "the empty text is read together with the image, and caches have no images",
                key="dropout",
                value=self.dropout,
                fix="drop captions in the data: Augmentation(caption_dropout=...)",
            )
        return self.encode_texts([""] * len(images), device=device, references=images)

    def drawn_texts(
        self,
        texts: Sequence[str],
        drawing: Drawing,
        *,
        device: torch.device,
        negative: bool = False,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Each with the image that it is read with."""
        parts, images = self._needed("captions"), self.drawn_references(drawing)
        known = {
            hash_key(text, image.shape, image.float().numpy().tobytes()): (text, image)
            for text, image in zip(texts, images.cpu(), strict=True)
        }

        def encode(keys: Sequence[str]) -> dict[str, Tensor]:
            words, pictures = zip(*(known[key] for key in keys), strict=True)
            return self.embed_edits(parts, words, torch.stack(pictures), device)

        encoded = parts.remember(list(known), encode, device=device, kind=EDITS)
        return {name: value.to(device) for name, value in encoded.items()}
