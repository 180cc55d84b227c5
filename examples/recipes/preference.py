"""Train adapters for SDXL, SD3, FLUX.1, … on pairs of a preferred and a rejected image.

    torchrun examples/recipes/preference.py --base SDXL --data pairs --output runs/dpo --steps 2000

pairs/preferred contains images with captions (cat.png, cat.txt); pairs/rejected contains images
with the same names. The reference model is the trained model without its adapters; a larger --beta
keeps the trained model closer to the reference model. To resume a stopped run, use the same
command.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

import zerotune
from zerotune import AspectBuckets, ImageFolder
from zerotune._util.text import listing, positive, validated
from zerotune.backend.stored import waiting
from zerotune.decisions import Decision
from zerotune.diffusion.data import Augmentation, Preparation, PreparedImages
from zerotune.diffusion.data.batches import Captions
from zerotune.diffusion.data.buckets import BucketAssignment, place_in
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import LOSS_MASKS
from zerotune.diffusion.data.sources import ImageSource
from zerotune.diffusion.data.streams import BucketedDataset
from zerotune.diffusion.losses import weighed
from zerotune.diffusion.models.family import Denoiser, Family
from zerotune.diffusion.noise import DrawnNoise, Noise
from zerotune.diffusion.objective import Inputs, SchedulerObjective
from zerotune.errors import DataError, InvalidValueError

REJECTED: Final = "rejected_"
"""Prefix of batch keys for the rejected image."""


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation, optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    loaded = zerotune.load_pretrained(options.base, plan=plan)
    adapters = zerotune.LoRA(rank=options.rank, targets=loaded.family.lora_targets)
    zerotune.add_lora(loaded.model, adapters)
    pairs = PreferencePairs(
        ImageFolder(options.data / "preferred"),
        ImageFolder(options.data / "rejected"),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(flip=0.5),  # Both images of a pair are mirrored, or neither.
    )
    data = pairs.over(
        {
            name: zerotune.encode_dataset(
                half, family=loaded.family, folder=options.output / "cache"
            )
            for name, half in pairs.sets.items()
        }
    )
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded,
        data=data,
        objective=PreferenceObjective(objective=loaded.objective(), beta=options.beta),
        callbacks=[saving],
    ) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


# -- Pairs of images.


class PreferencePairs:
    """A bucketed dataset of pairs: a preferred and a rejected image that share a caption.

    A sample contains the tensors of the preferred image; the rejected image is in
    ``rejected_images`` or ``rejected_latents``. The rejected image has the same bucket and flip as
    the preferred image. Captions and masks of rejected images are ignored.

    Args:
        preferred: Source of preferred images and captions, such as ``ImageFolder``.
        rejected: Source of rejected images, with the same names as the preferred images; the
            extensions may differ.
        buckets: Target sizes of the images.
        minimum: Minimum number of pairs per bucket; see ``PreparedImages``.
        preparation: Settings for transparency, resizing and cropping.
        augmentation: Settings for flips and captions.

    Attributes:
        sets: The two datasets, ``"preferred"`` and ``"rejected"``.

    Raises:
        DataError: An image has no partner of the same name.
    """

    samples_each: Final = 2
    """Number of images per sample (a preferred and a rejected one)."""

    def __init__(
        self,
        preferred: ImageSource,
        rejected: ImageSource,
        *,
        buckets: Any,
        minimum: int = 1,
        preparation: Preparation | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        _check_partners(preferred, rejected)
        settings: Any = {"preparation": preparation, "augmentation": augmentation}
        first = PreparedImages(preferred, buckets=buckets, minimum=minimum, **settings)
        same: Any = first.assignment
        second = _Rejected(rejected, buckets=same, **settings)
        self.sets: Mapping[str, BucketedDataset] = MappingProxyType(
            {"preferred": first, "rejected": second}
        )

    @property
    def assignment(self) -> BucketAssignment:
        """Bucket of each pair."""
        return self.sets["preferred"].assignment

    @property
    def identity(self) -> str:
        """Digest that changes if images are added, removed, renamed or resized."""
        both = "\0".join(half.identity for half in self.sets.values())
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the sources and buckets."""
        halves = self.sets.values()
        return tuple(each for half in halves for each in getattr(half, "decisions", ()))

    def __len__(self) -> int:
        return len(self.assignment.placements)

    def __getitem__(self, draw: Draw | int) -> dict[str, Any]:
        use = Draw(index=draw, epoch=0) if isinstance(draw, int) else draw
        other = self.sets["rejected"][use]
        images = (name for name in ("images", "latents") if name in other)
        beside = {f"{REJECTED}{name}": other[name] for name in images}
        return {**self.sets["preferred"][use], **beside}

    def over(self, sets: Mapping[str, BucketedDataset]) -> PreferencePairs:
        """Return a copy that reads the images from other datasets, such as ``CachedImages``.

        Args:
            sets: The new datasets, with the same names as in the attribute ``sets``.
        """
        found = copy.copy(self)
        found.sets = MappingProxyType(dict(sets))
        return found


class _Rejected(PreparedImages):
    """Rejected images, placed in their partners' buckets; ``buckets`` is that assignment."""

    def _assign(self, buckets: Any, minimum: int) -> BucketAssignment:  # noqa: ARG002
        placed = enumerate(buckets.placements)
        return BucketAssignment(
            placements=tuple(
                place_in(self.source.item(index).size, partner.bucket) for index, partner in placed
            )
        )


def _check_partners(preferred: ImageSource, rejected: ImageSource) -> None:
    names = [_stems(source) for source in (preferred, rejected)]
    if names[0] == names[1]:
        return
    alone = sorted(set(names[0]) ^ set(names[1]))
    raise DataError(
        f"some images have no partner of the same name: {listing(alone)}"
        if alone
        else "several images share a name, and the two sources order them differently",
        key="rejected",
        value=f"{len(names[1])} images for {len(names[0])} preferred images",
        fix="give both images of a pair the same name, and repair images that were skipped as "
        "broken",
    )


def _stems(source: ImageSource) -> list[str]:
    found = (source.item(index).name for index in range(len(source)))
    return [str(PurePosixPath(name).with_suffix("")) for name in found]


# -- The objective.


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
        return weighed(losses, batch).mean()

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


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Disable a model's adapters inside the ``with`` block.

    Yields:
        The layers whose adapters are disabled; empty if the model has no adapters.
    """
    layers: list[Any] = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    before = [each.disable_adapters for each in layers]
    # peft's enable_adapters would also change requires_grad, by which engines choose what to train.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield layers
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


# -- Options.


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="parent of the two image folders")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--beta", type=float, default=5000.0, help="strength of the reference")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=1, help="pairs per GPU and micro batch")
    parser.add_argument("--accumulation", type=int, default=8, help="micro batches per step")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
