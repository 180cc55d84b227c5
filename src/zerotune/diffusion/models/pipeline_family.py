"""Text-to-image families that call their diffusers pipeline for training and sampling.

Training runs the pipeline's ``__call__`` for one step with gradients. The engine replaces the
pipeline's model; a scheduler with one time step per sample replaces the original scheduler. The
pipeline passes the prediction, with its autograd graph, to ``scheduler.step``. Diffusers' code
therefore handles time scaling, signs, position ids, masks, guidance and reference images.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.models.family import (
    Conditioning,
    Denoiser,
    Drawing,
    config_of,
    parameters_of,
)
from zerotune.diffusion.models.latents import LatentSpace, Packing, Tokens, Unpacked, UsualSpace
from zerotune.diffusion.models.one_step import LastStep, OneStep, Predicted
from zerotune.diffusion.models.pipeline import (
    Blueprint,
    FrozenParts,
    PipelineModel,
    pipeline_class,
    pipeline_name,
)
from zerotune.diffusion.models.pipeline_inputs import (
    NEGATIVE,
    REFERENCES,
    PipelineInputs,
    of_each,
)
from zerotune.diffusion.noise_schedule import drawing_scheduler
from zerotune.errors import DataError, InvalidValueError

_TEXT_WIDTHS: Final = (
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "caption_channels",
    "cap_feat_dim",
    "cross_attention_dim",
)
"""Keys under which configurations of diffusers models store the text width."""


@attrs.frozen(kw_only=True, eq=False)
class PipelineFamily(PipelineInputs):
    """A latent text-to-image or text-to-video family, defined by its diffusers pipeline.

    A subclass declares how its pipeline differs from the defaults. The pipeline must accept
    ``latents`` and ``prompt_embeds`` and pass its model's prediction to its scheduler; if it does
    not, the subclass overrides ``embed``, which encodes texts, and ``predict``, which calls the
    model. ``load_pretrained`` tests the family on the ``meta`` device; if the test fails, the error
    gives the reason.
    """

    pipeline: ClassVar[Any]
    """Pipeline class for loading and sampling: the name of a diffusers class, or a custom class."""
    component: ClassVar[str] = "transformer"
    """Name of the trained model in the pipeline."""
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    """Modules that get adapters by default, as in diffusers' training scripts."""
    flow_matching: ClassVar[bool] = True
    """Whether these models use flow matching; if not, they are denoising diffusion models."""
    usual_scale: ClassVar[int] = 8
    """Number of image pixels per latent pixel along one side, used if no VAE is available."""
    usual_frames: ClassVar[int] = 1
    """Number of frames per latent frame, used if no VAE is available."""
    packing: ClassVar[Packing] = Unpacked()
    """Conversion between latents and the pipeline's layout."""
    guided_by: ClassVar[str | None] = "guidance_scale"
    """Name of the pipeline's argument for classifier-free guidance; ``None`` if there is none."""
    unguided: ClassVar[float] = 1.0
    """Value of the ``guided_by`` argument that disables guidance."""
    embedded_guidance_arg: ClassVar[str | None] = None
    """Name of the argument for the guidance scale that a distilled model receives as an input."""
    by_class: ClassVar[bool] = False
    """Whether the family can be created without ``parts`` and ``blueprint``, from the pipeline's
    class alone."""
    model: ClassVar[str] = ""
    """Class name of the trained model in diffusers; ``model_facts`` needs it to find the family of
    a configuration."""
    text_width: ClassVar[str | None] = None
    """Configuration key of the text embedding dimension; set it only if the key is not in
    ``_TEXT_WIDTHS``."""
    one_by_one: ClassVar[bool] = False
    """Whether each sample needs its own pipeline call, because a call supports only one time
    step."""
    also_needed: ClassVar[tuple[str, ...]] = ()
    """Names of components that this family loads and most other families omit."""
    guidance: float = 1.0
    """Guidance scale that a distilled model receives in training."""
    blueprint: Blueprint | None = None
    """The pipeline without weights; by default created from the pipeline of ``parts``."""

    def known_blueprint(self) -> Blueprint:
        """Return the pipeline without weights.

        Raises:
            DataError: The family has neither ``parts`` nor ``blueprint``, and needs one of them.
        """
        if self.blueprint is not None:
            return self.blueprint
        if self.parts is not None:
            return Blueprint.of(self.parts.pipeline)
        if self.by_class:
            return Blueprint.usual(pipeline_class(self.pipeline))
        raise DataError(
            f"{type(self).__name__} has no pipeline",
            "use load_pretrained(folder).family; pass parts=False to load only the model",
            "blueprint",
            None,
        )

    def latent_space(self) -> LatentSpace | UsualSpace:
        """Return the latent space of the VAE, or the family's default if no VAE is available."""
        vae = self.known_blueprint().vae
        if vae is None:
            return UsualSpace(scale=self.usual_scale, frames=self.usual_frames)
        return LatentSpace(vae)

    def _around(self, blueprint: Blueprint, model: Denoiser, scheduler: Any, **others: Any) -> Any:
        stand_in = PipelineModel(config=config_of(model), model=model)
        return blueprint.around(**{self.component: stand_in, "scheduler": scheduler, **others})

    def objective_settings(self) -> dict[str, Any]:
        """Return the objective settings with which this family's models were trained."""
        return {}

    def text_kwargs(
        self, texts: Mapping[str, Tensor], device: torch.device, prefix: str = ""
    ) -> dict[str, Any]:
        """Return the pipeline's text arguments.

        Args:
            texts: Embeddings by their names in ``text_tensors``, batch first.
            device: Target device.
            prefix: ``"negative_"`` for negative prompts.
        """
        # fp32: pipelines keep latents, and time steps, in the precision of their texts.
        moved = {
            name: value.to(device, torch.float32 if value.is_floating_point() else value.dtype)
            for name, value in texts.items()
        }
        if self.listed:
            if "prompt_embeds_mask" not in moved:
                raise InvalidValueError(
                    "listed = True needs the mask, which says where each text ends",
                    'set text_tensors = ("prompt_embeds", "prompt_embeds_mask")',
                    f"{type(self).__name__}.text_tensors",
                    self.text_tensors,
                )
            rows = zip(moved["prompt_embeds"], moved["prompt_embeds_mask"].bool(), strict=True)
            return {f"{prefix}prompt_embeds": [row[mask] for row, mask in rows]}
        return {f"{prefix}{name}": value for name, value in moved.items()}

    def reference_input(self, latents: Tensor) -> Any:
        """Return the value for the pipeline's argument that is named in ``reference``.

        Args:
            latents: Reference latents (b, c, h, w), or (b, r, c, h, w) with ``several_references``.
        """
        return latents

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Adapt a new pipeline to the arguments with which it will be called.

        Args:
            pipe: Pipeline created for one call.
            call_kwargs: Keyword arguments of the call, such as ``height``; may be changed.
        """

    def sized(self, size: Mapping[str, int]) -> dict[str, int]:
        """Return the pipeline's arguments for an image or clip size.

        Args:
            size: ``height`` and ``width`` in pixels; for clips, also ``num_frames``.
        """
        return dict(size)

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Sample images (n, 3, height, width) or clips (n, 3, frames, height, width).

        Args:
            model: Model that predicts.
            drawing: Prompts, seeds and options.

        Raises:
            DataError: The family has no frozen parts.
        """
        parts = self._needed("prompts")
        scheduler = drawing_scheduler(
            drawing.scheduler or parts.pipeline.scheduler,
            None if drawing.scheduler else drawing.trained_with,
        )
        pipe = self.drawing_pipeline(parts, model, scheduler)
        size = self._drawn_size(pipe, drawing)
        with parts.calling(model):
            call_kwargs = {**self.drawing_arguments(drawing, device=model.device), **size}
        self.adjust(pipe, call_kwargs)
        last = LastStep()
        with parts.on(model.device, self.drawing_parts):
            output = pipe(
                **call_kwargs,
                num_inference_steps=drawing.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in drawing.seeds],
                output_type="latent",
                **last.listening(type(pipe).__call__),
            )
        ended = output[0] if last.latents is None else last.latents
        latents = self.drawn_latents(output, ended)
        with parts.on(model.device, ["vae"]):
            return parts.decode_latents(
                self.packing.unpack(latents, self._shape_of(latents, size, len(drawing.prompts)))
            )

    def drawn_latents(self, output: Any, last: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return the sampled latents.

        Args:
            output: Output of the pipeline's call.
            last: Latents after the pipeline's last denoising step.
        """
        return last

    @property
    def drawing_parts(self) -> tuple[str, ...]:
        """Return the names of the frozen parts that sampling steps use."""
        return ()

    def drawing_pipeline(self, parts: FrozenParts, model: Denoiser, scheduler: Any) -> Any:
        """Create the pipeline for sampling.

        Args:
            parts: VAE and text encoders.
            model: Model that predicts.
            scheduler: Scheduler for sampling.
        """
        return self._around(Blueprint.of(parts.pipeline), model, scheduler)

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """Return the pipeline's arguments for prompts, references and guidance.

        A guidance-distilled model receives the guidance scale as an input. With a negative prompt,
        this input is instead the value used in training, and the guidance scale of ``drawing``
        controls classifier-free guidance.

        Args:
            drawing: Prompts, seeds and options.
            device: Device of the model.
        """
        kwargs = {
            **self.arguments,
            **self.text_kwargs(self.drawn_texts(drawing.prompts, drawing, device=device), device),
        }
        if self.reference is not None and (self.needs_references or drawing.references is not None):
            kwargs[self.reference] = self.reference_input(self._drawn_references(drawing, device))
        scale = drawing.guidance_scale
        if self.embedded_guidance_arg is not None:
            kwargs[self.embedded_guidance_arg] = self.guidance if drawing.negative_prompt else scale
        if self.guided_by is None:
            return kwargs
        guided = scale != 1.0 and (
            self.embedded_guidance_arg is None or bool(drawing.negative_prompt)
        )
        kwargs[self.guided_by] = scale if guided else self.unguided
        if guided:
            texts = [drawing.negative_prompt] * len(drawing.prompts)
            negative = self.drawn_texts(texts, drawing, device=device, negative=True)
            kwargs |= self.text_kwargs(negative, device, prefix=NEGATIVE)
            if "negative_prompt" in parameters_of(self.known_blueprint().kind.__call__):
                kwargs["negative_prompt"] = None  # Sana's default is a text.
        return kwargs

    def drawn_texts(
        self,
        texts: Sequence[str],
        drawing: Drawing,  # noqa: ARG002
        *,
        device: torch.device,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """Return embeddings of prompts, or, with ``negative``, of negative prompts.

        Args:
            texts: Prompts or negative prompts.
            drawing: Prompts, seeds and options.
            device: Target device.
            negative: Whether ``texts`` are negative prompts.
        """
        encoded = self.remembered_negative if negative else self.remembered
        return encoded(texts, device=device)

    def drawn_references(self, drawing: Drawing) -> Tensor:
        """Return the reference images of ``drawing``.

        Raises:
            DataError: ``drawing`` has no reference images, or it has several per sample but the
                family supports only one.
        """
        if drawing.references is None:
            raise DataError(
                f"{type(self).__name__} needs reference images for sampling",
                "pass images (n, 3, height, width) in [-1, 1] as references=",
                "references",
                None,
            )
        return self.one_of_each(drawing.references)

    def _drawn_references(self, drawing: Drawing, device: torch.device) -> Tensor:
        parts, images = self._needed("references"), self.drawn_references(drawing)
        with parts.on(device, ["vae"]):
            return of_each(
                images, lambda each: parts.encode_images(self.at_shown_size(each)).to(device)
            )

    def _drawn_size(self, pipe: Any, drawing: Drawing) -> dict[str, int]:
        taken = parameters_of(type(pipe).__call__)
        config = getattr(pipe, self.component).config
        side = getattr(pipe, "default_sample_size", getattr(config, "sample_size", 0)) or 0
        sides = (side, side) if isinstance(side, int) else side
        scale = getattr(pipe, "vae_scale_factor", self.latent_space().scale)
        size = {
            name: int(taken[name].default or each * scale or 1024)
            for name, each in zip(("height", "width"), sides, strict=True)
        }
        if drawing.size is not None:
            size = {"height": drawing.size[0], "width": drawing.size[1]}
        if self.clips:
            size["num_frames"] = drawing.frames or int(taken["num_frames"].default)
        return self.sized(size)

    def _shape_of(self, latents: Tensor, size: Mapping[str, int], count: int) -> tuple[int, ...]:
        space = self.latent_space()
        frames = (space.latent_frames(size["num_frames"]),) if self.clips else ()
        sides = (*frames, size["height"] // space.scale, size["width"] // space.scale)
        channels = latents.numel() // (count * int(torch.Size(sides).numel()))
        return (count, channels, *sides)

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return the prediction that the pipeline's ``__call__`` passes to its scheduler.

        Raises:
            DataError: The pipeline's call ended without calling ``scheduler.step``, or the
                prediction and the latents differ in shape.
        """
        conditioning = self.with_texts(model, conditioning)
        if not self.calls_one_by_one():
            return self.in_one_call(model, noisy, timesteps[None], conditioning)
        singles = [
            self.in_one_call(
                model,
                noisy[index : index + 1],
                timesteps[index : index + 1],
                {name: value[index : index + 1] for name, value in conditioning.items()},
            )
            for index in range(len(noisy))
        ]
        return torch.cat(singles)

    def calls_one_by_one(self) -> bool:
        """Return whether each sample of a batch needs a separate pipeline call."""
        return self.one_by_one

    def in_one_call(
        self, model: Denoiser, noisy: Tensor, steps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return the prediction from one pipeline call.

        Args:
            model: Model that predicts.
            noisy: Noisy latents (b, c, [frames,] h, w), fp32.
            steps: Time steps (1, b), or (1,) if all samples have the same time step.
            conditioning: Keyword arguments of the pipeline, batch first.
        """
        blueprint = self.known_blueprint()
        scheduler = OneStep(blueprint.scheduler.config, steps.to(model.device))
        pipe = self.predicting_pipeline(model, scheduler)
        call_kwargs = self._call_kwargs(noisy, conditioning, model.device)
        self.adjust(pipe, call_kwargs)
        try:
            # The function that ``torch.no_grad`` wraps.
            call: Any = type(pipe).__call__
            inspect.unwrap(call)(pipe, **call_kwargs)
        except Predicted as found:
            prediction = found.prediction
            found.__traceback__ = None  # Its frames hold the graph.
        except UnboundLocalError as error:
            raise DataError(
                "the pipeline's denoising loop ran no step: it needs more time steps than the "
                f"single one of training ({error})",
                "override it in the family, and append a value to scheduler.timesteps "
                "(docs/families.md)",
                f"{type(self).__name__}.predicting_pipeline",
                pipeline_name(self.pipeline),
            ) from error
        else:
            raise DataError(
                "the pipeline's call ended without calling scheduler.step",
                "override predict in the family (docs/families.md)",
                type(self).__name__,
            )
        return self._as_latents(prediction, noisy)

    def _as_latents(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        wanted, found = tuple(noisy.shape), None
        with contextlib.suppress(RuntimeError, ValueError):
            found = self.packing.unpack(prediction, wanted)
        if found is not None and tuple(found.shape) == wanted:
            return found
        raise DataError(
            f"the pipeline's prediction has shape {tuple(prediction.shape)}, but its latents have "
            f"shape {wanted}",
            "declare in the family how the pipeline packs latents; models that also "
            "predict a variance are not supported",
            f"{self.pipeline}.scheduler.step",
        )

    def _call_kwargs(
        self, noisy: Tensor, conditioning: Conditioning, device: torch.device
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for one step without guidance."""
        self._check_sides(noisy.shape)
        texts = {n: v for n, v in conditioning.items() if n in self.text_tensors}
        call_kwargs = {
            "latents": self.packing.pack(noisy.to(device)),
            # The scheduler has one step, but Mochi's schedule divides by half of this number.
            "num_inference_steps": 2,
            "output_type": "latent",
            **self.text_kwargs(texts, device),
            **self._size_of(tuple(noisy.shape)),
            **self.arguments,
        }
        if self.guided_by is not None:
            call_kwargs[self.guided_by] = self.unguided
        if self.embedded_guidance_arg is not None:
            call_kwargs[self.embedded_guidance_arg] = self.guidance
        if self.reference is not None and (self.needs_references or REFERENCES in conditioning):
            call_kwargs[self.reference] = self.reference_input(conditioning[REFERENCES].to(device))
        return call_kwargs

    def _check_sides(self, shape: Sequence[int]) -> None:
        if any(side % self._patch for side in shape[-2:]):
            raise DataError(
                f"both sides must be divisible by {self._patch}, because {self.pipeline} packs "
                f"latents into patches of {self._patch} by {self._patch}",
                "use buckets whose sides are divisible by "
                f"{self._patch * self.latent_space().scale} pixels",
                "latents",
                tuple(shape[-2:]),
            )

    @property
    def _patch(self) -> int:
        return self.packing.patch if isinstance(self.packing, Tokens) else 1

    def _size_of(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the pipeline's arguments for the size of samples with latents of this shape."""
        space = self.latent_space()
        size = {"height": shape[-2] * space.scale, "width": shape[-1] * space.scale}
        if self.clips:
            size["num_frames"] = (shape[2] - 1) * space.frames + 1
        return self.sized(size)

    def _channels(self, config: Any) -> int:
        vae = self.known_blueprint().vae
        return (
            int(config.in_channels) // self._patch**2 if vae is None else LatentSpace(vae).channels
        )

    def predicting_pipeline(self, model: Denoiser, scheduler: Any) -> Any:
        """Return the pipeline whose call computes the prediction.

        Args:
            model: Model that predicts.
            scheduler: Scheduler that ends the pipeline's call after one step.
        """
        return self._around(self.known_blueprint(), model, scheduler)

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Return example latents and conditioning for a model, on ``meta`` except for masks.

        Args:
            model: A diffusers model; its configuration defines the text width.
            batch: Number of samples.
            side: Height and width of the latents; one number for square latents.
            frames: Number of latent frames of a clip.
        """
        config = config_of(model)
        sides = (side, side) if isinstance(side, int) else side
        shape = (batch, self._channels(config), *((frames,) if self.clips else ()), *sides)
        latents = torch.empty(shape, device="meta")
        known = {name: self.example_text(name, config, batch) for name in self.text_tensors}
        if self.reference is not None and self.needs_references:
            known[REFERENCES] = torch.empty_like(latents)
        return latents, known

    def example_text(self, name: str, config: Any, batch: int) -> Tensor:
        """Return an example text tensor: ones for a mask; an empty ``meta`` tensor for embeddings.

        Args:
            name: Name in ``text_tensors``.
            config: Configuration of the model.
            batch: Number of samples.
        """
        if name.endswith("mask"):
            return torch.ones(batch, self.tokens(), dtype=torch.bool)
        if name.startswith("pooled"):
            return torch.empty(batch, config.pooled_projection_dim, device="meta")
        return torch.empty(batch, self.tokens(), self._width(config), device="meta")

    def _width(self, config: Any) -> int:
        for name in (self.text_width,) if self.text_width else _TEXT_WIDTHS:
            if config.get(name) is not None:
                return int(config[name])
        raise InvalidValueError(
            "the model's configuration does not define the text embedding width",
            "set text_width in the family to the configuration key for the text embedding "
            "width; tried: "
            f"{', '.join(_TEXT_WIDTHS)}",
            f"{type(self).__name__}.text_width",
            self.text_width,
        )

    def tokens(self) -> int:
        """Return the number of tokens to which texts are padded."""
        usual = parameters_of(self.known_blueprint().kind.__call__).get("max_sequence_length")
        return self.max_sequence_length or (usual.default if usual is not None else 0) or 64
