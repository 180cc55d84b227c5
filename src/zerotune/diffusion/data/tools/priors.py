"""Prior preservation: what a model knows of a class, kept while it learns one instance of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zerotune.diffusion.data.streams import Batch, BatchStream, Captions, no_place
from zerotune.errors import DataError, InvalidValueError

_WEIGHTS = "loss_weights"


class PriorPreservation:
    """Micro batches of instance samples followed by prior samples, weighted as DreamBooth does.

    The mean over such a batch is ``instance_loss + weight * prior_loss``, each the mean over its
    own samples. The plan's micro batch size is that of both streams together; they need not be
    equally large. The two take their samples from streams of their own, each with its own epochs::

        data = PriorPreservation(
            instances=DataStream(photos, micro_batch_size=2),
            priors=DataStream(class_images, micro_batch_size=2),
        )

    Args:
        instances: What is learned.
        priors: What the model drew of the class before it was trained.
        weight: How much the prior counts.

    Raises:
        InvalidValueError: The weight is negative or not finite.

    Source: ``with_prior_preservation`` of diffusers' ``examples/dreambooth/train_dreambooth.py``,
    after https://arxiv.org/abs/2208.12242.
    """

    def __init__(self, *, instances: BatchStream, priors: BatchStream, weight: float = 1.0) -> None:
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidValueError(
                "is no weight of a loss", key="weight", value=weight, fix="write 1.0"
            )
        self._instances, self._priors, self._weight = instances, priors, weight

    @property
    def epoch(self) -> float:
        """Epochs of the instances consumed."""
        instances: Any = self._instances
        return float(instances.epoch)

    def __iter__(self) -> PriorPreservation:
        return self

    def __next__(self) -> Batch:
        instance, prior = next(self._instances), next(self._priors)
        if instance.keys() != prior.keys():
            raise DataError(
                f"instances have {sorted(instance)}, priors {sorted(prior)}",
                key="priors",
                value=sorted(instance.keys() ^ prior.keys()),
                fix="let both datasets give the same keys",
            )
        weights = self._weights(instance, prior)
        joined = {name: _joined(name, instance[name], prior[name]) for name in instance}
        if _WEIGHTS in joined:
            weights = weights * joined[_WEIGHTS]
        return {**joined, _WEIGHTS: weights}

    def state_dict(self) -> dict[str, Any]:
        """The places of both streams."""
        return {"instances": self._instances.state_dict(), "priors": self._priors.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue both streams.

        Raises:
            DataError: The state is not that of two streams.
        """
        if not isinstance(state, Mapping):
            raise no_place("state", state)
        if not {"instances", "priors"} <= state.keys():
            raise DataError(
                "was saved without prior preservation",
                key="state",
                value=sorted(state),
                fix="give the data the run was started with, or leave its state out",
            )
        before = self._instances.state_dict()
        self._instances.load_state_dict(state["instances"])
        try:
            self._priors.load_state_dict(state["priors"])
        except DataError:
            self._instances.load_state_dict(before)
            raise

    def _weights(self, instance: Batch, prior: Batch) -> torch.Tensor:
        """What turns a mean over all samples into the sum of two means."""
        ours, theirs = _size(instance), _size(prior)
        both = float(ours + theirs)
        return torch.tensor([both / ours] * ours + [self._weight * both / theirs] * theirs)


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _joined(name: str, instance: Any, prior: Any) -> Any:
    if isinstance(instance, Captions) and isinstance(prior, Captions):
        return Captions((*instance, *prior))
    shapes = [tuple(getattr(value, "shape", ()))[1:] for value in (instance, prior)]
    if shapes[0] != shapes[1] or type(instance) is not type(prior):
        raise DataError(
            f"samples of instances and priors do not fit together: {shapes[0]} and {shapes[1]}",
            key=f"batch[{name!r}]",
            value=(type(instance).__name__, type(prior).__name__),
            fix="bring both to one size, with buckets of the same single size for instance",
        )
    return torch.cat([instance, prior])
