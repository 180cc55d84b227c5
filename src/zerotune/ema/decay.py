"""Decay schedules of an EMA, as functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import attrs

from zerotune._util.text import finite, positive, validated
from zerotune.errors import InvalidValueError


@runtime_checkable
class DecaySchedule(Protocol):
    """Protocol for decay schedules; any object with a method ``at`` is accepted."""

    def at(self, step: int) -> float:
        """Return the decay for an optimizer step.

        Args:
            step: Number of the optimizer step since averaging began, counting from 0.

        Returns:
            The decay, in [0, 1); 0 makes the shadow a copy of the weights.
        """
        ...


def _check_share(value: Any, *, key: str) -> None:
    number = finite(value, key=key)
    if number == 1:
        raise InvalidValueError(
            "a decay of 1 never updates the shadow",
            "write 0.999 for an average over thousands of steps, or 0.9999 for tens of thousands",
            key,
            value,
        )
    if not 0 <= number < 1:
        raise InvalidValueError("a decay must be in [0, 1)", "try 0.999", key, value)


_kept_share = validated(_check_share)
_above_zero = validated(positive)


@attrs.frozen(kw_only=True)
class ConstantDecay:
    """The same decay at every step."""

    decay: float = attrs.field(validator=_kept_share)
    """Decay per optimizer step, in [0, 1)."""

    def at(self, step: int) -> float:  # noqa: ARG002 - the protocol's argument
        """Return the decay, the same for every step."""
        return self.decay


@attrs.frozen(kw_only=True)
class WarmupDecay:
    """``1 - (1 + step / inverse_gamma) ** -power``, clipped between ``min_decay`` and ``decay``.

    diffusers' ``EMAModel(use_ema_warmup=True)`` uses the same formula. The first update copies the
    weights. With ``power=2/3`` the decay reaches 0.999 after 31,600 steps and 0.9999 after a
    million. With ``power=3/4``, which suits shorter runs, the decay reaches 0.999 after 10,000
    steps and 0.9999 after 215,400.
    """

    decay: float = attrs.field(default=0.9999, validator=_kept_share)
    """Largest decay."""
    inverse_gamma: float = attrs.field(default=1.0, validator=_above_zero)
    """Time scale of the warm-up in optimizer steps."""
    power: float = attrs.field(default=2 / 3, validator=_above_zero)
    """Exponent of the warm-up."""
    min_decay: float = attrs.field(default=0.0, validator=_kept_share)
    """Smallest decay after the first update."""

    def at(self, step: int) -> float:
        """Return the decay: 0 at step 0, increasing afterwards."""
        if step <= 0:
            return 0.0
        # 1 - x ** -p loses every digit to cancellation while x is close to 1.
        value = -math.expm1(-self.power * math.log1p(step / self.inverse_gamma))
        return max(min(value, self.decay), self.min_decay)


@attrs.frozen(kw_only=True)
class RampDecay:
    """``(1 + step) / (10 + step)``, clipped between ``min_decay`` and ``decay``.

    diffusers' ``EMAModel`` without ``use_ema_warmup`` uses the same formula.
    """

    decay: float = attrs.field(default=0.9999, validator=_kept_share)
    """Largest decay."""
    min_decay: float = attrs.field(default=0.0, validator=_kept_share)
    """Smallest decay after the first update."""

    def at(self, step: int) -> float:
        """Return the decay: 0 at step 0, increasing from 2/11 afterwards."""
        if step <= 0:
            return 0.0
        return max(min((1 + step) / (10 + step), self.decay), self.min_decay)


@attrs.frozen(kw_only=True)
class HalfLife:
    """A constant decay, defined by the half-life of a step's weight in the average.

    For a half-life in samples, divide it by the batch size::

        HalfLife(steps=500_000 / plan.train_batch_size)
    """

    steps: float = attrs.field(validator=_above_zero)
    """Half-life in optimizer steps."""

    def at(self, step: int) -> float:  # noqa: ARG002 - the protocol's argument
        """Return ``0.5 ** (1 / steps)``, the same for every step."""
        return float(0.5 ** (1 / self.steps))


def as_schedule(decay: DecaySchedule | float) -> DecaySchedule:
    """Return a schedule unchanged, or convert a number to a ``ConstantDecay``."""
    if isinstance(decay, (int, float)):
        return ConstantDecay(decay=decay)
    if isinstance(decay, DecaySchedule):
        return decay
    raise InvalidValueError(
        "must be a number in [0, 1) or an object with at(step)",
        "write EMAShadow(decay=0.999) or EMAShadow(decay=WarmupDecay())",
        "decay",
        decay,
    )


def decay_of_update(
    schedule: DecaySchedule, *, step: int, update_every: int = 1, start_after: int = 0
) -> float:
    """Return the decay of one update that covers the last ``update_every`` optimizer steps.

    The result is the product of the decays of these steps (``decay ** update_every`` for a constant
    decay), so the half-life does not depend on ``update_every``.

    Args:
        schedule: Schedule of the decay per optimizer step.
        step: Current optimizer step, counting from 1.
        update_every: Number of optimizer steps per update.
        start_after: Number of initial steps during which the shadow is a copy of the weights.

    Returns:
        A number in [0, 1); 0 if one of the steps copies the weights.
    """
    product = 1.0
    for past in range(step - update_every, step):
        since_start = past - start_after
        decay = schedule.at(since_start) if since_start >= 0 else 0.0
        if not 0 <= decay < 1:
            raise InvalidValueError(
                f"{schedule!r} returned a decay outside [0, 1) at step {since_start}",
                key="decay",
                value=decay,
            )
        product *= decay
    return product
