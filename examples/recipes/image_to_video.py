"""Train image-to-video adapters for Wan or HunyuanVideo; a clip's first frame is its condition.

    torchrun examples/recipes/image_to_video.py --base WAN-I2V --data clips --output runs/clips

clips contains, for each clip, a video cat.mp4 or a folder cat of frames, and a caption cat.txt. To
resume a stopped run, use the same command. Caches store the encoded first frame in addition to the
clip's latents, because the VAE encodes it together with empty frames.
"""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune import DeepSpeedPlan, LoRA, Trainer, add_lora, latest_checkpoint
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, ClipBuckets, ClipFolder, PreparedClips
from zerotune.diffusion.data.batches import row_of, stack_named
from zerotune.diffusion.data.cache import CacheSettings
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
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.pipeline_inputs import REFERENCES
from zerotune.diffusion.models.reading import ReadingFamily
from zerotune.errors import DataError
from zerotune.training import SaveEvery, ValidationImages


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = DeepSpeedPlan.build(stage=options.stage, offload="cpu", lr=options.lr)
    loaded = load_pretrained(options.base, family=FAMILIES[options.family], plan=plan)
    add_lora(loaded.model, LoRA(rank=options.rank, targets=loaded.family.lora_targets))
    clips = PreparedClips(
        ClipFolder(options.data),
        buckets=ClipBuckets(
            sizes=AspectBuckets(area=options.area, step=options.bucket_step),
            frames=options.frames,
            compression=loaded.family.parts.latents.frames,
            fps=options.fps,
        ),
    )
    data = encode_dataset(
        clips, family=loaded.family, folder=options.output / "cache", batch_size=1
    )
    shown = clips[0]
    drawing = ValidationImages(
        every=options.every,
        prompts=[shown["captions"]],
        references=shown["images"][None, :, 0],
        frames=shown["images"].shape[1],
        steps=options.draw_steps,
        folder=options.output / "validation",
    )
    saving = SaveEvery(steps=options.every, root=options.output / "checkpoints", keep=2)
    with Trainer(model=loaded, data=data, callbacks=[saving, drawing]) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints"):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "adapters")
    return list(report.losses)


IMAGE_EMBEDS: Final = "image_embeds"
"""Batch key of the first frames' CLIP embeddings (b, tokens, width)."""

_TRAINED_TIMES: Final = 1000.0
_IMAGE_TOKENS: Final = 257
_NOISE_ARGUMENTS: Final = 9
"""Number of arguments of ``prepare_latents`` in the text-to-video pipelines (Wan, HunyuanVideo).
The image-to-video pipelines pass the image before these arguments; the last are the latents."""
_NOISE_SHARE: Final = 0.999
"""Share of noise in the initial latents of HunyuanVideo's pipeline; the rest is the image."""
_REPLACED: Final = "token_replace"
"""Value in HunyuanVideo's configuration if the image replaces the first latent frame."""
_LEFT_OUT: Final = 4
"""Number of first frames that HunyuanVideo's pipeline drops for ``latent_concat``."""


