"""An exponential moving average that lives where the fp32 master weights live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.ema.decay import (
        ConstantDecay,
        DecaySchedule,
        HalfLife,
        RampDecay,
        WarmupDecay,
    )
    from zerotune.ema.shadow import EMAShadow

__all__ = [
    "EMAShadow",
    "ConstantDecay",
    "DecaySchedule",
    "HalfLife",
    "RampDecay",
    "WarmupDecay",
]


def __getattr__(name: str) -> Any:
    # torch comes with the shadow only; the schedules are plain arithmetic.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "EMAShadow":
        from zerotune.ema import shadow

        return shadow.EMAShadow
    from zerotune.ema import decay

    return getattr(decay, name)


def __dir__() -> list[str]:
    return sorted(__all__)
