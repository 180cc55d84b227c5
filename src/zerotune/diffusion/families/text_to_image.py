"""What all text-to-image models have in common: a VAE, text encoders, and a diffusers pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zerotune._util.numbers import probability, validated
from zerotune.diffusion.data.cache import EDITS, TEXTS, CacheSettings
from zerotune.diffusion.data.streams import row_of, stack_named
from zerotune.diffusion.families.base import config_of, images_of, take
from zerotune.diffusion.family import Conditioning, Denoiser, Drawing
from zerotune.diffusion.noise_schedule import drawing_scheduler
from zerotune.diffusion.pipeline import FrozenParts, PipelineModel
from zerotune.errors import DataError


@attrs.frozen(kw_only=True, eq=False)
class TextToImage(ABC):
    """A family of latent text-to-image models. Subclass it to add one.

    A batch holds ``latents`` (b, c, h, w) and the tensors of ``text_tensors``, as caches give
    them, or ``images`` (b, 3, height, width) in [-1, 1] and ``captions``, which are then encoded
    as they come. Both may be mixed.

    A subclass names its pipeline, and says how texts are encoded (``embed``) and how the model is
    called (``predict``).
    """

    pipeline: ClassVar[str]
    """Class in diffusers that loads, draws and exports."""
    component: ClassVar[str]
    """Name of the trained model in the pipeline."""
    text_tensors: ClassVar[tuple[str, ...]]
    """What ``embed`` gives, as the pipeline's arguments are called."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Modules that get adapters by default, as in diffusers' training scripts."""
    leaf_modules: ClassVar[tuple[str, ...]]
    """Classes that stage 3 gathers as a whole, instead of layer by layer."""
    flow_matching: ClassVar[bool] = False
    """Whether these models learn velocities along straight lines, or noise."""
    reads_references: ClassVar[bool] = False
    """Whether texts are encoded together with the image that is edited."""

    parts: FrozenParts | None = None
    """VAE and text encoders. Not needed to train from caches; needed to draw images."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of samples trained on the empty text, for guidance without a classifier."""
    parts_device: torch.device | None = None
    """Where the parts encode what comes uncached; the batch's device when not given."""

    @abstractmethod
    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Embeddings of captions by ``text_tensors``, batch first, through the pipeline."""

    @abstractmethod
    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's output, shaped as ``noisy``."""

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The latents of a batch (b, c, h, w), fp32; images are encoded."""
        if "latents" in batch:
            return batch["latents"].float()
        images = images_of(batch)
        return self.encode_images(images, device=images.device)["latents"].to(images.device)

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Embeddings of a batch's texts, some of them replaced by those of the empty text."""
        first = self.text_tensors[0]
        texts = {n: take(batch, n) for n in self.text_tensors} if first in batch else None
        if texts is None:
            captions: Sequence[str] = take(batch, "captions")  # type: ignore[assignment]
            texts = self.texts_of(batch, captions)
        if self.dropout == 0:
            return texts
        count = len(texts[first])
        dropped = torch.rand(count, generator=generator) < self.dropout
        if self.parts is None:
            raise _no_empty_text(self.dropout)
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

    def texts_of(self, batch: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Embeddings of captions of a batch, or of other texts in their place."""
        return self.encode_texts(captions, device=self.clean_device(batch))

    def empty_texts_of(
        self,
        batch: Mapping[str, Any],  # noqa: ARG002
        *,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """What dropped texts of a batch become, (1, …), or (b, …) where samples differ in it."""
        return self.unconditional(device=device)

    def clean_device(self, batch: Mapping[str, Any]) -> torch.device:
        """Where the tensors of a batch lie."""
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
        """Embeddings of captions on ``device``, batch first.

        Args:
            captions: The texts.
            device: Where they are encoded.
            references: Images that are edited (b, 3, height, width) in [-1, 1], for families that
                read them together with their texts (``reads_references``).

        Raises:
            DataError: The family was made without its frozen parts, or it reads references and
                there are none.
        """
        parts = self._needed("captions")
        self._bring(parts, device, list(parts.text_encoders))
        with torch.no_grad():
            where = _device_of(parts.text_encoders)
            if not self.reads_references:
                return self.embed(parts, list(captions), where)
            if references is None:
                raise self.no_references("reference_images")
            return self.embed_edits(parts, list(captions), references, where)

    def embed_edits(
        self,
        parts: FrozenParts,
        captions: Sequence[str],
        references: Tensor,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """As ``embed``, of captions and the images they belong to, where they are read together."""
        raise NotImplementedError

    def no_references(self, key: str) -> DataError:
        """What a family that edits says where there is nothing to edit."""
        return DataError(
            f"{type(self).__name__} edits images, and there are none beside the captions",
            key=key,
            value=None,
            fix="let the dataset yield reference_images (b, 3, height, width), or cache latents "
            "and texts with encode_dataset",
        )

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """``{"latents": …}`` of images (b, 3, height, width) in [-1, 1], for a cache."""
        parts = self._needed("images")
        self._bring(parts, device, ["vae"])
        return {"latents": parts.encode_images(images)}

    def encode_references(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """``encode_images`` of images that are edited, in the size they are shown to the model."""
        return self.encode_images(images, device=device)

    def remembered(self, texts: Sequence[str], *, device: torch.device) -> dict[str, Tensor]:
        """Embeddings of few texts that come again and again, computed once each."""
        parts = self._needed("captions")
        encoded = parts.remember(texts, lambda t: self.embed(parts, t, device), device=device)
        return {name: value.to(device) for name, value in encoded.items()}

    def unconditional(self, *, device: torch.device) -> dict[str, Tensor]:
        """What dropped texts become: the empty text, (1, …)."""
        return self.remembered([""], device=device)

    def latent_settings(self) -> CacheSettings:
        """What cached latents depend on."""
        parts = self._needed("images")
        return CacheSettings(
            kind="latents",
            model=parts.hash(["vae"]),
            dtype=str(parts.vae.dtype),
            settings=parts.vae_settings(),
        )

    def text_settings(self) -> CacheSettings:
        """What cached embeddings depend on."""
        parts = self._needed("captions")
        encoders = parts.text_encoders
        return CacheSettings(
            kind=EDITS if self.reads_references else TEXTS,
            model=parts.hash(list(encoders)),
            dtype=str(next(iter(encoders.values())).dtype),
            settings={"family": type(self).__name__, **self.embedding_settings()},
        )

    def embedding_settings(self) -> dict[str, Any]:
        """Settings of ``embed`` beyond the encoders' weights, of JSON types."""
        return {}

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Images of prompts (n, 3, height, width), through the family's own diffusers pipeline.

        Text encoders and VAE come to the model's device for as long as they compute.

        Raises:
            DataError: The family was made without its frozen parts.
        """
        parts = self._needed("prompts")
        pipe = self._drawing_pipeline(parts, model, drawing)
        height, width = drawing.size or self.default_size(model)
        arguments = self.drawing_arguments(drawing, device=model.device)
        latents = pipe(
            **arguments,
            height=height,
            width=width,
            num_inference_steps=drawing.steps,
            generator=[torch.Generator().manual_seed(seed) for seed in drawing.seeds],
            output_type="latent",
        ).images
        with parts.on(model.device, ["vae"]):
            return parts.decode_latents(self.unpacked(pipe, latents, (height, width)))

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """What the pipeline is told of prompts and guidance."""
        known = self.remembered(drawing.prompts, device=device)
        arguments: dict[str, Any] = {"guidance_scale": drawing.guidance_scale, **_float(known)}
        if drawing.guidance_scale != 1.0:
            negative = self.remembered(
                [drawing.negative_prompt] * len(drawing.prompts), device=device
            )
            arguments |= {f"negative_{name}": v for name, v in _float(negative).items()}
        return arguments

    def unpacked(self, pipe: Any, latents: Tensor, size: tuple[int, int]) -> Tensor:  # noqa: ARG002
        """Latents as images of latents (n, c, h, w), where the pipeline gives something else."""
        return latents

    def default_size(self, model: Any) -> tuple[int, int]:
        """Height and width in pixels of the images the model was made for."""
        side = config_of(model).sample_size
        height, width = (side, side) if isinstance(side, int) else side
        scale = self._needed("prompts").scale
        return int(height) * scale, int(width) * scale

    def _drawing_pipeline(self, parts: FrozenParts, model: Denoiser, drawing: Drawing) -> Any:
        """A pipeline around the engine alone: texts are encoded before and latents decoded after.

        So it computes where the engine does, wherever the frozen parts wait.
        """
        kind = type(parts.pipeline)
        names = dict.fromkeys(parts.pipeline.components)
        settings = {n: v for n, v in parts.pipeline.config.items() if n not in names}
        given = {n: v for n, v in settings.items() if not n.startswith("_")}
        pipe = kind(
            **names
            | given
            | {
                self.component: PipelineModel(config=config_of(model), model=model),
                "scheduler": drawing_scheduler(
                    drawing.scheduler or parts.pipeline.scheduler,
                    None if drawing.scheduler else drawing.trained_with,
                ),
            }
        )
        pipe.vae_scale_factor = parts.scale
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _needed(self, what: str) -> FrozenParts:
        if self.parts is None:
            raise DataError(
                f"{type(self).__name__} has neither VAE nor text encoders, so {what} cannot be "
                "used",
                key="parts",
                value=None,
                fix=f"load them: {type(self).__name__}(parts=...), or load_pretrained(folder)",
            )
        return self.parts

    def _bring(self, parts: FrozenParts, device: torch.device | None, names: Sequence[str]) -> None:
        # Only what computes now: a T5 of 9 GiB need not wait on the device for the VAE.
        wanted = self.parts_device or device
        if wanted is not None:
            parts.to(wanted, names)


def _device_of(modules: Mapping[str, torch.nn.Module]) -> torch.device:
    return next(next(iter(modules.values())).parameters()).device


def _float(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As fp32, but for masks and other integers."""
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def _no_empty_text(dropout: float) -> DataError:
    return DataError(
        "the empty text cannot be encoded without text encoders",
        key="dropout",
        value=dropout,
        fix="load them, or drop captions in the data: Augmentation(caption_dropout=...)",
    )