@attrs.frozen(kw_only=True, eq=False)
class ImageToVideo(PipelineFamily):
    """Base class of families whose models generate a clip from its first frame.

    In training, the first frame comes from the clip; in sampling, it comes from ``references``.
    Caches store the encoded first frame as ``reference_latents``.
    """

    reference: ClassVar[str | None] = "image"
    by_class: ClassVar[bool] = False

    # -- Encoding first frames.

    @abstractmethod
    def encode_frames(self, parts: FrozenParts, images: Tensor, frames: int) -> dict[str, Tensor]:
        """Encode first frames; each part runs on its current device.

        Args:
            parts: VAE and text encoders.
            images: First frames (b, 3, height, width) in [-1, 1].
            frames: Number of frames in the clips.
        """

    @abstractmethod
    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:
        """Return the names of the frozen parts that ``encode_frames`` needs."""

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Encode clips (b, 3, frames, height, width) and their first frames."""
        return {
            **super().encode_images(images, device=device),
            **self._first_frames(images, device=device),
        }

    def read_images(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return a batch's first frames, for families that encode them together with texts."""
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
        """Return the base settings plus ``first_frame``, which affects cached latents."""
        usual, parts = super().latent_settings(), self._needed("images")
        others = [name for name in self.frame_parts(parts) if name != "vae"]
        own = {"first_frame": parts.hash(others) if others else True}
        return attrs.evolve(usual, settings={**usual.settings, **own})

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Return a batch's text embeddings and encoded first frames."""
        if REFERENCES not in batch:
            images = images_of(batch)
            known = self._first_frames(images, device=images.device)
            batch = {**batch, **{name: value.to(images.device) for name, value in known.items()}}
        found = super().conditioning(batch, generator)
        return {**found, **{n: batch[n].float() for n in (IMAGE_EMBEDS,) if n in batch}}

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """Return the pipeline's arguments, including the encoded first frames."""
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
        """Return the first frames of the clips to sample.

        Raises:
            DataError: ``drawing`` has no reference images, or the images and clips differ in size.
        """
        images = super().drawn_references(drawing)
        if drawing.size is not None and tuple(images.shape[-2:]) != tuple(drawing.size):
            raise DataError(
                f"the reference images must have the size of the clips, {tuple(drawing.size)}",
                key="references",
                value=tuple(images.shape[-2:]),
                fix="resize and crop the images to the value of size=, or omit size=",
            )
        return images

    def _drawn_size(self, pipe: Any, drawing: Drawing) -> dict[str, int]:
        sides = self.drawn_references(drawing).shape[-2:]
        return super()._drawn_size(pipe, attrs.evolve(drawing, size=(sides[0], sides[1])))

    # -- A first latent frame that the image replaces.

    def gives_first(self, model: Any) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether ``model`` uses the encoded image as a clip's first latent frame."""
        return False

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the pipeline to predict; a latent frame that comes from the image has zero loss."""
        found = super().predict(model, noisy, timesteps, conditioning)
        if not self.gives_first(model):
            return found
        sigmas = (timesteps.float() / _TRAINED_TIMES).view(-1, 1, 1, 1, 1)
        first = noisy[:, :, :1].float()
        known = conditioning[REFERENCES][:, :, :1].to(first.device)
        right = (first - known) / sigmas.to(first.device)
        return torch.cat([right.to(found), found[:, :, 1:]], dim=2)

    def drawn_latents(self, output: Any, last: Tensor) -> Tensor:
        """Return the sampled latents, including the first latent frame."""
        frames: Tensor = output.frames
        return frames if frames.shape == last.shape else last

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Return example latents and conditioning, including an encoded first frame."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        shown = known[REFERENCES][:, :, :1] if self.gives_first(model) else known[REFERENCES]
        return latents, {**known, REFERENCES: shown}


class _WanImage(ImageToVideo):
    """Image-to-video for Wan, whose models receive the image as additional channels.

    Wan 2.1 also receives CLIP's embedding of the image. In Wan 2.2's 5B model, the image replaces
    the first latent frame, whose loss is 0.
    """

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"
    also_needed: ClassVar[tuple[str, ...]] = ("image_encoder",)

    def gives_first(self, model: Any) -> bool:  # noqa: ARG002
        """Return whether the image replaces the first latent frame, as in Wan 2.2's 5B model."""
        return bool(self.known_blueprint().settings.get("expand_timesteps"))

    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:
        """Return the name of the VAE, and of CLIP if the pipeline has it."""
        return ("vae", *(name for name in ("image_encoder",) if name in parts.modules))

    def encode_frames(self, parts: FrozenParts, images: Tensor, frames: int) -> dict[str, Tensor]:
        """Return ``reference_latents`` (b, c, frames, h, w), and for Wan 2.1 ``image_embeds``."""
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
        """Encode texts with the text-to-video pipeline, which gives equal results without ftfy."""
        parts = {
            name: getattr(pipeline, name)
            for name in ("tokenizer", "text_encoder", "vae", "scheduler")
        }
        return super().encode_with(pipeline_class(Wan.pipeline)(**parts), device, prompts, prefix)

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass each sample's encoded image to the model; the pipeline supports only one image."""
        super().adjust(pipe, call_kwargs)
        shown = call_kwargs[str(self.reference)]
        embeds = call_kwargs.get(IMAGE_EMBEDS)
        call_kwargs[str(self.reference)] = torch.zeros(1, 3, 1, 1)  # A placeholder.
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
        """Return example latents and conditioning, with ``image_embeds`` if the model needs it."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        width = config_of(model).get("image_dim")
        if width is None:
            return latents, known
        seen = torch.empty(batch, _IMAGE_TOKENS, width, device="meta")
        return latents, {**known, IMAGE_EMBEDS: seen}


class WanImageToVideo(_WanImage, Wan):
    """Image-to-video model of Wan 2.1, or high-noise expert of Wan 2.2."""


class WanImageToVideoLowNoise(_WanImage, WanLowNoise):
    """Low-noise image-to-video expert of Wan 2.2."""


class HunyuanVideoImageToVideo(ImageToVideo, ReadingFamily, HunyuanVideo):
    """HunyuanVideo image-to-video; LLaVA encodes each text together with the image.

    The model's configuration determines whether the image replaces the first latent frame
    (``token_replace``) or is passed in additional channels (``latent_concat``). With
    ``latent_concat``, the pipeline drops the first four frames of each sampled clip.
    """

    pipeline: ClassVar[str] = "HunyuanVideoImageToVideoPipeline"

    def gives_first(self, model: Any) -> bool:
        """Return whether the model's ``image_condition_type`` is ``token_replace``."""
        return bool(config_of(model).image_condition_type == _REPLACED)

    def frame_parts(self, parts: FrozenParts) -> tuple[str, ...]:  # noqa: ARG002
        """Return only the VAE's name, because LLaVA encodes the frame together with the text."""
        return ("vae",)

    def encode_frames(
        self,
        parts: FrozenParts,
        images: Tensor,
        frames: int,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return ``reference_latents`` (b, c, 1, h, w)."""
        return {REFERENCES: parts.encode_images(images).unsqueeze(2)}

    def encode_images(
        self, images: Tensor, *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Encode clips and their first frames.

        With ``token_replace``, the first frame is encoded separately and becomes the first latent
        frame. If it were encoded with the clip, it would be normalised over all frames.
        """
        found = super().encode_images(images, device=device)
        if self._condition_type(self._needed("images")) != _REPLACED:
            return found
        latents = found["latents"]
        latents = latents if latents.ndim == 5 else latents.unsqueeze(2)
        return {**found, "latents": torch.cat([found[REFERENCES], latents[:, :, 1:]], dim=2)}

    def latent_settings(self) -> CacheSettings:
        """Return the base settings plus ``image_condition_type``, which affects the latents."""
        usual = super().latent_settings()
        kind = {"image_condition_type": self._condition_type(self._needed("images"))}
        return attrs.evolve(usual, settings={**usual.settings, **kind})

    def _condition_type(self, parts: FrozenParts) -> str | None:
        found: str | None = parts.pipeline.transformer.config.image_condition_type
        return found

    # -- Texts.

    def check_dataset(self, dataset: Any) -> None:
        """Check that all captions can be enumerated; reference images are not required."""
        dataset.augmentation.check_countable()

    def read(
        self, parts: FrozenParts, caption: str, pictures: list[Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode a caption with its image; some image tokens precede the caption's tokens."""
        prompts = {
            "prompt": [caption],
            "image": pictures,
            "image_embed_interleave": self._interleave(parts),
        }
        return self.encode_with(parts.pipeline, device, prompts)

    def pictures_of(self, parts: FrozenParts, images: Tensor) -> list[list[Any]]:
        """Convert images to PIL images of the same size; LLaVA's processor resizes them."""
        processor = parts.pipeline.video_processor
        found = processor.numpy_to_pil(processor.pt_to_numpy(images.float() / 2 + 0.5))
        return [[picture] for picture in found]

    def embed_negative(
        self, parts: FrozenParts, texts: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode negative prompts with a black image, as the pipeline does."""
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
        """Return embeddings of prompts with images, or of negative prompts with a black image."""
        if negative:
            return self.remembered_negative(texts, device=device)
        return super().drawn_texts(texts, drawing, device=device)

    def embedding_settings(self) -> dict[str, Any]:
        """Return the base settings plus ``image_embed_interleave``, which affects embeddings."""
        kept = {"image_embed_interleave": self._interleave(self._needed("captions"))}
        return {**super().embedding_settings(), **kept}

    def _interleave(self, parts: FrozenParts) -> int:
        return {"latent_concat": 2, _REPLACED: 4}.get(self._condition_type(parts) or "", 1)

    # -- The call.

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass encoded images to the model; in sampling, also mix them into the initial noise."""
        super().adjust(pipe, call_kwargs)
        shown = call_kwargs[str(self.reference)]
        call_kwargs[str(self.reference)] = torch.zeros(1, 3, 1, 1)  # A placeholder.

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
        # The pipeline drops the prediction of a first latent frame that the image replaces.
        missing = noisy.shape[2] - prediction.shape[2]
        padded = torch.nn.functional.pad(prediction, (0, 0, 0, 0, missing, 0))
        return super()._as_latents(padded, noisy)

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Sample clips (n, 3, frames, h, w); for ``latent_concat``, drop the first four frames."""
        clips = super().draw(model, drawing)
        return clips if self.gives_first(model) else clips[:, :, _LEFT_OUT:]

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Return example latents and conditioning, including the image as one latent frame."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        return latents, {**known, REFERENCES: known[REFERENCES][:, :, :1]}


FAMILIES: Final[dict[str, type[ImageToVideo]]] = {
    "wan": WanImageToVideo,
    "wan-low-noise": WanImageToVideoLowNoise,
    "hunyuan-video": HunyuanVideoImageToVideo,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train image-to-video adapters.")
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--family", choices=FAMILIES, default="wan", help="kind of model")
    parser.add_argument("--data", type=Path, required=True, help="clips with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--area", type=int, default=832 * 480, help="maximum pixels per frame")
    parser.add_argument("--bucket-step", type=int, default=16, help="divisor of frame sides")
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 81], help="clip lengths")
    parser.add_argument("--fps", type=float, default=16.0, help="frames per second")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
