"""Families of supported pipelines; each declares what its diffusers pipeline does not define."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final, cast

import attrs
import torch
from torch import Tensor

from zerotune._util.text import validated, whole
from zerotune.diffusion.data.cache import CacheSettings
from zerotune.diffusion.models.family import Conditioning, Denoiser, Drawing, config_of
from zerotune.diffusion.models.latents import Packing, Tokens
from zerotune.diffusion.models.pipeline import Blueprint, FrozenParts, PipelineModel
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.reading import ReadingFamily
from zerotune.diffusion.models.stable_diffusion import (
    POOLED,
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
)
from zerotune.errors import DataError

_WITH_MASK = ("prompt_embeds", "prompt_attention_mask")


_ROUNDED_UP = 1 + 1e-6

_MASKLESS = 3
"""Positional arguments of a checkpointed block: states, times and positions."""

_UNBINNED = {"use_resolution_binning": False}


class Flux(PipelineFamily):
    """Flux.1, with CLIP and T5 as text encoders.

    Flux.1 dev receives the guidance scale as an input; in training the scale is 1, as in diffusers.
    Texts have 512 tokens by default; Flux.1 schnell supports at most 256.
    """

    pipeline: ClassVar[str] = "FluxPipeline"
    text_tensors: ClassVar[tuple[str, ...]] = POOLED
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    packing: ClassVar[Packing] = Tokens(2)
    guided_by: ClassVar[str | None] = "true_cfg_scale"
    embedded_guidance_arg: ClassVar[str | None] = "guidance_scale"
    by_class: ClassVar[bool] = True


class QwenImage(PipelineFamily):
    """Qwen-Image, with packed latents; texts have variable lengths and a mask."""

    pipeline: ClassVar[str] = "QwenImagePipeline"
    model: ClassVar[str] = "QwenImageTransformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "prompt_embeds_mask")
    packing: ClassVar[Packing] = Tokens(2)
    guided_by: ClassVar[str | None] = "true_cfg_scale"


class ZImage(PipelineFamily):
    """Z-Image, whose model predicts the negated velocity; time runs from noise to data.

    The pipeline receives texts of variable length as a list. To disable guidance, pass
    ``guidance_scale=0`` to diffusers' pipeline, but ``guidance_scale=1`` to ``sample``.
    """

    pipeline: ClassVar[str] = "ZImagePipeline"
    model: ClassVar[str] = "ZImageTransformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "prompt_embeds_mask")
    encoded: ClassVar[tuple[str, ...]] = ("prompt_embeds", "negative_prompt_embeds")
    listed: ClassVar[bool] = True
    unguided: ClassVar[float] = 0.0


@attrs.frozen(kw_only=True, eq=False)
class _Picture:
    """Latents of a reference image, which take the place of a PIL image in the pipeline."""

    latents: Tensor
    scale: int

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height of the image in pixels."""
        height, width = self.latents.shape[-2:]
        return width * self.scale, height * self.scale


def _pictures(latents: Tensor, scale: int) -> list[_Picture]:
    """Return the references of latents (b, c, h, w), or (b, r, c, h, w), in their order."""
    each = latents.unbind(1) if latents.ndim == 5 else (latents,)
    return [_Picture(latents=one, scale=scale) for one in each]


