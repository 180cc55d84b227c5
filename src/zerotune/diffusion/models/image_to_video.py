"""Families that go on from an image: the condition of a clip is its own first frame.

What the model is shown of the image is kept beside the latents in caches, since it cannot be told
from them: the VAE encodes the first frame together with empty ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.data.cache import CacheSettings
from zerotune.diffusion.data.streams import row_of, stack_named
from zerotune.diffusion.models.declared import HunyuanVideo, Wan, WanLowNoise
from zerotune.diffusion.models.family import (
    Conditioning,
    Denoiser,
    Drawing,
    config_of,
    images_of,
    parameters_of,
)
from zerotune.diffusion.models.pipeline import FrozenParts, pipeline_class
from zerotune.diffusion.models.pipeline_family import REFERENCES, PipelineFamily
from zerotune.diffusion.models.reading import ReadingFamily
from zerotune.errors import DataError

IMAGE_EMBEDS: Final = "image_embeds"
"""Key of a batch: what CLIP sees in the first frames, (b, tokens, width)."""

_TRAINED_TIMES: Final = 1000.0
_IMAGE_TOKENS: Final = 257
_NOISE_ARGUMENTS: Final = 9
"""Arguments of ``prepare_latents`` of the pipelines of texts (Wan, HunyuanVideo), which follow
the image in their likes for images; the last are the latents."""
_NOISE_SHARE: Final = 0.999
"""Of the latents that HunyuanVideo's pipeline draws a clip from; the rest is the image."""
_REPLACED: Final = "token_replace"
"""How HunyuanVideo's configuration says that the image is the first latent frame."""
_LEFT_OUT: Final = 4
"""First frames that HunyuanVideo's pipeline leaves out where the image lies in channels."""


