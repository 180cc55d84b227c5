"""What a plan needs to know of the model and of the run, without loading either."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class ParameterFacts:
    """One parameter of a model."""

    name: str
    """Dotted name as ``named_parameters()`` gives it."""
    shape: tuple[int, ...]
    """Full, unpartitioned shape."""
    trainable: bool = True
    """Whether it requires a gradient."""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter."""
        return math.prod(self.shape)


def _as_tuple(parameters: Iterable[ParameterFacts]) -> tuple[ParameterFacts, ...]:
    return tuple(parameters)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Names and shapes of a model's parameters, enough to size every buffer."""

    parameters: tuple[ParameterFacts, ...] = attrs.field(converter=_as_tuple)
    name: str = "model"

    @classmethod
    def from_module(cls, module: Any) -> ModelFacts:
        """Read the facts off a ``torch.nn.Module`` (on any device, ``meta`` included).

        Parameters sharded by ``deepspeed.zero.Init`` report their full shape.
        """
        return cls(
            name=type(module).__name__,
            parameters=[
                ParameterFacts(
                    name=name,
                    shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
                    trainable=bool(parameter.requires_grad),
                )
                for name, parameter in module.named_parameters()
            ],
        )

    @classmethod
    def from_shapes(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], *, name: str = "model"
    ) -> ModelFacts:
        """Build the facts from ``(name, shape)`` pairs, all trainable."""
        return cls(
            name=name,
            parameters=[ParameterFacts(name=key, shape=tuple(shape)) for key, shape in shapes],
        )

    @property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The parameters the optimizer sees."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trainable_numel(self) -> int:
        """Elements of the trainable parameters."""
        return sum(parameter.numel for parameter in self.trainable)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter; 0 for a model without parameters."""
        return max((parameter.numel for parameter in self.parameters), default=0)


@attrs.frozen(kw_only=True)
class RunFacts:
    """What the training script knows and a configuration may leave ``"auto"``."""

    lr: float | None = None
    """Peak learning rate, dimensionless."""
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    micro_batch_size: int | None = None
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    """Largest global L2 norm of the gradient; 0 switches clipping off."""
    mixed_precision: str | None = None
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    total_steps: int | None = None
    """Optimizer steps of the whole run."""
    warmup_steps: int | None = None
    """Optimizer steps of warm-up."""
