"""Preference objective for pairs of images that share a caption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from zerotune._util.text import positive, validated
from zerotune.backend.stored import waiting
from zerotune.diffusion.data.pairs import REJECTED
from zerotune.diffusion.data.preparation import LOSS_MASKS
from zerotune.diffusion.data.streams import Captions
from zerotune.diffusion.lora import adapters_off
from zerotune.diffusion.losses import weighted_mean
from zerotune.diffusion.models.family import Denoiser, Family
from zerotune.diffusion.noise import DrawnNoise, Noise
from zerotune.diffusion.objective import Inputs, SchedulerObjective
from zerotune.errors import DataError, InvalidValueError


@attrs.frozen(kw_only=True, eq=False)
class PreferenceObjective:
    """Diffusion-DPO objective, which makes preferred images more likely than rejected images.

    The loss is ``-log sigmoid(-beta / 2 * ((e_w - e_l) - (r_w - r_l)))``. ``e_w`` and ``e_l`` are
    the model's errors for the preferred and the rejected image; ``r_w`` and ``r_l`` are the errors
    of a reference model. Both images of a pair use the same noise and time step. A batch of
    ``PreferencePairs`` contains ``images`` and ``rejected_images``, or ``latents`` and
    ``rejected_latents``. One forward pass processes both images of each pair. ``"loss_masks"``
    multiply the errors of both images; ``"loss_weights"`` (b,) multiply the loss of each pair.

    The errors use the noise levels, loss and weighting of ``objective``. With a
    ``FlowMatchingObjective``, the loss is that of Flow-DPO with a constant ``beta``.

    Source: https://arxiv.org/abs/2311.12908 and diffusers'
    ``examples/research_projects/diffusion_dpo/train_diffusion_dpo_sdxl.py``; for flow matching
    https://arxiv.org/abs/2501.13918, section 4.1.
    """

    objective: SchedulerObjective
    """``DenoisingObjective``, ``EDMObjective`` or ``FlowMatchingObjective``, which determines
    prediction type, noise levels, loss and weighting."""
    beta: float = attrs.field(default=5000.0, validator=validated(positive))
    """Strength of the regularisation towards the reference model. diffusers' script uses 5000 for
    SDXL and 2500 for Stable Diffusion 1.5."""
    reference: Any = None
    """Reference model: a frozen copy, which is moved to the trained model's device. By default, the
    trained model itself with its adapters disabled, so no second copy is needed."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.objective, SchedulerObjective):
            raise InvalidValueError(
                "cannot compare the two images of a pair",
                key="objective",
                value=type(self.objective).__name__,
                fix="pass a DenoisingObjective or a FlowMatchingObjective, such as "
                "loaded.objective()",
            )
        if self.reference is not None and not isinstance(self.reference, torch.nn.Module):
            raise InvalidValueError(
                "is not a model",
                key="reference",
                value=type(self.reference).__name__,
                fix='pass load_pretrained(FOLDER, parts=False, dtype="bf16").model, or omit '
                "reference if you train adapters",
            )
        if self.reference is not None and waiting(self.reference):
            raise InvalidValueError(
                "the weights of this model have not been read from their files",
                key="reference",
                value=type(self.reference).__name__,
                fix="load the model without a plan, or call Pretrained.read_weights()",
            )

    @property
    def family(self) -> Family:
        """Family of ``objective``."""
        return self.objective.family

    @property
    def scheduler(self) -> Any:
        """Scheduler of ``objective``."""
        return self.objective.scheduler

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Return the loss of a micro batch of pairs, scalar, fp32."""
        inputs = self.objective.inputs(batch, generator)
        # Drawn once, because both images of a pair have the same level.
        levels = self.objective.draw_levels(inputs, generator)
        twice = torch.arange(len(inputs.clean)).repeat(2)
        both, levels = self._pairs(inputs), levels[twice]
        with torch.no_grad(), self._reference_of(model) as reference:
            theirs = self._differences(reference, both, levels)
        ours = self._differences(model, both, levels)
        losses = -torch.nn.functional.logsigmoid(-0.5 * self.beta * (ours - theirs))
        return weighted_mean(losses, batch)

    def losses_at(
        self,
        model: Denoiser,
        batch: Mapping[str, torch.Tensor],
        *,
        quantiles: Sequence[float],
        noise: Noise,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return the losses of the preferred images; see ``LevelObjective.losses_at``."""
        return self.objective.losses_at(
            model, batch, quantiles=quantiles, noise=noise, generator=generator
        )

    def _pairs(self, inputs: Inputs) -> Inputs:
        """Return the preferred images of a batch, followed by the rejected images."""
        batch, clean, noise = inputs.batch, inputs.clean, inputs.noise
        beside = {
            name.removeprefix(REJECTED): value
            for name, value in batch.items()
            if name.startswith(REJECTED)
        }
        if not beside:
            raise DataError(
                f"the batch has no rejected images, only the keys {sorted(batch)}",
                key=f"batch['{REJECTED}latents']",
                fix="train on PreferencePairs, or add rejected_images or rejected_latents to "
                "the dataset",
            )
        # Without the preferred latents, which a family would use in place of images.
        kept = {name: value for name, value in batch.items() if name not in ("images", "latents")}
        rejected = self.family.clean({**kept, **beside}).to(clean.device)
        if rejected.shape != clean.shape:
            raise DataError(
                f"the rejected images have the shape {tuple(rejected.shape)}, but the preferred "
                f"images have {tuple(clean.shape)}",
                key="batch",
                value=sorted(beside),
                fix="resize both images of a pair to the same size, as PreferencePairs does",
            )
        masks = {LOSS_MASKS: _twice(batch[LOSS_MASKS])} if LOSS_MASKS in batch else {}
        return Inputs(
            batch=masks,
            clean=torch.cat([clean, rejected]),
            conditioning={name: _twice(value) for name, value in inputs.conditioning.items()},
            noise=DrawnNoise(target=_twice(noise.target), added=_twice(noise.added)),
        )

    def _differences(self, model: Denoiser, both: Inputs, levels: Any) -> torch.Tensor:
        """Return the preferred image's error minus the rejected image's error (b,)."""
        preferred, rejected = self.objective.compare(model, both, levels).by_sample().chunk(2)
        return preferred - rejected

    @contextmanager
    def _reference_of(self, model: Denoiser) -> Iterator[Denoiser]:
        trained: Any = getattr(model, "module", model)
        if self.reference is None:
            with adapters_off(trained) as layers:
                if not layers:
                    raise InvalidValueError(
                        "the trained model has no adapters to disable",
                        key="reference",
                        value=None,
                        fix="train adapters (add_lora), or pass a frozen copy: "
                        'load_pretrained(FOLDER, parts=False, dtype="bf16").model',
                    )
                yield model
            return
        if self.reference is trained:
            raise InvalidValueError(
                "is the trained model itself, so reference and trained model would never differ",
                key="reference",
                value=type(trained).__name__,
                fix="load a second copy of the model",
            )
        if self.reference.device != model.device:
            self.reference.to(model.device)
        self.reference.eval()
        yield self.reference


def _twice(value: Any) -> Any:
    # If text encoders are trained, batches contain captions, which the engine encodes.
    return Captions((*value, *value)) if isinstance(value, Captions) else torch.cat([value, value])
