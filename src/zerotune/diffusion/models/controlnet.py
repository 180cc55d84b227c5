"""ControlNets: a trained copy of a model's first half steers the frozen model by an image.

Only the ControlNet is trained; the diffusers pipeline calls it before its base model. Condition
images are the dataset's references: they are stored beside their images and cropped alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import attrs
import torch
from torch import Tensor

from zerotune.backend.upstream import unpartitioned
from zerotune.diffusion.data.cache import CacheSettings
from zerotune.diffusion.data.preparation import REFERENCE_IMAGES
from zerotune.diffusion.models.declared import (
    Flux,
    QwenImage,
    StableDiffusion3,
    StableDiffusionXL,
)
from zerotune.diffusion.models.family import Conditioning, Denoiser, Drawing, config_of
from zerotune.diffusion.models.pipeline import Blueprint, Described, PipelineModel, call_cast
from zerotune.diffusion.models.pipeline_family import REFERENCES, PipelineFamily
from zerotune.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self

_SHADES: Final = 255
_WIDTHS: Final = (16, 32, 96, 256)
"""Channels of the condition's embedding, each stage half as many as the one before."""


class _ControlModel(PipelineModel):
    """Looks like a ControlNet to a pipeline, which asks for its class, and calls the engine."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the ControlNet."""
        model = self.__dict__.get("_model")
        module = getattr(model, "module", model)
        return type(self) if module is None else type(getattr(module, "primary", module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the ControlNet adds to its base, as it is."""
        return call_cast(self.__dict__["_model"], args, kwargs)


class _EncodedCondition(Described):
    """A VAE that has encoded already: what it gives is what the model is to be shown.

    Args:
        vae: The pipeline's, for its sizes.
        latents: (b, c, h, w).
    """

    def __init__(self, vae: Any, latents: Tensor) -> None:
        super().__init__(vae)
        self._latents = latents

    @property
    def config(self) -> Any:
        """With statistics that change nothing."""
        usual: Any = self._module.config
        neutral: dict[str, Any] = {"scaling_factor": 1.0, "shift_factor": 0.0}
        for name, value in (("latents_mean", 0.0), ("latents_std", 1.0)):
            if usual.get(name) is not None:
                neutral[name] = [value] * len(usual[name])
        return type(usual)({**usual, **neutral})

    @property
    def latent_dist(self) -> _EncodedCondition:
        """As what a VAE returns."""
        return self

    def encode(self, images: Tensor) -> _EncodedCondition:
        """The latents, as often as there are images: guidance doubles them."""
        latents = self._latents.repeat(len(images) // len(self._latents), 1, 1, 1)
        single = images.ndim == 5
        return _EncodedCondition(self._module, latents.unsqueeze(2) if single else latents)

    def sample(self, _generator: Any = None) -> Tensor:
        """The latents."""
        return self._latents


@attrs.frozen(kw_only=True, eq=False)
class ControlNetFamily(PipelineFamily):
    """Mixin for a ControlNet with the model that it steers. Add it to the family of that model.

    Condition images are ``reference_images`` of a batch, or cached ``reference_latents``.
    """

    component: ClassVar[str] = "controlnet"
    base_component: ClassVar[str | None] = "transformer"
    reference: ClassVar[str | None] = "control_image"
    by_class: ClassVar[bool] = False
    controlnet: ClassVar[str]
    """Class of the ControlNet in diffusers."""

    base: Any = None
    """The frozen model to steer."""

    @classmethod
    def new_controlnet(
        cls,
        kind: Any,
        base: Any,
        *,
        scale: int,  # noqa: ARG003 - of those that see pixels
    ) -> torch.nn.Module:
        """Create a ControlNet from a base model's weights, initially without effect.

        Args:
            kind: Class of the ControlNet.
            base: The complete base model.
            scale: Pixels per latent pixel.
        """
        # A copy of the configuration: SD3's constructor writes into it.
        source: Any = Described(base)
        source.config = type(base.config)(base.config)
        return cast("torch.nn.Module", kind.from_transformer(source, **cls._options(base.config)))

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a new ControlNet that its constructor does not read from the base."""
        heads = ("attention_head_dim", "num_attention_heads")
        return {name: config[name] for name in heads}

    def without_data(self) -> Self:
        """Return this family with a base model without weights."""
        with unpartitioned(), torch.device("meta"):
            return attrs.evolve(self, base=type(self.base).from_config(self.base.config))

    def _around(self, blueprint: Blueprint, model: Denoiser, scheduler: Any, **others: Any) -> Any:
        base = self._base_beside(model)
        models = {
            self.component: _ControlModel(config=config_of(model), model=model),
            str(self.base_component): PipelineModel(config=base.config, model=base),
        }
        return blueprint.around(**models, scheduler=scheduler, **others)

    def _base_beside(self, model: Denoiser) -> Any:
        if self.base is None:
            raise DataError(
                f"{type(self).__name__} has no base model",
                key="base",
                value=None,
                fix='load it: load_pretrained(folder, family="controlnet")',
            )
        if self.base.device.type != "meta" and self.base.device != model.device:
            self.base.to(model.device)
        return self.base

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Make the pipeline accept condition latents instead of encoding an image."""
        super().adjust(pipe, call_kwargs)
        latents = call_kwargs[str(self.reference)]
        scale = self.latent_space().scale
        sides = (latents.shape[-2] * scale, latents.shape[-1] * scale)
        call_kwargs[str(self.reference)] = latents.new_zeros(1).expand(len(latents), 3, *sides)
        pipe.vae = _EncodedCondition(pipe.vae, latents)

        def prepare_image(image: Tensor, **options: Any) -> Tensor:
            guided = options.get("do_classifier_free_guidance", False)
            return torch.cat([image] * 2) if guided else image

        pipe.prepare_image = prepare_image


class StableDiffusionXLControlNet(ControlNetFamily, StableDiffusionXL):
    """A ControlNet for Stable Diffusion XL, which receives the condition as pixels."""

    pipeline: ClassVar[str] = "StableDiffusionXLControlNetPipeline"
    controlnet: ClassVar[str] = "ControlNetModel"
    base_component: ClassVar[str | None] = "unet"
    reference: ClassVar[str | None] = "image"

    @classmethod
    def new_controlnet(cls, kind: Any, base: Any, *, scale: int) -> torch.nn.Module:
        """Create a ControlNet from the U-Net's encoder; it reduces the condition to latent size."""
        widths = _WIDTHS[: scale.bit_length()]
        made = kind.from_unet(base, conditioning_embedding_out_channels=widths)
        return cast("torch.nn.Module", made)

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass each sample's own sizes to both models; pixels are passed unchanged."""
        StableDiffusionXL.adjust(self, pipe, call_kwargs)

    def encode_references(
        self,
        images: Tensor,
        *,
        device: torch.device | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return ``{"images": …}``: values from 0 to 255, for a cache."""
        return {"images": _shades(images).to(torch.uint8)}

    def latent_settings(self) -> CacheSettings:
        """Return settings that cache conditions as pixels."""
        usual = super().latent_settings()
        return attrs.evolve(usual, settings={**usual.settings, "references": "pixels"})

    def _references(self, batch: Mapping[str, Tensor]) -> Tensor:
        if REFERENCE_IMAGES not in batch:
            raise self.no_references(f"batch[{REFERENCE_IMAGES!r}]")
        images = self.one_of_each(batch[REFERENCE_IMAGES])
        shades = images.float() if images.dtype == torch.uint8 else _shades(images)
        return shades / _SHADES

    def _drawn_references(self, drawing: Drawing, device: torch.device) -> Tensor:
        return (_shades(self.drawn_references(drawing)) / _SHADES).to(device)

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Return example arguments with condition pixels."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        height, width = (each * self.latent_space().scale for each in latents.shape[-2:])
        pixels = torch.empty(batch, 3, height, width, device="meta")
        return latents, {**known, REFERENCES: pixels}


def _shades(images: Tensor) -> Tensor:
    """Images in [-1, 1] as the whole numbers they were read from: 0 to 255, fp32."""
    return ((images.float() + 1) * (_SHADES / 2)).round()


class StableDiffusion3ControlNet(ControlNetFamily, StableDiffusion3):
    """A ControlNet for Stable Diffusion 3 and 3.5, which receives condition latents as patches.

    A new one receives the pooled text as in diffusers' training script, and so does its pipeline
    (``force_zeros_for_pooled_projection`` is off); InstantX's are loaded unchanged.
    """

    pipeline: ClassVar[str] = "StableDiffusion3ControlNetPipeline"
    controlnet: ClassVar[str] = "SD3ControlNetModel"

    @classmethod
    def new_controlnet(cls, kind: Any, base: Any, *, scale: int) -> torch.nn.Module:
        """Create a ControlNet from the first twelve blocks."""
        made: Any = super().new_controlnet(kind, base, scale=scale)
        made.register_to_config(force_zeros_for_pooled_projection=False)
        return cast("torch.nn.Module", made)

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The last block keeps no texts, and those of a ControlNet all do.
        layers = min(12, config["num_layers"] - 1)
        return {"num_layers": layers, "num_extra_conditioning_channels": 0}

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Omit the VAE's shift if the ControlNet was trained without it."""
        config = pipe.controlnet.config
        if config.force_zeros_for_pooled_projection:
            vae = pipe.vae.config
            shifted = call_kwargs[str(self.reference)] + vae.shift_factor * vae.scaling_factor
            call_kwargs[str(self.reference)] = shifted
        super().adjust(pipe, call_kwargs)


class FluxControlNet(ControlNetFamily, Flux):
    """A ControlNet for Flux.1; a new one has its first four double blocks and no single blocks."""

    pipeline: ClassVar[str] = "FluxControlNetPipeline"
    controlnet: ClassVar[str] = "FluxControlNetModel"

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = {"num_layers": min(4, config["num_layers"]), "num_single_layers": 0}
        return super()._options(config) | layers


class QwenImageControlNet(ControlNetFamily, QwenImage):
    """A ControlNet for Qwen-Image; a new one has its first five blocks."""

    pipeline: ClassVar[str] = "QwenImageControlNetPipeline"
    controlnet: ClassVar[str] = "QwenImageControlNetModel"

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super()._options(config) | {"num_layers": min(5, config["num_layers"])}


CONTROLNETS: Final[tuple[type[ControlNetFamily], ...]] = (
    StableDiffusionXLControlNet,
    StableDiffusion3ControlNet,
    FluxControlNet,
    QwenImageControlNet,
)
"""All families of ControlNets."""


def controlnet_of(family: type[PipelineFamily]) -> type[ControlNetFamily] | None:
    """Return the ControlNet family for models of a family, or ``None``."""
    return next((each for each in CONTROLNETS if family in each.__bases__), None)