@attrs.frozen(kw_only=True, eq=False)
class ImageToVideo(PipelineFamily):
    """A family of clips that begin with a given image. Mix it into the family of its model.

    The image is the first frame of each clip, in training; in drawing it is one of
    ``references``. Caches hold what the model is shown of it as ``reference_latents``.
    """

    reference: ClassVar[str | None] = "image"
    by_class: ClassVar[bool] = False

    # -- What is known of a first frame.

    @abstractmethod
    def encode_frames(self, parts: FrozenParts, images: Tensor, frames: int) -> dict[str, Tensor]:
        """What the model is shown of first frames, on the parts' devices.

        Args:
            parts: The frozen parts.
            images: First frames (b, 3, height, width) in [-1, 1].
            frames: Of the clips.
        """

    @abstractmethod
    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:
        """Parts that ``encode_frames`` needs."""

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Latents of clips (b, 3, frames, height, width), and what is shown of their first."""
        return {
            **super().encode_images(images, device=device),
            **self._first_frames(images, device=device),
        }

    def read_images(self, batch: Mapping[str, Any]) -> Tensor | None:
        """First frames, for families whose text encoder reads them."""
        if "images" not in batch:
            return None
        clips = images_of(batch)
        return clips if clips.ndim == 4 else clips[:, :, 0]

    def _first_frames(
        self, clips: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        parts = self._needed("images")
        clips = clips if clips.ndim == 5 else clips.unsqueeze(2)
        self._bring(parts, device, self.frame_parts(parts))
        with torch.no_grad():
            return self.encode_frames(parts, clips[:, :, 0], clips.shape[2])

    def latent_settings(self) -> CacheSettings:
        """The first frame is encoded, too."""
        usual, parts = super().latent_settings(), self._needed("images")
        others = [name for name in self.frame_parts(parts) if name != "vae"]
        own = {"first_frame": parts.hash(others) if others else True}
        return attrs.evolve(usual, settings={**usual.settings, **own})

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Embeddings of texts, and what the model is shown of first frames."""
        if REFERENCES not in batch:
            images = images_of(batch)
            known = self._first_frames(images, device=images.device)
            batch = {**batch, **{name: value.to(images.device) for name, value in known.items()}}
        found = super().conditioning(batch, generator)
        return {**found, **{n: batch[n].float() for n in (IMAGE_EMBEDS,) if n in batch}}

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """With what the model is shown of the images that clips go on from."""
        images = self.drawn_references(drawing)
        parts = self._needed("references")
        usual = parameters_of(self.known_blueprint().kind.__call__)["num_frames"].default
        frames = drawing.frames or int(usual)
        with parts.on(device, self.frame_parts(parts)), torch.no_grad():
            known = self.encode_frames(parts, images, frames)
        moved = {name: value.to(device, torch.float32) for name, value in known.items()}
        kwargs = super().drawing_arguments(drawing, device=device)
        return {**kwargs, str(self.reference): moved.pop(REFERENCES), **moved}

    def _drawn_references(self, drawing: Drawing, device: torch.device) -> Tensor:  # noqa: ARG002
        return self.drawn_references(drawing)

    def drawn_references(self, drawing: Drawing) -> Tensor:
        """The images that clips go on from, in the size that is drawn.

        Raises:
            DataError: There are none, or they are of another size.
        """
        images = super().drawn_references(drawing)
        if drawing.size is not None and tuple(images.shape[-2:]) != tuple(drawing.size):
            raise DataError(
                f"clips of {tuple(drawing.size)} are to go on from images of another size",
                key="references",
                value=tuple(images.shape[-2:]),
                fix="resize and crop the images to size=, or leave it out",
            )
        return images

    def _drawn_size(self, pipe: Any, drawing: Drawing) -> dict[str, int]:
        sides = self.drawn_references(drawing).shape[-2:]
        return super()._drawn_size(pipe, attrs.evolve(drawing, size=(sides[0], sides[1])))

    # -- A first frame that is given, not learned.

    def gives_first(self, model: Any) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the image takes the place of the first latent frame."""
        return False

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """As of any pipeline; where the first latent frame is given, that is right as it is."""
        found = super().predict(model, noisy, timesteps, conditioning)
        if not self.gives_first(model):
            return found
        sigmas = (timesteps.float() / _TRAINED_TIMES).view(-1, 1, 1, 1, 1)
        first = noisy[:, :, :1].float()
        known = conditioning[REFERENCES][:, :, :1].to(first.device)
        right = (first - known) / sigmas.to(first.device)
        return torch.cat([right.to(found), found[:, :, 1:]], dim=2)

    def drawn_latents(self, output: Any, last: Tensor) -> Tensor:
        """With the frame that was given."""
        frames: Tensor = output.frames
        return frames if frames.shape == last.shape else last

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """With a first frame, as the model is shown it."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        shown = known[REFERENCES][:, :, :1] if self.gives_first(model) else known[REFERENCES]
        return latents, {**known, REFERENCES: shown}