@attrs.frozen(eq=False)
class _Pictures:
    """An image processor for a pipeline that receives latents in place of reference images."""

    pictures: list[_Picture]

    def resize(self, picture: _Picture, *_: Any) -> _Picture:
        """Return ``picture``, which already has its final size."""
        return picture

    def preprocess(self, picture: _Picture, *_: Any, **__: Any) -> Tensor:
        """Return the latents unchanged."""
        return picture.latents

    def check_image_input(self, picture: _Picture) -> None:
        """Accept any latents."""

    def _resize_to_target_area(self, picture: _Picture, *_: Any) -> _Picture:
        return picture

    def put_in_place(
        self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Pass the references' actual shapes to the model; the pipeline assumes one megapixel."""
        sides = (picture.latents.shape[-2:] for picture in self.pictures)
        own = [(1, height // 2, width // 2) for height, width in sides]
        return args, {**kwargs, "img_shapes": [[row[0], *own] for row in kwargs["img_shapes"]]}


_FLUX2_AREA: Final = 1024 * 1024
"""Area in pixels to which Flux.2's pipeline shrinks larger reference images."""


class Flux2(PipelineFamily):
    """Flux.2 dev, whose model receives the guidance scale as an input.

    Latents have 128 channels, normalised by statistics stored in the VAE. If a batch contains
    ``reference_latents``, the model edits the reference images; each sample may have several.
    """

    pipeline: ClassVar[str] = "Flux2Pipeline"
    model: ClassVar[str] = "Flux2Transformer2DModel"
    usual_scale: ClassVar[int] = 16
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.to_qkv_mlp_proj",
    )
    encoded: ClassVar[tuple[str, ...]] = ("prompt_embeds", "text_ids")
    packing: ClassVar[Packing] = Tokens(1, packs=False)
    guided_by: ClassVar[str | None] = None
    embedded_guidance_arg: ClassVar[str | None] = "guidance_scale"

    reference: ClassVar[str | None] = "image"
    needs_references: ClassVar[bool] = False
    several_references: ClassVar[bool] = True

    def at_shown_size(self, images: Tensor) -> Tensor:
        """Resize and crop reference images to at most one megapixel, as the pipeline does."""
        pipeline = self._needed("references").pipeline
        processor, multiple = pipeline.image_processor, pipeline.vae_scale_factor * 2
        pictures = processor.numpy_to_pil(processor.pt_to_numpy(images.float() / 2 + 0.5))
        if images.shape[-2] * images.shape[-1] > _FLUX2_AREA:
            pictures = [processor._resize_to_target_area(each, _FLUX2_AREA) for each in pictures]
        width, height = (side // multiple * multiple for side in pictures[0].size)
        shown = processor.preprocess(pictures, height=height, width=width, resize_mode="crop")
        return cast("Tensor", shown)

    def reference_input(self, latents: Tensor) -> list[_Picture]:
        """Wrap latents so that the pipeline accepts them in place of PIL images."""
        return _pictures(latents, self.latent_space().scale)

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass each sample's reference latents; the pipeline supports only one set per call."""
        super().adjust(pipe, call_kwargs)
        if self.reference not in call_kwargs:
            return
        pipe.image_processor = _Pictures(call_kwargs[self.reference])

        def prepare_image_latents(*, images: list[Tensor], **_: Any) -> tuple[Tensor, Tensor]:
            places = pipe._prepare_image_ids([each[:1] for each in images])
            tokens = torch.cat([pipe._pack_latents(each) for each in images], dim=1)
            return tokens, places.expand(len(tokens), -1, -1).to(tokens.device)

        pipe.prepare_image_latents = prepare_image_latents


class Flux2Klein(Flux2):
    """Flux.2 klein, which uses classifier-free guidance."""

    pipeline: ClassVar[str] = "Flux2KleinPipeline"
    guided_by: ClassVar[str | None] = "guidance_scale"
    embedded_guidance_arg: ClassVar[str | None] = None


class Wan(PipelineFamily):
    """Text-to-video model of Wan 2.1, or high-noise expert of Wan 2.2."""

    pipeline: ClassVar[str] = "WanPipeline"
    model: ClassVar[str] = "WanTransformer3DModel"
    usual_frames: ClassVar[int] = 4
    clips: ClassVar[bool] = True
    other: ClassVar[str] = "transformer_2"
    """Component name of the expert that is not trained."""

    @property
    def boundary(self) -> float | None:
        """Return the sigma at which sampling switches experts; ``None`` for a single model."""
        found = self.known_blueprint().settings.get("boundary_ratio")
        return None if found is None else float(found)

    def objective_settings(self) -> dict[str, Any]:
        """Return the range of noise levels on which this expert is trained."""
        return {} if self.boundary is None else {"timestep_range": self._levels(self.boundary)}

    def _levels(self, boundary: float) -> tuple[float, float]:
        return boundary, 1.0

    def calls_one_by_one(self) -> bool:
        """Return whether each sample needs a separate pipeline call, as for Wan 2.2's 5B model."""
        return bool(self.known_blueprint().settings.get("expand_timesteps"))

    def predicting_pipeline(self, model: Denoiser, scheduler: Any) -> Any:
        """Return a pipeline that uses this expert for all time steps."""
        blueprint = self.known_blueprint()
        settings = {**blueprint.settings, "boundary_ratio": None}
        stand_in = PipelineModel(config=config_of(model), model=model)
        return attrs.evolve(blueprint, settings=settings).around(
            transformer=stand_in, scheduler=scheduler
        )

    def drawing_pipeline(self, parts: FrozenParts, model: Denoiser, scheduler: Any) -> Any:
        """Return a sampling pipeline with both experts, the trained and the frozen one.

        Raises:
            DataError: The frozen expert was not loaded.
        """
        if self.boundary is None:
            return super().drawing_pipeline(parts, model, scheduler)
        other = parts.modules.get(self.other)
        if other is None:
            raise DataError(
                "sampling needs both experts, but only the trained expert was loaded",
                f"remove {self.other!r} from leave_out to load the frozen expert too",
                f"parts.{self.other}",
                None,
            )
        beside = PipelineModel(config=config_of(other), model=cast("Denoiser", other))
        return self._around(Blueprint.of(parts.pipeline), model, scheduler, **{self.other: beside})

    @property
    def drawing_parts(self) -> tuple[str, ...]:
        """Return the component name of the frozen expert."""
        return (self.other,)


class WanLowNoise(Wan):
    """Low-noise text-to-video expert of Wan 2.2, selected with ``family=WanLowNoise``."""

    component: ClassVar[str] = "transformer_2"
    other: ClassVar[str] = "transformer"

    def _levels(self, boundary: float) -> tuple[float, float]:
        return 0.0, boundary


class Sana(PipelineFamily):
    """Sana, with Gemma as text encoder and a VAE that compresses each side 32-fold."""

    pipeline: ClassVar[str] = "SanaPipeline"
    model: ClassVar[str] = "SanaTransformer2DModel"
    usual_scale: ClassVar[int] = 32
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK
    arguments: ClassVar[Mapping[str, Any]] = _UNBINNED


class Lumina2(PipelineFamily):
    """Lumina Image 2.0, with Gemma as text encoder; time runs from noise to data."""

    pipeline: ClassVar[str] = "Lumina2Pipeline"
    model: ClassVar[str] = "Lumina2Transformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK


class LTXVideo(PipelineFamily):
    """LTX-Video; its VAE compresses each side 32-fold and time 8-fold. Latent pixels are tokens."""

    pipeline: ClassVar[str] = "LTXPipeline"
    model: ClassVar[str] = "LTXVideoTransformer3DModel"
    usual_scale: ClassVar[int] = 32
    usual_frames: ClassVar[int] = 8
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK
    packing: ClassVar[Packing] = Tokens(1)
    clips: ClassVar[bool] = True


class HunyuanVideo(PipelineFamily):
    """HunyuanVideo, with LLaMA and CLIP as text encoders; the guidance scale is a model input."""

    pipeline: ClassVar[str] = "HunyuanVideoPipeline"
    model: ClassVar[str] = "HunyuanVideoTransformer3DModel"
    usual_frames: ClassVar[int] = 4
    text_tensors: ClassVar[tuple[str, ...]] = (
        "prompt_embeds",
        "pooled_prompt_embeds",
        "prompt_attention_mask",
    )
    clips: ClassVar[bool] = True
    guided_by: ClassVar[str | None] = "true_cfg_scale"
    embedded_guidance_arg: ClassVar[str | None] = "guidance_scale"


class Chroma(PipelineFamily):
    """Chroma, a Flux variant with T5 as its only text encoder and no guidance input."""

    pipeline: ClassVar[str] = "ChromaPipeline"
    model: ClassVar[str] = "ChromaTransformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK
    encoded: ClassVar[tuple[str, ...]] = (
        "prompt_embeds",
        "text_ids",
        "prompt_attention_mask",
        "negative_prompt_embeds",
        "negative_text_ids",
        "negative_prompt_attention_mask",
    )
    packing: ClassVar[Packing] = Tokens(2)

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the pipeline to predict, and pass the attention mask to checkpointed blocks."""
        _pass_mask_on(getattr(model, "module", model))
        return super().predict(model, noisy, timesteps, conditioning)


def _pass_mask_on(module: Any) -> None:
    # diffusers 0.42 calls checkpointed single blocks without the attention mask.
    if hasattr(module, "passes_mask_on"):
        return
    known: dict[str, Any] = {}

    def remember(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        known["attention_mask"] = kwargs.get("attention_mask")

    def give(_block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, **known}) if len(args) == _MASKLESS else None

    module.register_forward_pre_hook(remember, with_kwargs=True)
    for block in module.single_transformer_blocks:
        block.register_forward_pre_hook(give, with_kwargs=True)
    module.passes_mask_on = True


class AuraFlow(PipelineFamily):
    """AuraFlow; its pipeline supports one time step per call, so it is called once per sample."""

    pipeline: ClassVar[str] = "AuraFlowPipeline"
    model: ClassVar[str] = "AuraFlowTransformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK
    one_by_one: ClassVar[bool] = True


class PixArtAlpha(PipelineFamily):
    """PixArt-alpha, whose model predicts noise and a variance; the variance is not trained."""

    pipeline: ClassVar[str] = "PixArtAlphaPipeline"
    text_tensors: ClassVar[tuple[str, ...]] = _WITH_MASK
    flow_matching: ClassVar[bool] = False
    arguments: ClassVar[Mapping[str, Any]] = {**_UNBINNED, "clean_caption": False}


class PixArtSigma(PixArtAlpha):
    """PixArt-Sigma, which supports longer texts than PixArt-alpha."""

    pipeline: ClassVar[str] = "PixArtSigmaPipeline"
    model: ClassVar[str] = "PixArtTransformer2DModel"


class Krea2(PipelineFamily):
    """Krea 2, whose embeddings contain hidden states from several encoder layers for each token.

    To disable guidance, pass ``guidance_scale=0`` to diffusers' pipeline, but ``guidance_scale=1``
    to ``sample``.
    """

    pipeline: ClassVar[str] = "Krea2Pipeline"
    model: ClassVar[str] = "Krea2Transformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "prompt_embeds_mask")
    packing: ClassVar[Packing] = Tokens(2)
    unguided: ClassVar[float] = 0.0

    def example_text(self, name: str, config: Any, batch: int) -> Tensor:
        """Return an example text tensor; embeddings are (b, tokens, layers, width)."""
        if name.endswith("mask"):
            return super().example_text(name, config, batch)
        shape = (batch, self.tokens(), config.num_text_layers, config.text_hidden_dim)
        return torch.empty(shape, device="meta")


@attrs.frozen
class _Patches:
    """HiDream's packing of predictions in training: (b, c, patches, patch²), maybe padded."""

    def pack(self, latents: Tensor) -> Tensor:
        """Return the latents unchanged."""
        return latents

    def unpack(self, prediction: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convert patches to latents; outside training, predictions already are latents."""
        if tuple(prediction.shape) == shape:
            return prediction
        count, channels, height, width = shape
        side = math.isqrt(prediction.shape[-1])
        rows, columns = height // side, width // side
        grid = prediction[:, :, : rows * columns].reshape(
            count, channels, rows, columns, side, side
        )
        return grid.permute(0, 1, 2, 4, 3, 5).reshape(shape)


class HiDream(PipelineFamily):
    """HiDream-I1, a mixture of experts conditioned on CLIP, T5 and every layer of LLaMA.

    In caches and batches, LLaMA's embeddings are (b, layers, tokens, width); the pipeline expects
    (layers, b, tokens, width).
    """

    pipeline: ClassVar[str] = "HiDreamImagePipeline"
    model: ClassVar[str] = "HiDreamImageTransformer2DModel"
    text_tensors: ClassVar[tuple[str, ...]] = (
        "prompt_embeds_t5",
        "prompt_embeds_llama3",
        "pooled_prompt_embeds",
    )
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out")
    encoded: ClassVar[tuple[str, ...]] = (
        "prompt_embeds_t5",
        "negative_prompt_embeds_t5",
        "prompt_embeds_llama3",
        "negative_prompt_embeds_llama3",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    )
    packing: ClassVar[Packing] = _Patches()

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Keep the pipeline from resizing images to its ``default_sample_size``."""
        side = math.sqrt(call_kwargs["height"] * call_kwargs["width"]) / pipe.vae_scale_factor
        pipe.default_sample_size = side * _ROUNDED_UP

    def encode_with(
        self,
        pipeline: Any,
        device: torch.device,
        prompts: Mapping[str, Any],
        prefix: str = "",
    ) -> dict[str, Tensor]:
        """Encode texts and return all tensors, including LLaMA's, batch first."""
        found = super().encode_with(pipeline, device, prompts, prefix)
        return found | {"prompt_embeds_llama3": found["prompt_embeds_llama3"].transpose(0, 1)}

    def text_kwargs(
        self, texts: Mapping[str, Tensor], device: torch.device, prefix: str = ""
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for texts, with LLaMA's layers as the first dimension."""
        layers = {"prompt_embeds_llama3": texts["prompt_embeds_llama3"].transpose(0, 1)}
        return super().text_kwargs({**texts, **layers}, device, prefix)

    def example_text(self, name: str, config: Any, batch: int) -> Tensor:
        """Return an example text tensor of CLIP, T5 or LLaMA."""
        if name == "pooled_prompt_embeds":
            return torch.empty(batch, config.text_emb_dim, device="meta")
        t5, llama = config.caption_channels
        if name == "prompt_embeds_t5":
            return torch.empty(batch, self.tokens(), t5, device="meta")
        layers = max(config.llama_layers) + 1
        return torch.empty(batch, layers, self.tokens(), llama, device="meta")


class FluxKontext(Flux):
    """Flux.1 Kontext, which edits the images in a batch's ``reference_latents``."""

    pipeline: ClassVar[str] = "FluxKontextPipeline"
    reference: ClassVar[str | None] = "image"
    arguments: ClassVar[Mapping[str, Any]] = {"_auto_resize": False}

    def sized(self, size: Mapping[str, int]) -> dict[str, int]:
        """Return the pipeline's arguments for a size; ``max_area`` prevents resizing."""
        return {**size, "max_area": size["height"] * size["width"]}


@attrs.frozen(kw_only=True, eq=False)
class QwenImageEdit(ReadingFamily, QwenImage):
    """Qwen-Image-Edit; Qwen2.5-VL encodes each text together with the reference image.

    Each embedding, including cached ones, belongs to one text-image pair.
    """

    pipeline: ClassVar[str] = "QwenImageEditPipeline"
    reference: ClassVar[str | None] = "image"

    reference_area: int = attrs.field(default=1024 * 1024, validator=validated(whole))
    """Area in pixels to which reference images are resized. A smaller area saves tokens. Without
    zerotune, however, diffusers' pipeline always uses the default area."""

    @property
    def read_area(self) -> int:
        """Return the area in pixels to which images are resized for Qwen2.5-VL."""
        return self.reference_area

    def at_shown_size(self, images: Tensor) -> Tensor:
        """Resize reference images to ``reference_area`` as the pipeline does."""
        pipeline = self._needed("references").pipeline
        (width, height), pictures = self._resized(pipeline, images, self.reference_area)
        return cast("Tensor", pipeline.image_processor.preprocess(pictures, height, width))

    def read(
        self, parts: FrozenParts, caption: str, pictures: list[Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode a caption and its images with the pipeline's ``encode_prompt``."""
        return self.encode_with(parts.pipeline, device, {"prompt": [caption], "image": pictures})

    def pictures_of(self, parts: FrozenParts, images: Tensor) -> list[list[Any]]:
        """Resize each sample's images for Qwen2.5-VL, and return them as PIL images."""
        samples = images if images.ndim == 5 else images.unsqueeze(1)
        return [self._resized(parts.pipeline, each, self.read_area)[1] for each in samples]

    def _resized(
        self, pipeline: Any, images: Tensor, area: int
    ) -> tuple[tuple[int, int], list[Any]]:
        height, width = images.shape[-2:]
        module = sys.modules[self.known_blueprint().kind.__module__]
        size = module.calculate_dimensions(area, width / height)[:2]
        pictures = pipeline.image_processor.numpy_to_pil(
            pipeline.image_processor.pt_to_numpy(images.float() / 2 + 0.5)
        )
        resize = pipeline.image_processor.resize
        return size, [resize(picture, size[1], size[0]) for picture in pictures]

    def embedding_settings(self) -> dict[str, Any]:
        """Return the base settings plus ``read_area``, which affects the embeddings."""
        return {**super().embedding_settings(), "read_area": self.read_area}

    def latent_settings(self) -> CacheSettings:
        """Return the base settings plus ``reference_area``, which affects cached latents."""
        usual = super().latent_settings()
        own = {**usual.settings, "reference_area": self.reference_area}
        return attrs.evolve(usual, settings=own)

    def reference_input(self, latents: Tensor) -> _Picture | list[_Picture]:
        """Wrap latents so that the pipeline accepts them in place of one or several PIL images."""
        found = _pictures(latents, self.latent_space().scale)
        return found if self.several_references else found[0]

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Make the pipeline accept reference latents, and pass their sizes to the model."""
        given = call_kwargs["image"]
        pictures = _Pictures(given if self.several_references else [given])
        pipe.image_processor = pictures
        pipe.transformer.register_forward_pre_hook(pictures.put_in_place, with_kwargs=True)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit 2509 and later, with one or several reference images per sample.

    Qwen2.5-VL receives smaller images than in Qwen-Image-Edit. Training and sampling process one
    sample at a time, because the pipeline supports only one sample per call.
    """

    pipeline: ClassVar[str] = "QwenImageEditPlusPipeline"
    several_references: ClassVar[bool] = True
    one_by_one: ClassVar[bool] = True

    @property
    def read_area(self) -> int:
        """Return the area in pixels to which the pipeline resizes images for Qwen2.5-VL."""
        return int(sys.modules[self.known_blueprint().kind.__module__].CONDITION_IMAGE_SIZE)

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Sample images (n, 3, height, width), one prompt at a time."""
        images, drawn = self.drawn_references(drawing), []
        for prompt, seed, image in zip(drawing.prompts, drawing.seeds, images, strict=True):
            single = attrs.evolve(
                drawing, prompts=(prompt,), seeds=(seed,), references=image.unsqueeze(0)
            )
            drawn.append(super().draw(model, single))
        return torch.cat(drawn)


DECLARED = (
    StableDiffusion,
    StableDiffusionXL,
    StableDiffusion3,
    Flux,
    QwenImage,
    QwenImageEdit,
    QwenImageEditPlus,
    ZImage,
    Flux2,
    Flux2Klein,
    Wan,
    Sana,
    Lumina2,
    LTXVideo,
    HunyuanVideo,
    Chroma,
    AuraFlow,
    PixArtAlpha,
    PixArtSigma,
    Krea2,
    HiDream,
    FluxKontext,
)
"""Families that ``load_pretrained`` selects by pipeline class."""

BY_MODEL: Mapping[str, type[PipelineFamily]] = {
    family.model: family for family in DECLARED if "model" in vars(family)
}
"""Families with their own ``model`` class, keyed by the name of that class."""


def family_of_model(model: Any) -> type[PipelineFamily] | None:
    """Return the family for a model's class; ``None`` if the class is unknown."""
    if getattr(model, "use_additional_conditions", False) is True:
        return PixArtAlpha  # Only its pipeline passes sizes to PixArt's model.
    return BY_MODEL.get(type(model).__name__)
