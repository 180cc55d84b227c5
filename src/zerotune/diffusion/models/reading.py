"""Families whose text encoder encodes each text together with an image.

Each embedding, including cached ones, belongs to one text-image pair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerotune.diffusion.data.batches import row_of, stack_named
from zerotune.diffusion.data.cache import hash_key
from zerotune.diffusion.data.caching import EDITS, check_edits
from zerotune.diffusion.models.family import Drawing
from zerotune.diffusion.models.pipeline import FrozenParts
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.errors import DataError


class ReadingFamily(PipelineFamily):
    """Mixin for families whose text encoder encodes texts together with images.

    By default, the images are a batch's references; a family that uses other images overrides
    ``read_images`` and ``check_dataset``.
    """

    reads_references: ClassVar[bool] = True

    @abstractmethod
    def read(
        self, parts: FrozenParts, caption: str, pictures: list[Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode one caption together with its images.

        Args:
            parts: VAE and text encoders.
            caption: Caption to encode.
            pictures: PIL images of the caption's sample.
            device: Device of the encoders.

        Returns:
            The tensors named in ``text_tensors``, (1, …).
        """

    @abstractmethod
    def pictures_of(self, parts: FrozenParts, images: Tensor) -> list[list[Any]]:
        """Return the PIL images of each sample, resized for the text encoder.

        Args:
            parts: VAE and text encoders.
            images: Images (b, 3, height, width) in [-1, 1], or (b, r, 3, height, width).
        """

    def embed_edits(
        self,
        parts: FrozenParts,
        captions: Sequence[str],
        references: Tensor,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Encode each caption together with its images."""
        pairs = zip(captions, self.pictures_of(parts, references), strict=True)
        encoded = (self.read(parts, caption, pictures, device) for caption, pictures in pairs)
        return stack_named([row_of(one, 0) for one in encoded])

    def check_dataset(self, dataset: Any) -> None:
        """Raise an error if a dataset cannot be encoded in advance or lacks references."""
        super().check_dataset(dataset)
        check_edits(dataset)

    def texts_of(self, batch: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return embeddings of ``captions``, each encoded with its images in ``batch``."""
        return self.encode_texts(
            captions, device=self.clean_device(batch), references=self.read_images(batch)
        )

    def empty_texts_of(
        self, batch: Mapping[str, Any], *, device: torch.device
    ) -> dict[str, Tensor]:
        """Return embeddings of the empty text, encoded with each sample's image.

        Raises:
            DataError: The batch comes from a cache, which contains no images.
        """
        images = self.read_images(batch)
        if images is None:
            raise DataError(
                "the empty text must be encoded with each image, but caches contain no images",
                "drop captions in the dataset with Augmentation(caption_dropout=...)",
                "dropout",
                self.dropout,
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
        """Return embeddings of texts and their reference images; each pair is encoded once."""
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