class _WanImage(ImageToVideo):
    """What Wan's pipeline makes of an image: channels beside the noise, or the first latent frame.

    Wan 2.1 sees the image through CLIP as well, and Wan 2.2's small model has the first latent
    frame given: it is not learned, and its loss is zero.
    """

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"
    also_needed: ClassVar[tuple[str, ...]] = ("image_encoder",)

    def gives_first(self, model: Any) -> bool:  # noqa: ARG002
        """As Wan 2.2's small model."""
        return bool(self.known_blueprint().settings.get("expand_timesteps"))

    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:
        """The VAE, and CLIP where there is one."""
        return ("vae", *(name for name in ("image_encoder",) if name in parts.modules))

    def encode_frames(self, parts: FrozenParts, images: Tensor, frames: int) -> dict[str, Tensor]:
        """``reference_latents`` (b, c, frames, h, w), and ``image_embeds`` of Wan 2.1."""
        if self.gives_first(None):
            return {REFERENCES: parts.encode_images(images).unsqueeze(2)}
        clips = images.new_zeros(*images.shape[:2], frames, *images.shape[2:])
        clips[:, :, 0] = images
        found = {REFERENCES: parts.encode_images(clips)}
        if "image_encoder" in parts.modules:
            pipeline = parts.pipeline
            pictures = pipeline.video_processor.numpy_to_pil(
                pipeline.video_processor.pt_to_numpy(images.float() / 2 + 0.5)
            )
            device = parts.modules["image_encoder"].device
            found[IMAGE_EMBEDS] = pipeline.encode_image(pictures, device).float()
        return found

    def encode_with(
        self,
        pipeline: Any,
        device: torch.device,
        prompts: Mapping[str, Any],
        prefix: str = "",
    ) -> dict[str, Tensor]:
        """As the pipeline of texts alone, whose code is the same but needs no ftfy."""
        parts = {
            name: getattr(pipeline, name)
            for name in ("tokenizer", "text_encoder", "vae", "scheduler")
        }
        return super().encode_with(pipeline_class(Wan.pipeline)(**parts), device, prompts, prefix)

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Show the model each sample's own image, which is encoded; the pipeline takes one."""
        super().adjust(pipe, call_kwargs)
        shown = call_kwargs[str(self.reference)]
        embeds = call_kwargs.get(IMAGE_EMBEDS)
        call_kwargs[str(self.reference)] = torch.zeros(1, 3, 1, 1)  # Nobody looks at it.
        pipe.check_inputs = lambda *_, **__: None

        def prepare_latents(_image: Tensor, *told: Any) -> tuple[Tensor, ...]:
            noise = pipeline_class(Wan.pipeline).prepare_latents(pipe, *told[:_NOISE_ARGUMENTS])
            mask = noise.new_zeros(len(noise), 1, *noise.shape[2:])
            mask[:, :, 0] = 1
            if self.gives_first(None):
                return noise, shown, (1 - mask)[:1]
            each = mask.expand(-1, pipe.vae_scale_factor_temporal, -1, -1, -1)
            return noise, torch.cat([each, shown], dim=1)

        pipe.prepare_latents = prepare_latents
        if embeds is not None:
            call_kwargs[IMAGE_EMBEDS] = embeds[:1]

            def put_in_place(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return args, {**kwargs, "encoder_hidden_states_image": embeds}

            pipe.transformer.register_forward_pre_hook(put_in_place, with_kwargs=True)

    def _call_kwargs(
        self, noisy: Tensor, conditioning: Conditioning, device: torch.device
    ) -> dict[str, Any]:
        found = super()._call_kwargs(noisy, conditioning, device)
        if IMAGE_EMBEDS in conditioning:
            found[IMAGE_EMBEDS] = conditioning[IMAGE_EMBEDS].to(device)
        return found

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """With what CLIP sees, where the model takes it."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        width = config_of(model).get("image_dim")
        if width is None:
            return latents, known
        seen = torch.empty(batch, _IMAGE_TOKENS, width, device="meta")
        return latents, {**known, IMAGE_EMBEDS: seen}


class WanImageToVideo(_WanImage, Wan):
    """Wan 2.1 and 2.2 that go on from an image; of two experts the one for much noise."""


class WanImageToVideoLowNoise(_WanImage, WanLowNoise):
    """Of Wan 2.2's two experts the one for little noise."""


class HunyuanVideoImageToVideo(ImageToVideo, ReadingFamily, HunyuanVideo):
    """HunyuanVideo that goes on from an image, which LLaVA reads together with each text.

    The model's configuration says whether the image takes the place of the first latent frame
    (``token_replace``) or lies in channels of its own (``latent_concat``). Of the latter's clips
    the pipeline leaves out the first four frames.
    """

    pipeline: ClassVar[str] = "HunyuanVideoImageToVideoPipeline"

    def gives_first(self, model: Any) -> bool:
        """As the model's configuration says."""
        return bool(config_of(model).image_condition_type == _REPLACED)

    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:  # noqa: ARG002
        """The VAE; what LLaVA makes of the image belongs to the texts."""
        return ("vae",)

    def encode_frames(
        self,
        parts: FrozenParts,
        images: Tensor,
        frames: int,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """``reference_latents`` (b, c, 1, h, w)."""
        return {REFERENCES: parts.encode_images(images).unsqueeze(2)}

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Latents of clips and of their first frames, which are those of the clips if given.

        The VAE normalises over all frames: a frame by itself has other latents than in a clip.
        """
        found = super().encode_images(images, device=device)
        if self._condition_type(self._needed("images")) != _REPLACED:
            return found
        latents = found["latents"]
        latents = latents if latents.ndim == 5 else latents.unsqueeze(2)
        return {**found, "latents": torch.cat([found[REFERENCES], latents[:, :, 1:]], dim=2)}

    def latent_settings(self) -> CacheSettings:
        """Where the image is, too."""
        usual = super().latent_settings()
        kind = {"image_condition_type": self._condition_type(self._needed("images"))}
        return attrs.evolve(usual, settings={**usual.settings, **kind})

    def _condition_type(self, parts: FrozenParts) -> str | None:
        found: str | None = parts.pipeline.transformer.config.image_condition_type
        return found

    # -- Texts.

    def check_dataset(self, dataset: Any) -> None:
        """Refuse captions that cannot be counted; what is read with them is in every clip."""
        dataset.augmentation.check_countable()

    def read(
        self, parts: FrozenParts, caption: str, pictures: list[Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Embeddings of the image's tokens, thinned out, and of the caption's behind them."""
        prompts = {
            "prompt": [caption],
            "image": pictures,
            "image_embed_interleave": self._interleave(parts),
        }
        return self.encode_with(parts.pipeline, device, prompts)

    def pictures_of(self, parts: FrozenParts, images: Tensor) -> list[list[Any]]:
        """In their own size: LLaVA's processor has one."""
        processor = parts.pipeline.video_processor
        found = processor.numpy_to_pil(processor.pt_to_numpy(images.float() / 2 + 0.5))
        return [[picture] for picture in found]

    def embed_negative(
        self, parts: FrozenParts, texts: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """What the pipeline makes of negative prompts: LLaVA reads them with a black image."""
        taken = parameters_of(parts.pipeline.encode_prompt)["image_embed_interleave"]
        (black,) = self.pictures_of(parts, -torch.ones(1, 3, 16, 16))
        encoded = [
            self.encode_with(
                parts.pipeline,
                device,
                {"prompt": [text], "image": black, "image_embed_interleave": taken.default},
            )
            for text in texts
        ]
        return stack_named([row_of(one, 0) for one in encoded])

    def drawn_texts(
        self,
        texts: Sequence[str],
        drawing: Drawing,
        *,
        device: torch.device,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """Prompts with the image that their clip goes on from."""
        if negative:
            return self.remembered_negative(texts, device=device)
        return super().drawn_texts(texts, drawing, device=device)

    def embedding_settings(self) -> dict[str, Any]:
        """How many of the image's tokens are kept, too."""
        kept = {"image_embed_interleave": self._interleave(self._needed("captions"))}
        return {**super().embedding_settings(), **kept}

    def _interleave(self, parts: FrozenParts) -> int:
        return {"latent_concat": 2, _REPLACED: 4}.get(self._condition_type(parts) or "", 1)

    # -- The call.

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Show the model each sample's own image; noise is mixed with it in drawing alone."""
        super().adjust(pipe, call_kwargs)
        shown = call_kwargs[str(self.reference)]
        call_kwargs[str(self.reference)] = torch.zeros(1, 3, 1, 1)  # Nobody looks at it.

        def prepare_latents(_image: Tensor, *told: Any) -> tuple[Tensor, Tensor]:
            noise = pipeline_class(HunyuanVideo.pipeline).prepare_latents(
                pipe, *told[:_NOISE_ARGUMENTS]
            )
            every = shown.repeat(1, 1, noise.shape[2], 1, 1)
            if told[_NOISE_ARGUMENTS - 1] is None:
                share = torch.tensor([_NOISE_SHARE], device=noise.device)
                noise = noise * share + every * (1 - share)
            return noise, shown if self.gives_first(pipe.transformer) else every

        pipe.prepare_latents = prepare_latents

    def _as_latents(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        # Of a first frame that is given the pipeline keeps no prediction.
        missing = noisy.shape[2] - prediction.shape[2]
        padded = torch.nn.functional.pad(prediction, (0, 0, 0, 0, missing, 0))
        return super()._as_latents(padded, noisy)

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Clips (n, 3, frames, height, width), four frames shorter where the image lies apart."""
        clips = super().draw(model, drawing)
        return clips if self.gives_first(model) else clips[:, :, _LEFT_OUT:]

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """With one latent frame of the image."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        return latents, {**known, REFERENCES: known[REFERENCES][:, :, :1]}


IMAGE_TO_VIDEO: Final[tuple[type[ImageToVideo], ...]] = (
    WanImageToVideo,
    HunyuanVideoImageToVideo,
)
"""All of them that a pipeline's class decides."""
