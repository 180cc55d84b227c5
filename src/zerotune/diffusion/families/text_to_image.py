"""What all text-to-image models have in common: VAE, text encoders, and a pipeline that draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune._util.text import probability, validated
from zerotune.diffusion.data.cache import EDITS, TEXTS, CacheSettings
from zerotune.diffusion.data.streams import row_of, stack_named
from zerotune.diffusion.families.base import config_of, images_of, parameters_of, take
from zerotune.diffusion.family import Conditioning, Denoiser, Drawing
from zerotune.diffusion.latents import LatentSpace, Packing, Unpacked
from zerotune.diffusion.noise_schedule import drawing_scheduler
from zerotune.diffusion.pipeline import Blueprint, FrozenParts, PipelineModel, pipeline_class
from zerotune.errors import DataError
from zerotune.plan.model import latent_frames

NEGATIVE: Final = "negative_"

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class _UsualSpace:
    """Sizes of the latents of a VAE that is not there."""

    scale: int
    frames: int

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a clip."""
        return latent_frames(frames, per_latent=self.frames)


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
    flow_matching: ClassVar[bool] = False
    """Whether these models learn velocities along straight lines, or noise."""
    reads_references: ClassVar[bool] = False
    """Whether texts are encoded together with the image that is edited."""

    usual_scale: ClassVar[int] = 8
    """Pixels per latent pixel where no VAE tells."""
    usual_frames: ClassVar[int] = 1
    """Frames per latent frame where no VAE tells."""
    packing: ClassVar[Packing] = Unpacked()
    """How the pipeline wants its latents."""
    clips: ClassVar[bool] = False
    """Whether latents have frames: (b, c, frames, h, w)."""
    listed: ClassVar[bool] = False
    """Whether the pipeline takes one tensor per text, each of its own length."""
    guided_by: ClassVar[str | None] = "guidance_scale"
    """The argument of guidance that calls the model twice; ``None`` where there is none."""
    unguided: ClassVar[float] = 1.0
    """Its value without guidance."""
    told_guidance: ClassVar[str | None] = None
    """The argument that tells a guidance-distilled model its guidance."""
    reference: ClassVar[str | None] = None
    """The argument that takes ``reference_latents``."""
    by_class: ClassVar[bool] = False
    """Whether the pipeline's class decides the call, so that the family may be made by hand."""
    arguments: ClassVar[Mapping[str, Any]] = _NONE
    """What else the pipeline is told."""

    parts: FrozenParts | None = None
    """VAE and text encoders. Not needed to train from caches; needed to draw images."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of samples trained on the empty text, for guidance without a classifier."""
    parts_device: torch.device | None = None
    """Where the parts encode what comes uncached; the batch's device when not given."""
    guidance: float = 1.0
    """What a guidance-distilled model is told in training."""
    blueprint: Blueprint | None = None
    """The pipeline without weights; that of ``parts`` when not given."""

    @abstractmethod
    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Embeddings of captions by ``text_tensors``, batch first, through the pipeline."""

    def embed_negative(
        self, parts: FrozenParts, texts: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """As ``embed``, of negative prompts: some pipelines give prompts instructions."""
        return self.embed(parts, texts, device)

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
            where = next(next(iter(parts.text_encoders.values())).parameters()).device
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

    def at_shown_size(self, images: Tensor) -> Tensor:
        """Images that are edited (b, 3, height, width) in the size the model is shown them in."""
        return images

    def encode_references(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """``{"latents": …}`` of images that are edited, for a cache."""
        return self.encode_images(self.at_shown_size(images), device=device)

    def remembered(self, texts: Sequence[str], *, device: torch.device) -> dict[str, Tensor]:
        """Embeddings of few texts that come again and again, computed once each."""
        parts = self._needed("captions")
        encoded = parts.remember(texts, lambda t: self.embed(parts, t, device), device=device)
        return {name: value.to(device) for name, value in encoded.items()}

    def unconditional(self, *, device: torch.device) -> dict[str, Tensor]:
        """What dropped texts become: the pipeline's empty negative prompt, (1, …)."""
        return self.remembered_negative([""], device=device)

    def remembered_negative(
        self, texts: Sequence[str], *, device: torch.device
    ) -> dict[str, Tensor]:
        """Embeddings of negative prompts, computed once each."""
        parts = self._needed("captions")
        encoded = parts.remember(
            texts, lambda t: self.embed_negative(parts, t, device), device=device, kind=NEGATIVE
        )
        return {name: value.to(device) for name, value in encoded.items()}

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

    def known_blueprint(self) -> Blueprint:
        """The pipeline without weights.

        Raises:
            DataError: The family was made by hand, without one.
        """
        if self.blueprint is not None:
            return self.blueprint
        if self.parts is not None:
            return Blueprint.of(self.parts.pipeline)
        if self.by_class:
            return Blueprint.usual(pipeline_class(self.pipeline))
        raise DataError(
            f"{type(self).__name__} does not know its pipeline",
            key="blueprint",
            value=None,
            fix="load it: load_pretrained(folder).family, also with parts=False",
        )

    def _space(self) -> LatentSpace | _UsualSpace:
        vae = self.known_blueprint().vae
        if vae is None:
            return _UsualSpace(scale=self.usual_scale, frames=self.usual_frames)
        return LatentSpace(vae)

    def _around(self, blueprint: Blueprint, model: Denoiser, scheduler: Any, **others: Any) -> Any:
        stand_in = PipelineModel(config=config_of(model), model=model)
        return blueprint.around(**{self.component: stand_in, "scheduler": scheduler, **others})

    def objective_settings(self) -> dict[str, Any]:
        """Settings of the objective that these models were made with."""
        return {}

    def told_texts(
        self, texts: Mapping[str, Tensor], device: torch.device, prefix: str = ""
    ) -> dict[str, Any]:
        """The pipeline's arguments of texts.

        Args:
            texts: By ``text_tensors``, batch first.
            device: Where they go.
            prefix: ``"negative_"`` for negative prompts.
        """
        # fp32: pipelines keep latents, and time steps, in the precision of their texts.
        moved = {
            name: value.to(device, torch.float32 if value.is_floating_point() else value.dtype)
            for name, value in texts.items()
        }
        if self.listed:
            rows = zip(moved["prompt_embeds"], moved["prompt_embeds_mask"].bool(), strict=True)
            return {f"{prefix}prompt_embeds": [row[mask] for row, mask in rows]}
        return {f"{prefix}{name}": value for name, value in moved.items()}

    def told_reference(self, latents: Tensor) -> Any:
        """What the pipeline is given as the image that is edited.

        Args:
            latents: (b, c, h, w).
        """
        return latents

    def adjust(self, pipe: Any, told: dict[str, Any]) -> None:  # noqa: B027 - few need it
        """Make a pipeline that was just made take what it is told (``height``, ``width``, …)."""

    def sized(self, size: Mapping[str, int]) -> dict[str, int]:
        """All that the pipeline is told of a size in pixels and frames."""
        return dict(size)

    # -- Drawing.

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Images (n, 3, height, width) of prompts, or clips (n, 3, frames, height, width).

        Raises:
            DataError: The family was made without its frozen parts.
        """
        parts = self._needed("prompts")
        scheduler = drawing_scheduler(
            drawing.scheduler or parts.pipeline.scheduler,
            None if drawing.scheduler else drawing.trained_with,
        )
        pipe = self.drawing_pipeline(parts, model, scheduler)
        size = self._drawn_size(pipe, drawing)
        told = {**self.drawing_arguments(drawing, device=model.device), **size}
        self.adjust(pipe, told)
        last = _LastStep()
        with parts.on(model.device, self.drawing_parts):
            pipe(
                **told,
                num_inference_steps=drawing.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in drawing.seeds],
                output_type="latent",
                **last.listening(type(pipe).__call__),
            )
        latents = last.latents
        with parts.on(model.device, ["vae"]):
            return parts.decode_latents(
                self.packing.unpack(latents, self._shape_of(latents, size, len(drawing.prompts)))
            )

    @property
    def drawing_parts(self) -> tuple[str, ...]:
        """Parts that compute while images are drawn, beside the VAE at the end."""
        return ()

    def drawing_pipeline(self, parts: FrozenParts, model: Denoiser, scheduler: Any) -> Any:
        """The pipeline that draws."""
        return self._around(Blueprint.of(parts.pipeline), model, scheduler)

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """What the pipeline is told of prompts and guidance.

        A model distilled for guidance is told it; with a negative prompt it is told what it was
        trained with, and guided in truth.
        """
        told = {
            **self.arguments,
            **self.told_texts(self.drawn_texts(drawing.prompts, drawing, device=device), device),
        }
        if self.reference is not None:
            told[self.reference] = self.told_reference(self._drawn_references(drawing, device))
        scale = drawing.guidance_scale
        if self.told_guidance is not None:
            told[self.told_guidance] = self.guidance if drawing.negative_prompt else scale
        if self.guided_by is None:
            return told
        guided = scale != 1.0 and (self.told_guidance is None or bool(drawing.negative_prompt))
        told[self.guided_by] = scale if guided else self.unguided
        if guided:
            texts = [drawing.negative_prompt] * len(drawing.prompts)
            negative = self.drawn_texts(texts, drawing, device=device, negative=True)
            told |= self.told_texts(negative, device, prefix=NEGATIVE)
            if "negative_prompt" in parameters_of(self.known_blueprint().kind.__call__):
                told["negative_prompt"] = None  # Sana's has a text of its own.
        return told

    def drawn_texts(
        self,
        texts: Sequence[str],
        drawing: Drawing,  # noqa: ARG002
        *,
        device: torch.device,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """Embeddings of prompts, or of negative ones, computed once each."""
        encoded = self.remembered_negative if negative else self.remembered
        return encoded(texts, device=device)

    def drawn_references(self, drawing: Drawing) -> Tensor:
        """The images that are edited.

        Raises:
            DataError: There are none.
        """
        if drawing.references is None:
            raise DataError(
                f"{type(self).__name__} edits images, and none were given",
                key="references",
                value=None,
                fix="pass references=, images (n, 3, height, width) in [-1, 1]",
            )
        return drawing.references

    def _drawn_references(self, drawing: Drawing, device: torch.device) -> Tensor:
        shown = self.at_shown_size(self.drawn_references(drawing))
        parts = self._needed("references")
        with parts.on(device, ["vae"]):
            return parts.encode_images(shown).to(device)

    def _drawn_size(self, pipe: Any, drawing: Drawing) -> dict[str, int]:
        taken = parameters_of(type(pipe).__call__)
        config = getattr(pipe, self.component).config
        side = getattr(pipe, "default_sample_size", getattr(config, "sample_size", 0)) or 0
        sides = (side, side) if isinstance(side, int) else side
        size = {
            name: int(taken[name].default or each * pipe.vae_scale_factor or 1024)
            for name, each in zip(("height", "width"), sides, strict=True)
        }
        if drawing.size is not None:
            size = {"height": drawing.size[0], "width": drawing.size[1]}
        if self.clips:
            size["num_frames"] = drawing.frames or int(taken["num_frames"].default)
        return self.sized(size)

    def _shape_of(self, latents: Tensor, size: Mapping[str, int], count: int) -> tuple[int, ...]:
        space = self._space()
        frames = (space.latent_frames(size["num_frames"]),) if self.clips else ()
        sides = (*frames, size["height"] // space.scale, size["width"] // space.scale)
        channels = latents.numel() // (count * int(torch.Size(sides).numel()))
        return (count, channels, *sides)

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


class _LastStep:
    """Keeps what the last step gave: pipelines differ in what they call latents at the end."""

    latents: Tensor

    def listening(self, call: Any) -> dict[str, Any]:
        """The argument with which a pipeline tells of its steps."""
        if "callback_on_step_end" in parameters_of(call):
            return {"callback_on_step_end": self._stepped}
        return {"callback": self._called}

    def _stepped(self, _pipe: Any, _step: int, _time: Any, tensors: Mapping[str, Any]) -> Any:
        self.latents = tensors["latents"]
        return {}

    def _called(self, _step: int, _time: Any, latents: Tensor) -> None:
        self.latents = latents


def _no_empty_text(dropout: float) -> DataError:
    return DataError(
        "the empty text cannot be encoded without text encoders",
        key="dropout",
        value=dropout,
        fix="load them, or drop captions in the data: Augmentation(caption_dropout=...)",
    )
