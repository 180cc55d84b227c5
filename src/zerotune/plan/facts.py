"""What a plan needs to know of the model and of the run, without loading either."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
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

    @cached_property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter."""
        return math.prod(self.shape)


@attrs.frozen(kw_only=True)
class ActivationCost:
    """Peak bytes of activations and temporaries of one forward and backward pass.

    Linear in the batch and in its pixels, which holds for convolutions and for attention that
    never stores its matrix (``scaled_dot_product_attention``).
    """

    base: float
    """Bytes whatever the batch: gradients on their way out of the backward pass."""
    per_sample: float
    """Bytes per sample whatever its size: text tokens and embeddings."""
    per_pixel: float
    """Bytes per pixel of the image, not of the latent."""

    def nbytes(self, *, batch: int, pixels: int, element_bytes: int = 2) -> int:
        """Bytes for ``batch`` samples of ``pixels`` pixels each, in elements of that size."""
        in_half = self.base + batch * (self.per_sample + self.per_pixel * pixels)
        return math.ceil(in_half * element_bytes / 2)


@attrs.frozen(kw_only=True)
class ActivationFacts:
    """What a forward and backward pass of a model keeps, in bytes of 2-byte elements."""

    full: ActivationCost
    """Everything the backward pass needs is kept."""
    checkpointed: ActivationCost | None = None
    """Blocks are recomputed; ``None``: the model cannot do that."""
    offloaded: ActivationCost | None = None
    """Blocks are recomputed and their inputs wait in host memory, as ``ActivationOffload`` does
    it: what is left on the device; ``None``: not known."""
    offloaded_host: ActivationCost | None = None
    """What it takes of host memory."""


@attrs.frozen(kw_only=True)
class BlockFacts:
    """A kind of module that a model is built of, many times."""

    class_name: str
    """``"BasicTransformerBlock"``."""
    count: int
    """How many there are."""
    numel: int
    """Elements of the largest of them."""


def _as_tuple(parameters: Iterable[ParameterFacts]) -> tuple[ParameterFacts, ...]:
    return tuple(parameters)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Names and shapes of a model's parameters, enough to size every buffer."""

    parameters: tuple[ParameterFacts, ...] = attrs.field(converter=_as_tuple)
    name: str = "model"
    activations: ActivationFacts | None = None
    """What a training step keeps beside the weights; ``None``: not known."""
    blocks: tuple[BlockFacts, ...] = ()
    """Its innermost repeated modules, as far as they are known."""

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
            blocks=_blocks(module),
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

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The parameters the optimizer sees."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trainable_numel(self) -> int:
        """Elements of the trainable parameters."""
        return sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter; 0 for a model without parameters."""
        return max((parameter.numel for parameter in self.parameters), default=0)


def _blocks(module: Any) -> tuple[BlockFacts, ...]:
    """What diffusers says may not be split, or repeats, without what only holds such blocks."""
    names = {"ResnetBlock2D"}
    for attribute in ("_no_split_modules", "_repeated_blocks"):
        names.update(getattr(module, attribute, None) or ())
    found: dict[str, list[int]] = {}
    for part in module.modules():
        inner = (type(child).__name__ in names for child in part.modules() if child is not part)
        if type(part).__name__ in names and not any(inner):
            sizes = (math.prod(getattr(p, "ds_shape", p.shape)) for p in part.parameters())
            found.setdefault(type(part).__name__, []).append(sum(sizes))
    return tuple(
        BlockFacts(class_name=name, count=len(sizes), numel=max(sizes))
        for name, sizes in sorted(found.items())
    )


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
