"""The inputs that a pipeline's model trains on: latents, text embeddings and reference images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune._util.text import probability, validated
from zerotune.diffusion.data.batches import Captions, row_of, stack_named
from zerotune.diffusion.data.cache import CacheSettings
from zerotune.diffusion.data.caching import EDITS, TEXTS
from zerotune.diffusion.data.preparation import REFERENCE_IMAGES
from zerotune.diffusion.models.family import (
    Conditioning,
    Denoiser,
    images_of,
    parameters_of,
    take,
)
from zerotune.diffusion.models.pipeline import FrozenParts
from zerotune.errors import DataError, InvalidValueError

NEGATIVE: Final = "negative_"

CAPTIONS: Final = "captions"
"""Batch key of captions; they are encoded in training if text encoders are trained."""

REFERENCES: Final = "reference_latents"
"""Batch key of reference latents (b, c, h, w), or (b, r, c, h, w) with several per sample."""

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


@attrs.frozen(kw_only=True, eq=False)
class PipelineInputs:
    """Encoding of batches into latents, text embeddings and reference latents.

    A batch contains either ``latents`` (b, c, h, w) from a cache, or ``images`` (b, 3, height,
    width) in [-1, 1]. A batch also contains either the tensors named in ``text_tensors`` or
    ``captions``. Images and captions are encoded in each step.
    """

    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    """Names of the tensors that ``embed`` returns; they are also arguments of the pipeline."""
    encoded: ClassVar[tuple[str, ...]] = ()
    """Names of ``encode_prompt``'s outputs in order; by default ``text_tensors``, then the same
    names with the prefix ``negative_``."""
    reads_references: ClassVar[bool] = False
    """Whether the text encoder encodes each text together with the image to edit."""
    clips: ClassVar[bool] = False
    """Whether latents have a frame dimension: (b, c, frames, h, w)."""
    listed: ClassVar[bool] = False
    """Whether the pipeline expects a list of text embeddings, each with its own length."""
    reference: ClassVar[str | None] = None
    """Name of the pipeline's argument that receives ``reference_latents``."""
    needs_references: ClassVar[bool] = True
    """Whether every sample needs a reference image; ignored unless ``reference`` is set."""
    several_references: ClassVar[bool] = False
    """Whether a sample may have several reference images."""
    arguments: ClassVar[Mapping[str, Any]] = _NONE
    """Additional keyword arguments for the pipeline's ``__call__``."""
    parts: FrozenParts | None = None
    """VAE and text encoders. Required for sampling, but not for training from caches."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Probability of replacing a caption by the empty text in training, for classifier-free
    guidance."""
    parts_device: torch.device | None = None
    """Device on which the parts encode uncached data; by default the batch's device."""
    max_sequence_length: int | None = None
    """Number of tokens per text; by default the pipeline's value."""
    texts_alone: bool = False
    """Whether texts are encoded one by one. ``load_pretrained`` sets this attribute if the pipeline
    pads texts to the longest text of a batch, because embeddings would otherwise depend on the
    batch."""

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a batch's latents (b, c, [frames,] h, w), fp32, encoding its images if needed."""
        if "latents" in batch:
            latents = batch["latents"].float()
        else:
            images = images_of(batch)
            encoded = self.encode_images(images, device=images.device)
            latents = encoded["latents"].to(images.device)
        return latents.unsqueeze(2) if self.clips and latents.ndim == 4 else latents

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Return a batch's text embeddings and the latents of its reference images.

        With probability ``dropout``, the embedding of the empty text replaces a sample's embedding.

        Args:
            batch: Batch with captions or embeddings.
            generator: Random generator for dropout.
        """
        texts = self._texts(batch, generator)
        without = REFERENCES not in batch and REFERENCE_IMAGES not in batch
        if self.reference is None or (without and not self.needs_references):
            return texts
        return {**texts, REFERENCES: self._references(batch)}

    def _texts(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        first = self.text_tensors[0]
        if self.trains_texts:
            return {CAPTIONS: self._kept_captions(batch, generator)}  # type: ignore[dict-item]
        texts = {n: take(batch, n) for n in self.text_tensors} if first in batch else None
        if texts is None:
            captions: Sequence[str] = take(batch, "captions")  # type: ignore[assignment]
            texts = self.texts_of(batch, captions)
        if self.dropout == 0:
            return texts
        count = len(texts[first])
        dropped = torch.rand(count, generator=generator) < self.dropout
        if self.parts is None:
            raise DataError(
                "the empty text cannot be encoded without text encoders",
                "load the text encoders, or drop captions in the dataset with "
                "Augmentation(caption_dropout=...)",
                "dropout",
                self.dropout,
            )
        known = self.empty_texts_of(batch, device=texts[first].device)
        empty = {name: value.to(texts[name]) for name, value in known.items()}
        if not bool(dropped.any()):
            return texts
        empties = len(empty[first])
        rows = [
            row_of(empty, n % empties) if gone else row_of(texts, n)
            for n, gone in enumerate(dropped)
        ]
        return stack_named(rows)

    def _references(self, batch: Mapping[str, Tensor]) -> Tensor:
        if REFERENCES in batch:
            latents = batch[REFERENCES].float()
            return latents if self.clips else self.one_of_each(latents)
        images = batch.get(REFERENCE_IMAGES)
        if images is None:
            raise DataError(
                f"{type(self).__name__} needs reference images, but the batch contains "
                f"only {sorted(batch)}",
                "add reference_images (b, 3, height, width) or reference_latents to the batches",
                f"batch[{REFERENCES!r}]",
            )
        device = images.device

        def encode(each: Tensor) -> Tensor:
            return self.encode_references(each, device=device)["latents"].to(device)

        return of_each(self.one_of_each(images), encode)

    @property
    def trains_texts(self) -> bool:
        """Return whether text encoders are trained, in which case embeddings must not be cached."""
        return self.parts is not None and bool(self.parts.trained_encoders)

    def _kept_captions(self, batch: Mapping[str, Any], generator: torch.Generator) -> Captions:
        """Return a batch's captions, some replaced by the empty text; the engine encodes them."""
        if self.text_tensors[0] in batch:
            raise DataError(
                "the batch contains precomputed embeddings, but text encoders are trained",
                "pass captions; to cache latents only, call encode_dataset with this family",
                f"batch[{self.text_tensors[0]!r}]",
            )
        captions: Any = take(batch, CAPTIONS)
        if self.dropout == 0:
            return Captions(captions)
        dropped = torch.rand(len(captions), generator=generator) < self.dropout
        pairs = zip(captions, dropped.tolist(), strict=True)
        return Captions("" if gone else caption for caption, gone in pairs)

    def with_texts(self, model: Denoiser, conditioning: Conditioning) -> Conditioning:
        """Return ``conditioning`` with its captions encoded; gradients reach the text encoders.

        Args:
            model: Engine that trains the text encoders.
            conditioning: Value returned by ``self.conditioning``.
        """
        if CAPTIONS not in conditioning:
            return conditioning
        others = {name: value for name, value in conditioning.items() if name != CAPTIONS}
        parts = self._needed("captions")
        self._bring(parts, model.device, list(parts.text_encoders))
        with parts.calling(model):
            captions: Sequence[str] = conditioning[CAPTIONS]  # type: ignore[assignment]
            return {**others, **self.embed(parts, list(captions), model.device)}

    def read_images(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the images to encode together with a batch's texts; ``None`` if there are none.

        Args:
            batch: Tensors and captions by name.
        """
        return batch.get(REFERENCE_IMAGES)

    def check_dataset(self, dataset: Any) -> None:
        """Raise an error if a dataset cannot be encoded in advance.

        Args:
            dataset: ``PreparedImages`` or ``PreparedClips``.

        Raises:
            DataError: A sample has several reference images, and the family supports only one.
            InvalidValueError: Captions change at each use, so their embeddings cannot be cached.
        """
        counts = (getattr(each.bucket, "references", 1) for each in dataset.assignment.placements)
        most = max(counts, default=1)
        if self.reference is not None and most > 1 and not self.several_references:
            raise self._edits_one(most)
        if not self.trains_texts:
            dataset.augmentation.check_countable()

    def one_of_each(self, references: Tensor) -> Tensor:
        """Remove the reference dimension if the family supports only one reference per sample.

        Args:
            references: Images or latents: (b, c, h, w), (b, 1, c, h, w), or, with
                ``several_references``, (b, r, c, h, w).

        Raises:
            DataError: Samples have several references, and the family supports only one.
        """
        if references.ndim != 5 or self.several_references:
            return references
        if references.shape[1] > 1:
            raise self._edits_one(references.shape[1])
        return references[:, 0]

    def _edits_one(self, count: int) -> DataError:
        return DataError(
            f"{type(self).__name__} supports only one reference image per sample",
            "pass one reference image per sample, or train Flux2, Flux2Klein or "
            "QwenImageEditPlus, which support several",
            "references",
            count,
        )

    def texts_of(self, batch: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return embeddings of captions.

        Args:
            batch: Batch to which the captions belong.
            captions: One caption per sample.
        """
        return self.encode_texts(captions, device=self.clean_device(batch))

    def empty_texts_of(
        self,
        batch: Mapping[str, Any],  # noqa: ARG002
        *,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Return the embeddings that replace dropped captions of a batch.

        Args:
            batch: Batch to which the captions belong.
            device: Target device.

        Returns:
            One embedding (1, …) for all samples, or one per sample (b, …).
        """
        return self.unconditional(device=device)

    def clean_device(self, batch: Mapping[str, Any]) -> torch.device:
        """Return the device of a batch's tensors.

        Args:
            batch: Tensors and captions by name.
        """
        for value in batch.values():
            if isinstance(value, Tensor):
                return value.device
        return torch.device("cpu")

    def encode_texts(
        self,
        captions: Sequence[str],
        *,
        device: torch.device | None = None,
        references: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return embeddings of captions, batch first.

        Args:
            captions: One caption per sample.
            device: Device of the encoders; by default their current device.
            references: Reference images (b, 3, height, width) in [-1, 1], or several per sample (b,
                r, 3, height, width). Only families with ``reads_references`` encode texts together
                with images.

        Raises:
            DataError: The family has no frozen parts, or required references are missing.
        """
        parts = self._needed("captions")
        self._bring(parts, device, list(parts.text_encoders))
        with torch.no_grad():
            weights = (p for each in parts.text_encoders.values() for p in each.parameters())
            where = next((p.device for p in weights), device or torch.device("cpu"))
            if not self.reads_references:
                return self.embed(parts, list(captions), where)
            if references is None:
                raise self.no_references("reference_images")
            return self.embed_edits(parts, list(captions), self.one_of_each(references), where)

    def embed_edits(
        self,
        parts: FrozenParts,
        captions: Sequence[str],
        references: Tensor,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Encode captions together with their reference images.

        Args:
            parts: VAE and text encoders.
            captions: One caption per sample.
            references: Reference images, as in ``encode_texts``.
            device: Device of the encoders.
        """
        raise NotImplementedError

    def no_references(self, key: str) -> DataError:
        """Return the error for a missing reference image.

        Args:
            key: Name of the missing tensor in the batch.
        """
        return DataError(
            f"{type(self).__name__} needs a reference image for each sample",
            "add reference_images (b, 3, height, width) to the batches, or cache latents "
            "and embeddings with encode_dataset",
            key,
            None,
        )

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Encode images, and return ``{"latents": …}``.

        Args:
            images: (b, 3, height, width) in [-1, 1].
            device: Device of the VAE; by default its current device.
        """
        parts = self._needed("images")
        self._bring(parts, device, ["vae"])
        return {"latents": parts.encode_images(images)}

    def at_shown_size(self, images: Tensor) -> Tensor:
        """Resize reference images to the size that the model receives.

        Args:
            images: (b, 3, height, width) in [-1, 1].
        """
        return images

    def encode_references(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Encode reference images, and return ``{"latents": …}``.

        Args:
            images: (b, 3, height, width) in [-1, 1].
            device: Device of the VAE; by default its current device.
        """
        return self.encode_images(self.at_shown_size(images), device=device)

    def remembered(self, texts: Sequence[str], *, device: torch.device) -> dict[str, Tensor]:
        """Return embeddings of texts; each text is encoded once and then cached.

        Args:
            texts: Texts to encode.
            device: Device of the encoders and embeddings.
        """
        parts = self._needed("captions")
        encoded = parts.remember(texts, lambda t: self.embed(parts, t, device), device=device)
        return {name: value.to(device) for name, value in encoded.items()}

    def unconditional(self, *, device: torch.device) -> dict[str, Tensor]:
        """Return the embedding (1, …) of the empty negative prompt.

        Args:
            device: Device of the embedding.
        """
        return self.remembered_negative([""], device=device)

    def remembered_negative(
        self, texts: Sequence[str], *, device: torch.device
    ) -> dict[str, Tensor]:
        """Return embeddings of negative prompts; each prompt is encoded once and then cached.

        Args:
            texts: Negative prompts.
            device: Device of the encoders and embeddings.
        """
        parts = self._needed("captions")
        encoded = parts.remember(
            texts, lambda t: self.embed_negative(parts, t, device), device=device, kind=NEGATIVE
        )
        return {name: value.to(device) for name, value in encoded.items()}

    def latent_settings(self) -> CacheSettings:
        """Return the settings that affect cached latents."""
        parts = self._needed("images")
        return CacheSettings(
            kind="latents",
            model=parts.hash(["vae"]),
            dtype=str(parts.vae.dtype),
            settings=parts.latents.settings(),
        )

    def text_settings(self) -> CacheSettings:
        """Return the settings that affect cached embeddings."""
        parts = self._needed("captions")
        encoders = parts.text_encoders
        return CacheSettings(
            kind=EDITS if self.reads_references else TEXTS,
            model=parts.hash(list(encoders)),
            dtype=str(next(iter(encoders.values())).dtype),
            settings={
                "family": type(self).__name__,
                "tokenizers": parts.hash_tokenizers(),
                **self.embedding_settings(),
            },
        )

    def _needed(self, what: str) -> FrozenParts:
        if self.parts is None:
            raise DataError(
                f"{type(self).__name__} has neither a VAE nor text encoders, so {what} "
                "cannot be encoded",
                f"create the family with {type(self).__name__}(parts=...), or use "
                "load_pretrained(folder).family",
                "parts",
                None,
            )
        return self.parts

    def _bring(self, parts: FrozenParts, device: torch.device | None, names: Sequence[str]) -> None:
        # Only these parts: while the VAE encodes, T5 must not occupy 9 GiB of the device.
        wanted = self.parts_device or device
        if wanted is not None:
            parts.to(wanted, names)

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode captions with ``encode_prompt``, using the arguments that ``__call__`` passes.

        Args:
            parts: VAE and text encoders.
            captions: One caption per sample.
            device: Device of the encoders.

        Returns:
            The tensors named in ``text_tensors``, batch first.
        """
        singles = [[caption] for caption in captions] if self.texts_alone else [list(captions)]
        found = [
            self.encode_with(
                parts.pipeline, device, {"prompt": texts, "do_classifier_free_guidance": False}
            )
            for texts in singles
        ]
        return stack_named([row_of(each, 0) for each in found]) if self.texts_alone else found[0]

    def embed_negative(
        self, parts: FrozenParts, texts: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode negative prompts; some pipelines add instructions only to positive prompts.

        Args:
            parts: VAE and text encoders.
            texts: One negative prompt per sample.
            device: Device of the encoders.
        """
        if "negative_prompt" not in parameters_of(parts.pipeline.encode_prompt):
            return self.embed(parts, texts, device)
        prompts = {
            "prompt": list(texts),
            "negative_prompt": list(texts),
            "do_classifier_free_guidance": True,
        }
        return self.encode_with(parts.pipeline, device, prompts, prefix=NEGATIVE)

    def encode_with(
        self,
        pipeline: Any,
        device: torch.device,
        prompts: Mapping[str, Any],
        prefix: str = "",
    ) -> dict[str, Tensor]:
        """Encode texts with the pipeline's ``encode_prompt``.

        Args:
            pipeline: Pipeline with text encoders.
            device: Device of the encoders.
            prompts: Arguments of ``encode_prompt`` that contain the texts.
            prefix: ``"negative_"`` selects the outputs for negative prompts.

        Returns:
            The tensors named in ``text_tensors``, batch first.
        """
        encode = pipeline.encode_prompt
        known = {**self._prompt_arguments(pipeline), "device": device, **prompts}
        results = encode(**{n: v for n, v in known.items() if n in parameters_of(encode)})
        if isinstance(results, Mapping):
            named = dict(results)
        else:
            results = results if isinstance(results, tuple) else (results,)
            usual = (*self.text_tensors, *(f"{NEGATIVE}{name}" for name in self.text_tensors))
            named = dict(zip(self.encoded or usual, results, strict=False))
        if self.listed:
            return pad_with_mask(named[f"{prefix}prompt_embeds"])
        return {name: text_tensor(named, name, prefix) for name in self.text_tensors}

    def embedding_settings(self) -> dict[str, Any]:
        """Return the number of tokens per text, and whether texts are encoded one by one."""
        pipeline = self._needed("captions").pipeline
        length = self._prompt_arguments(pipeline).get("max_sequence_length")
        # The key is absent by default, so that existing caches stay valid.
        alone = {"texts_alone": True} if self.texts_alone else {}
        return {"max_sequence_length": length, **alone}

    def _prompt_arguments(self, pipeline: Any) -> dict[str, Any]:
        # Defaults of encode_prompt differ from those it is called with (Wan: 226 and 512 tokens).
        taken = parameters_of(pipeline.encode_prompt)
        known = {
            name: parameter.default
            for name, parameter in parameters_of(type(pipeline).__call__).items()
            if name in taken and parameter.default is not inspect.Parameter.empty
        }
        known |= {name: value for name, value in self.arguments.items() if name in taken}
        if self.max_sequence_length is not None:
            known["max_sequence_length"] = self.max_sequence_length
        return known


def of_each(images: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``encode`` to images (b, 3, h, w), or to several images per sample (b, r, 3, h, w)."""
    if images.ndim == 4:
        return encode(images)
    found = encode(images.flatten(0, 1))
    return found.reshape(*images.shape[:2], *found.shape[1:])


def pad_with_mask(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pad texts of unequal length, and return them with their mask."""
    ones = [torch.ones(len(text), dtype=torch.long, device=text.device) for text in texts]
    pairs = zip(texts, ones, strict=True)
    return stack_named([{"prompt_embeds": t, "prompt_embeds_mask": mask} for t, mask in pairs])


def text_tensor(named: Mapping[str, Any], name: str, prefix: str) -> Tensor:
    """Return a result of ``encode_prompt``; ones if it omits a mask because nothing is masked."""
    found = named.get(prefix + name)
    if found is None and name.endswith("mask"):
        embeds: Tensor = named[f"{prefix}prompt_embeds"]
        return torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    if not isinstance(found, Tensor):
        raise InvalidValueError(
            "the pipeline's encode_prompt did not return this tensor",
            "set encoded = (...) in the family to the names of encode_prompt's outputs, in order",
            f"text_tensors: {name}",
            type(found).__name__,
        )
    return found
