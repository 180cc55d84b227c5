"""Train a ControlNet for SDXL, SD3, FLUX.1 or Qwen-Image on images and condition images.

    torchrun examples/recipes/controlnet.py --base SDXL --data photos --output runs/edges

photos contains, for each image cat.png, the caption cat.txt and the condition cat.reference.png,
such as the image's edges. With --conditions, condition images are in a separate folder, under the
names of the images. To resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import attrs
import diffusers
import torch
from torch import Tensor

from zerotune import DeepSpeedPlan, EMAShadow, Trainer, latest_checkpoint
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.diffusion.data.cache import CacheSettings
from zerotune.diffusion.data.preparation import REFERENCE_IMAGES
from zerotune.diffusion.models.declared import Flux, QwenImage
from zerotune.diffusion.models.family import Conditioning, Denoiser, Drawing, config_of
from zerotune.diffusion.models.pipeline import (
    Blueprint,
    Described,
    FrozenParts,
    PipelineModel,
    call_cast,
    pipeline_class,
)
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.models.pipeline_inputs import REFERENCES
from zerotune.diffusion.models.stable_diffusion import StableDiffusion3, StableDiffusionXL
from zerotune.diffusion.pretrained import Pretrained
from zerotune.errors import DataError, InvalidValueError
from zerotune.training import SaveEvery, ValidationImages


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", micro_batch_size=options.batch, lr=options.lr
    )
    model, loaded = controlled(options.base, base_dtype=options.base_dtype)
    family = loaded.family
    images = PreparedImages(
        ImageFolder(options.data, reference_folder=options.conditions),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        # Conditions are cropped and mirrored like their images.
        augmentation=Augmentation(flip=0.5, caption_dropout=0.1),
    )
    data = encode_dataset(images, family=family, folder=options.output / "cache")
    shown = images[0]
    drawing = ValidationImages(
        every=options.every,
        prompts=[shown["captions"]],
        references=shown["reference_images"][None],
        size=tuple(shown["reference_images"].shape[-2:]),
        steps=options.draw_steps,
        folder=options.output / "validation",
    )
    saving = SaveEvery(steps=options.every, root=options.output / "checkpoints", keep=2)
    with Trainer(
        model=model,
        plan=plan,
        data=data,
        objective=loaded.objective(),
        ema=EMAShadow(decay=0.999),
        callbacks=[saving, drawing],
    ) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints"):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "controlnet")
    return list(report.losses)


def controlled(
    folder: str, *, base_dtype: str = "bf16", frozen_dtype: str = "bf16", controlnet: Any = None
) -> tuple[torch.nn.Module, Pretrained]:
    """Freeze a pipeline's model; return a ControlNet for it, and the pipeline with its family.

    Args:
        folder: Folder or hub id of the base model's pipeline.
        base_dtype: Dtype of the base model; a new ControlNet copies weights of this dtype.
        frozen_dtype: Dtype of the VAE and the text encoders.
        controlnet: A ControlNet to train on; by default a copy of the base's first blocks, which
            initially has no effect.
    """
    loaded = load_pretrained(folder, dtype=base_dtype, frozen_dtype=frozen_dtype)
    own, parts = type(loaded.family), getattr(loaded.family, "parts", None)
    kind = next((each for each in CONTROLNETS if own in each.__bases__), None)
    if kind is None or parts is None:
        raise InvalidValueError("has no declared ControlNet", key="base", value=own.__name__)
    base = loaded.model.requires_grad_(False).eval()
    if controlnet is None:
        # Weights that are not copied are random: the same on every rank and in every run.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = getattr(diffusers, kind.controlnet)
            controlnet = kind.new_controlnet(made, base, scale=parts.scale)
    blueprint = Blueprint.read(loaded.folder, pipeline_class(kind.pipeline))
    stand_in = PipelineModel(config=controlnet.config)
    pipeline = blueprint.around(**{**parts.pipeline.components, kind.component: stand_in})
    family = kind(parts=FrozenParts(pipeline), blueprint=blueprint, base=base)
    return controlnet.float().train(), attrs.evolve(loaded, family=family)


_SHADES: Final = 255
_WIDTHS: Final = (16, 32, 96, 256)
"""Channels of the condition's embedding by stage; each stage halves the image's sides."""


class _ControlModel(PipelineModel):
    """Replaces the ControlNet in a pipeline, reports its class, and calls the engine."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the ControlNet, which pipelines check."""
        model = self.__dict__.get("_model")
        module = getattr(model, "module", model)
        return type(self) if module is None else type(getattr(module, "primary", module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine's output unchanged."""
        return call_cast(self.__dict__["_model"], args, kwargs)


class _EncodedCondition(Described):
    """A stand-in for a VAE, which returns condition latents that are already encoded.

    Args:
        vae: VAE of the pipeline, which defines sizes.
        latents: Condition latents (b, c, h, w).
    """

    def __init__(self, vae: Any, latents: Tensor) -> None:
        super().__init__(vae)
        self._latents = latents

    @property
    def config(self) -> Any:
        """Configuration of the VAE with neutral scaling, shift, means and deviations."""
        usual: Any = self._module.config
        neutral: dict[str, Any] = {"scaling_factor": 1.0, "shift_factor": 0.0}
        for name, value in (("latents_mean", 0.0), ("latents_std", 1.0)):
            if usual.get(name) is not None:
                neutral[name] = [value] * len(usual[name])
        return type(usual)({**usual, **neutral})

    @property
    def latent_dist(self) -> _EncodedCondition:
        """Stand-in for the distribution of latents, which is this object."""
        return self

    def encode(self, images: Tensor) -> _EncodedCondition:
        """Return the condition latents, repeated if guidance doubles the images."""
        latents = self._latents.repeat(len(images) // len(self._latents), 1, 1, 1)
        single = images.ndim == 5
        return _EncodedCondition(self._module, latents.unsqueeze(2) if single else latents)

    def sample(self, _generator: Any = None) -> Tensor:
        """Return the condition latents."""
        return self._latents


@attrs.frozen(kw_only=True, eq=False)
class ControlNetFamily(PipelineFamily):
    """Mixin for families that train a ControlNet for a frozen base model.

    The condition images come from a batch's ``reference_images`` or cached ``reference_latents``.
    """

    component: ClassVar[str] = "controlnet"
    base_component: ClassVar[str] = "transformer"
    """Name of the base model in the pipeline."""
    reference: ClassVar[str | None] = "control_image"
    by_class: ClassVar[bool] = False
    controlnet: ClassVar[str]
    """Class name of the ControlNet in diffusers."""

    base: Any = None
    """The frozen base model."""

    @classmethod
    def new_controlnet(
        cls,
        kind: Any,
        base: Any,
        *,
        scale: int,  # noqa: ARG003 - of those that see pixels
    ) -> torch.nn.Module:
        """Create a ControlNet that copies a base model's weights and initially has no effect.

        Args:
            kind: Class of the ControlNet.
            base: Base model with its weights loaded.
            scale: Number of image pixels per latent pixel along one side.
        """
        # A copy of the configuration, because SD3's constructor changes it.
        source: Any = Described(base)
        source.config = type(base.config)(base.config)
        return cast("torch.nn.Module", kind.from_transformer(source, **cls._options(base.config)))

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of a new ControlNet that its constructor does not read from the base."""
        heads = ("attention_head_dim", "num_attention_heads")
        return {name: config[name] for name in heads}

    def _around(self, blueprint: Blueprint, model: Denoiser, scheduler: Any, **others: Any) -> Any:
        base = self._base_beside(model)
        models = {
            self.component: _ControlModel(config=config_of(model), model=model),
            self.base_component: PipelineModel(config=base.config, model=base),
        }
        return blueprint.around(**models, scheduler=scheduler, **others)

    def _base_beside(self, model: Denoiser) -> Any:
        if self.base is None:
            raise DataError(
                f"{type(self).__name__} has no base model",
                key="base",
                value=None,
                fix="use controlled(...)",
            )
        if self.base.device.type != "meta" and self.base.device != model.device:
            self.base.to(model.device)
        return self.base

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Make the pipeline use condition latents instead of encoding an image."""
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
    """A ControlNet for Stable Diffusion XL; it receives the condition image as pixels."""

    pipeline: ClassVar[str] = "StableDiffusionXLControlNetPipeline"
    controlnet: ClassVar[str] = "ControlNetModel"
    base_component: ClassVar[str] = "unet"
    reference: ClassVar[str | None] = "image"

    @classmethod
    def new_controlnet(cls, kind: Any, base: Any, *, scale: int) -> torch.nn.Module:
        """Create a ControlNet from the U-Net's encoder, and add an embedding for pixels."""
        widths = _WIDTHS[: scale.bit_length()]
        made = kind.from_unet(base, conditioning_embedding_out_channels=widths)
        return cast("torch.nn.Module", made)

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass each sample's sizes to the ControlNet and U-Net; condition pixels are unchanged."""
        StableDiffusionXL.adjust(self, pipe, call_kwargs)

    def encode_references(
        self,
        images: Tensor,
        *,
        device: torch.device | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return condition images to cache: ``{"images": …}`` with uint8 values from 0 to 255."""
        return {"images": _shades(images).to(torch.uint8)}

    def latent_settings(self) -> CacheSettings:
        """Return the base settings plus ``references``, which records that caches store pixels."""
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
        """Return example latents and conditioning, including the pixels of condition images."""
        latents, known = super().example(model, batch=batch, side=side, frames=frames)
        height, width = (each * self.latent_space().scale for each in latents.shape[-2:])
        pixels = torch.empty(batch, 3, height, width, device="meta")
        return latents, {**known, REFERENCES: pixels}


def _shades(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as their original integers from 0 to 255, in fp32."""
    return ((images.float() + 1) * (_SHADES / 2)).round()


class StableDiffusion3ControlNet(ControlNetFamily, StableDiffusion3):
    """A ControlNet for Stable Diffusion 3 and 3.5; it receives condition latents as patches.

    A new ControlNet receives the pooled text embedding, as in diffusers' training script
    (``force_zeros_for_pooled_projection=False``). An InstantX ControlNet keeps
    ``force_zeros_for_pooled_projection=True``.
    """

    pipeline: ClassVar[str] = "StableDiffusion3ControlNetPipeline"
    controlnet: ClassVar[str] = "SD3ControlNetModel"

    @classmethod
    def new_controlnet(cls, kind: Any, base: Any, *, scale: int) -> torch.nn.Module:
        """Create a ControlNet from the first twelve blocks of the base model."""
        made: Any = super().new_controlnet(kind, base, scale=scale)
        made.register_to_config(force_zeros_for_pooled_projection=False)
        return cast("torch.nn.Module", made)

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The base's last block has no text output, but all blocks of a ControlNet do.
        layers = min(12, config["num_layers"] - 1)
        return {"num_layers": layers, "num_extra_conditioning_channels": 0}

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Remove the VAE's shift from condition latents for a ControlNet trained without it."""
        config = pipe.controlnet.config
        if config.force_zeros_for_pooled_projection:
            vae = pipe.vae.config
            shifted = call_kwargs[str(self.reference)] + vae.shift_factor * vae.scaling_factor
            call_kwargs[str(self.reference)] = shifted
        super().adjust(pipe, call_kwargs)


class FluxControlNet(ControlNetFamily, Flux):
    """A ControlNet for Flux.1; a new one copies the base model's first four double blocks."""

    pipeline: ClassVar[str] = "FluxControlNetPipeline"
    controlnet: ClassVar[str] = "FluxControlNetModel"

    @classmethod
    def _options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = {"num_layers": min(4, config["num_layers"]), "num_single_layers": 0}
        return super()._options(config) | layers


class QwenImageControlNet(ControlNetFamily, QwenImage):
    """A ControlNet for Qwen-Image; a new one copies the base model's first five blocks."""

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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ControlNet.")
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--base-dtype", default="bf16", help="dtype of the base model's files")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--conditions", type=Path, help="folder of condition images")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=5000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=4, help="micro batch size per GPU")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
