"""Families by declaration: the prediction is what a diffusers pipeline makes of one step.

The pipeline's own ``__call__`` runs, without its ``no_grad``, with the engine in the place of its
model and a scheduler of one step, whose time is that of each sample. What it hands its scheduler
is the prediction, with its graph. Scaling of times, signs, position ids, masks, guidance embeddings
and reference images are so diffusers' own code.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.data.preparation import REFERENCE_IMAGES
from zerotune.diffusion.data.streams import row_of, stack_named
from zerotune.diffusion.families.base import config_of, parameters_of
from zerotune.diffusion.families.text_to_image import NEGATIVE, TextToImage
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.diffusion.latents import LatentSpace, Tokens
from zerotune.diffusion.pipeline import FrozenParts
from zerotune.errors import DataError, InvalidValueError

REFERENCES: Final = "reference_latents"
"""Key of a batch: latents (b, c, h, w) of the images that are edited."""

_TEXT_WIDTHS: Final = (
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "caption_channels",
    "cap_feat_dim",
    "cross_attention_dim",
)
"""Keys of configurations of diffusers' models."""


@attrs.frozen(kw_only=True, eq=False)
class PipelineFamily(TextToImage):
    """A family that its diffusers pipeline describes. Subclass it and name what differs.

    Any pipeline will do that takes ``latents`` and ``prompt_embeds`` and gives its scheduler what
    its model predicts. ``load_pretrained`` tries it once, on the ``meta`` device, and refuses with
    the reason.
    """

    component: ClassVar[str] = "transformer"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    flow_matching: ClassVar[bool] = True

    model: ClassVar[str] = ""
    """Class of the trained model in diffusers; needed for ``model_facts`` of a configuration."""
    encoded: ClassVar[tuple[str, ...]] = ()
    """What ``encode_prompt`` returns, in order, where that is not ``text_tensors`` and then the
    same of negative prompts."""
    text_width: ClassVar[str | None] = None
    """The key of the model's configuration that says how wide texts are, where it is none of the
    usual ones."""
    one_by_one: ClassVar[bool] = False
    """Whether the pipeline takes one time step for all samples: they are then called in turn."""

    max_sequence_length: int | None = None
    """Tokens of a text; what the pipeline's ``__call__`` takes when not given."""
    texts_alone: bool = False
    """Encode texts one by one; ``load_pretrained`` sets it where the pipeline pads to the longest,
    so that an embedding would depend on the texts beside it."""

    # -- Texts.

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """What the pipeline's ``encode_prompt`` makes of captions, told what ``__call__`` tells."""
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
        """What the pipeline makes of negative prompts: some give prompts instructions."""
        if "negative_prompt" not in parameters_of(parts.pipeline.encode_prompt):
            return self.embed(parts, texts, device)
        told = {
            "prompt": list(texts),
            "negative_prompt": list(texts),
            "do_classifier_free_guidance": True,
        }
        return self.encode_with(parts.pipeline, device, told, prefix=NEGATIVE)

    def encode_with(
        self, pipeline: Any, device: torch.device, told: Mapping[str, Any], prefix: str = ""
    ) -> dict[str, Tensor]:
        """What ``encode_prompt`` makes of texts, by ``text_tensors``, batch first.

        Args:
            pipeline: Whose.
            device: Where.
            told: What to encode.
            prefix: ``"negative_"`` for what it makes of negative prompts.
        """
        encode = pipeline.encode_prompt
        known = {**self._prompt_arguments(pipeline), "device": device, **told}
        results = encode(**{n: v for n, v in known.items() if n in parameters_of(encode)})
        results = results if isinstance(results, tuple) else (results,)
        usual = (*self.text_tensors, *(f"{NEGATIVE}{name}" for name in self.text_tensors))
        names = self.encoded or usual
        named = dict(zip(names, results, strict=False))
        if self.listed:
            return _masked(named[f"{prefix}prompt_embeds"])
        return {name: _whole(named, name, prefix) for name in self.text_tensors}

    def embedding_settings(self) -> dict[str, Any]:
        """The length of texts."""
        pipeline = self._needed("captions").pipeline
        length = self._prompt_arguments(pipeline).get("max_sequence_length")
        # Only where it is so: other caches stay what they are.
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

    # -- Samples.

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The latents of a batch (b, c, [frames,] h, w), fp32; images and clips are encoded."""
        latents = super().clean(batch)
        return latents.unsqueeze(2) if self.clips and latents.ndim == 4 else latents

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Embeddings of a batch's texts, and latents of the images that are edited."""
        texts = super().conditioning(batch, generator)
        if self.reference is None:
            return texts
        return {**texts, REFERENCES: self._references(batch)}

    def _references(self, batch: Mapping[str, Tensor]) -> Tensor:
        if REFERENCES in batch:
            return batch[REFERENCES].float()
        images = batch.get(REFERENCE_IMAGES)
        if images is None:
            raise DataError(
                f"{type(self).__name__} edits images, and the batch has none, only {sorted(batch)}",
                key=f"batch[{REFERENCES!r}]",
                fix="let the dataset yield reference_images (b, 3, height, width) or their latents",
            )
        return self.encode_references(images, device=images.device)["latents"].to(images.device)

    # -- The prediction.

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """What the pipeline's ``__call__`` gives its scheduler in one step, shaped as ``noisy``.

        Raises:
            DataError: The pipeline called its model more than once, or predicts another shape.
        """
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
        """Whether the samples of a batch are called in turn."""
        return self.one_by_one

    def in_one_call(
        self, model: Denoiser, noisy: Tensor, steps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The prediction of one call of the pipeline.

        Args:
            model: What predicts.
            noisy: As for ``predict``.
            steps: What the pipeline's loop is over: (1, b), or (1,) for one time for all samples.
            conditioning: As for ``predict``.
        """
        blueprint = self.known_blueprint()
        scheduler = _OneStep(blueprint.scheduler.config, steps.to(model.device))
        pipe = self.predicting_pipeline(model, scheduler)
        told = self._call_kwargs(noisy, conditioning, model.device)
        self.adjust(pipe, told)
        try:
            # The function below ``torch.no_grad``.
            call: Any = type(pipe).__call__
            inspect.unwrap(call)(pipe, **told)
        except _Predicted as found:
            prediction = found.prediction
            found.__traceback__ = None  # Its frames hold the graph.
        else:
            raise _not_captured(type(self).__name__)
        return self._as_latents(prediction, noisy)

    def _as_latents(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        wanted, found = tuple(noisy.shape), None
        with contextlib.suppress(RuntimeError, ValueError):
            found = self.packing.unpack(prediction, wanted)
        if found is not None and tuple(found.shape) == wanted:
            return found
        raise DataError(
            f"the pipeline predicts {tuple(prediction.shape)} for latents of {wanted}",
            key=f"{self.pipeline}.scheduler.step",
            fix="name the packing of its latents; learned variance and guidance are not trained",
        )

    def _call_kwargs(
        self, noisy: Tensor, conditioning: Conditioning, device: torch.device
    ) -> dict[str, Any]:
        """The arguments of the pipeline for one step without guidance."""
        self._check_sides(noisy.shape)
        texts = {n: v for n, v in conditioning.items() if n in self.text_tensors}
        told = {
            "latents": self.packing.pack(noisy.to(device)),
            "num_inference_steps": 1,
            "output_type": "latent",
            **self.told_texts(texts, device),
            **self._size_of(tuple(noisy.shape)),
            **self.arguments,
        }
        if self.guided_by is not None:
            told[self.guided_by] = self.unguided
        if self.told_guidance is not None:
            told[self.told_guidance] = self.guidance
        if self.reference is not None:
            told[self.reference] = self.told_reference(conditioning[REFERENCES].to(device))
        return told

    def _check_sides(self, shape: Sequence[int]) -> None:
        if any(side % self._patch for side in shape[-2:]):
            raise DataError(
                f"{self.pipeline} packs latents into patches of {self._patch} by {self._patch}",
                key="latents",
                value=tuple(shape[-2:]),
                fix="use buckets whose sides are divisible by "
                f"{self._patch * self._space().scale} pixels",
            )

    @property
    def _patch(self) -> int:
        return self.packing.patch if isinstance(self.packing, Tokens) else 1

    def _size_of(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Height, width and frames of samples with latents of this shape."""
        space = self._space()
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
        """The pipeline whose call is the prediction."""
        return self._around(self.known_blueprint(), model, scheduler)

    # -- Examples.

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Latents and conditioning of the shapes that a model takes, without data but for masks.

        Args:
            model: A diffusers model; its configuration says how wide texts are.
            batch: Samples.
            side: Height and width of the latents, or both in one.
            frames: Latent frames of a clip.
        """
        config = config_of(model)
        sides = (side, side) if isinstance(side, int) else side
        shape = (batch, self._channels(config), *((frames,) if self.clips else ()), *sides)
        latents = torch.empty(shape, device="meta")
        known = {name: self.example_text(name, config, batch) for name in self.text_tensors}
        if self.reference is not None:
            known[REFERENCES] = torch.empty_like(latents)
        return latents, known

    def example_text(self, name: str, config: Any, batch: int) -> Tensor:
        """A tensor of texts as the model takes it; masks are ones, all else is without data."""
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
            "the model's configuration does not say how wide texts are",
            key=f"{type(self).__name__}.text_width",
            value=self.text_width,
            fix=f"name the key of its configuration; tried were {', '.join(_TEXT_WIDTHS)}",
        )

    def tokens(self) -> int:
        """Of a text, padded."""
        usual = parameters_of(self.known_blueprint().kind.__call__).get("max_sequence_length")
        return self.max_sequence_length or (usual.default if usual is not None else 0) or 64


# -- A scheduler of one step.


class _Predicted(Exception):  # noqa: N818 - no error: it ends the pipeline's call
    def __init__(self, prediction: Tensor) -> None:
        super().__init__("the pipeline's prediction")
        self.prediction = prediction


class _OneStep:
    """Looks like a scheduler to a pipeline; its one step is the time of each sample.

    Args:
        config: Of the pipeline's own scheduler.
        steps: (1, b), or (1,) for pipelines that take one time for all.
    """

    order = 1
    init_noise_sigma = 1.0

    def __init__(self, config: Any, steps: Tensor) -> None:
        # Pipelines of U-Nets warn of other values, which matter to the steps of a whole drawing.
        sampling = {"steps_offset": 1, "clip_sample": False}
        self.config = type(config)({**config, **{n: v for n, v in sampling.items() if n in config}})
        self.timesteps = steps
        self.sigmas = torch.tensor([1.0, 0.0])

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        *,
        timesteps: Any = None,
        sigmas: Any = None,
        **_: Any,
    ) -> None:
        """They stay what they are."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """There is one."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:  # noqa: ARG002
        """Flow matching scales nothing."""
        return sample

    def step(self, model_output: Tensor, *_: Any, **__: Any) -> Any:
        """End the pipeline's call with its prediction."""
        raise _Predicted(model_output)


def _not_captured(family: str) -> DataError:
    return DataError(
        "the pipeline's call ended without a step of its scheduler",
        key=family,
        fix="write predict by hand (docs/families.md)",
    )


# -- Small helpers.


def _masked(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Texts of unequal length, padded, with their mask."""
    ones = [torch.ones(len(text), dtype=torch.long, device=text.device) for text in texts]
    pairs = zip(texts, ones, strict=True)
    return stack_named([{"prompt_embeds": t, "prompt_embeds_mask": mask} for t, mask in pairs])


def _whole(named: Mapping[str, Any], name: str, prefix: str) -> Tensor:
    """A result of ``encode_prompt``; a mask that is left out, since nothing is masked, is ones."""
    found = named.get(prefix + name)
    if found is None and name.endswith("mask"):
        embeds: Tensor = named[f"{prefix}prompt_embeds"]
        return torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    if not isinstance(found, Tensor):
        raise InvalidValueError(
            "encode_prompt gave no such tensor",
            key=f"text_tensors: {name}",
            value=type(found).__name__,
            fix="name what it returns, in order: encoded = (...)",
        )
    return found
