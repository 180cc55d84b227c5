"""Activation memory and arithmetic of a model's passes, as functions of batch size and pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import attrs


def _as_triples(triples: Iterable[Any]) -> tuple[tuple[int, float, float], ...]:
    return tuple((int(count), float(first), float(second)) for count, first, second in triples)


def _as_costs(costs: Iterable[Any]) -> tuple[ActivationCost, ...]:
    return tuple(one if isinstance(one, ActivationCost) else ActivationCost(**one) for one in costs)


SMALLEST_OFFLOADED: Final = 2**20
"""Minimum size in bytes of tensors that ``ActivationOffload`` moves."""


@attrs.frozen(kw_only=True)
class ActivationCost:
    """Peak bytes of activations and temporary tensors in one forward and backward pass.

    At each moment of a pass, activation memory is linear in batch size and pixels. This holds for
    convolutions, and for attention that never stores the attention matrix
    (``scaled_dot_product_attention``). Batch size and resolution determine at which moment the peak
    occurs.
    """

    base: float
    """Bytes that do not depend on the batch: gradients of the backward pass."""
    per_sample: float
    """Bytes per sample at any resolution: text tokens and embeddings."""
    per_pixel: float
    """Bytes per sample and image pixel (not latent pixel); for clips, see
    ``ModelFacts.positions``."""
    small: tuple[tuple[int, float, float], ...] = attrs.field(default=(), converter=_as_triples)
    """Groups of small tensors of equal size, each as (number of tensors, bytes per sample, bytes
    per pixel). A group is included only if each tensor has fewer than ``SMALLEST_OFFLOADED`` bytes;
    a negative count subtracts the group."""
    moments: tuple[ActivationCost, ...] = attrs.field(default=(), converter=_as_costs)
    """Costs at other moments of the pass, which may be the peak at other batch sizes or
    resolutions."""

    def nbytes(self, *, batch: int, pixels: int, element_bytes: int = 2) -> int:
        """Return the peak in bytes for ``batch`` samples of ``pixels`` pixels each.

        Args:
            batch: Samples per forward pass and rank.
            pixels: Size of a sample, from ``ModelFacts.positions``.
            element_bytes: Bytes per element of the precision.
        """
        elements = element_bytes / 2
        in_half = self.base + batch * (self.per_sample + self.per_pixel * pixels)
        for count, per_sample, per_pixel in self.small:
            each = batch * (per_sample + per_pixel * pixels)
            if each * elements < SMALLEST_OFFLOADED:
                in_half += count * each
        size = {"batch": batch, "pixels": pixels, "element_bytes": element_bytes}
        return max(math.ceil(in_half * elements), *(one.nbytes(**size) for one in self.moments), 0)


@attrs.frozen(kw_only=True)
class Amount:
    """A quantity of a pass, such as FLOPs, as a function of batch size and pixels."""

    per_sample: float
    per_pixel: float
    """Amount per sample and image pixel; for clips, see ``ModelFacts.positions``."""
    per_pixel_squared: float = 0.0
    """Amount per sample and squared number of pixels, for attention."""

    def of(self, *, batch: int, pixels: int) -> float:
        """Return the amount for ``batch`` samples of ``pixels`` pixels each.

        Args:
            batch: Samples per forward pass and rank.
            pixels: Size of a sample, from ``ModelFacts.positions``.
        """
        each = self.per_sample + pixels * (self.per_pixel + pixels * self.per_pixel_squared)
        return batch * each

    def times(self, factor: float) -> Amount:
        """Return the amount multiplied by ``factor``."""
        return Amount(
            per_sample=factor * self.per_sample,
            per_pixel=factor * self.per_pixel,
            per_pixel_squared=factor * self.per_pixel_squared,
        )


def _as_amount(value: Any) -> Amount:
    return value if isinstance(value, Amount) else Amount(**value)


@attrs.frozen(kw_only=True)
class PassWork:
    """Work and memory traffic of one pass with 2-byte elements."""

    products: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of matrix products; a multiply-add counts as two."""
    convolutions: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of convolutions."""
    attention: Amount = attrs.field(converter=_as_amount)
    """Floating-point operations of attention, which is recomputed in the backward pass."""
    moved: Amount = attrs.field(converter=_as_amount)
    """Bytes read and written by operators that are not matrix products, convolutions or
    attention."""
    operators: int = 0
    """Number of operators, including views; 0 if not counted."""
    product_calls: int = 0
    """Number of matrix products among ``operators``."""
    attention_calls: int = 0
    """Number of attention operators among ``operators``."""


@attrs.frozen(kw_only=True)
class ArithmeticFacts:
    """Arithmetic of the forward and backward passes of a training step."""

    forward: PassWork
    backward: PassWork
    recomputed: PassWork | None = None
    """Work that gradient checkpointing recomputes; ``None`` if the model does not support it."""

    @property
    def of_frozen_weights(self) -> ArithmeticFacts:
        """Return the work with frozen weights, which halve the backward pass's matrix products."""
        halved = attrs.evolve(
            self.backward,
            products=self.backward.products.times(0.5),
            convolutions=self.backward.convolutions.times(0.5),
        )
        return attrs.evolve(self, backward=halved)


@attrs.frozen(kw_only=True)
class ActivationFacts:
    """Activation bytes of a forward and backward pass with 2-byte elements."""

    full: ActivationCost
    """Cost without recomputation."""
    checkpointed: ActivationCost | None = None
    """Cost with gradient checkpointing; ``None`` if the model does not support it."""
    offloaded: ActivationCost | None = None
    """Device memory with ``ActivationOffload``, which recomputes blocks and keeps their inputs in
    host memory; ``None`` if unknown."""
    offloaded_host: ActivationCost | None = None
    """Host memory for the offloaded block inputs."""
