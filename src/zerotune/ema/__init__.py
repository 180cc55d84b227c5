"""An exponential moving average that lives where the fp32 master weights live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune._util.lazy import lazy_attribute

if TYPE_CHECKING:
    from zerotune.ema.background import BackgroundEMA
    from zerotune.ema.decay import (
        ConstantDecay,
        DecaySchedule,
        HalfLife,
        RampDecay,
        WarmupDecay,
    )
    from zerotune.ema.model import EMAModel
    from zerotune.ema.shadow import EMAShadow, EMAShadows
    from zerotune.ema.store import DeviceStore, FileStore, HostStore, ShadowStore

# torch comes with what holds tensors only; the schedules are plain arithmetic.
_HOMES = {
    "BackgroundEMA": "background",
    "ConstantDecay": "decay",
    "DecaySchedule": "decay",
    "DeviceStore": "store",
    "EMAModel": "model",
    "EMAShadow": "shadow",
    "EMAShadows": "shadow",
    "FileStore": "store",
    "HalfLife": "decay",
    "HostStore": "store",
    "RampDecay": "decay",
    "ShadowStore": "store",
    "WarmupDecay": "decay",
}

__all__ = [
    "EMAShadow",
    "EMAShadows",
    "EMAModel",
    "BackgroundEMA",
    "ConstantDecay",
    "DecaySchedule",
    "DeviceStore",
    "FileStore",
    "HalfLife",
    "HostStore",
    "RampDecay",
    "ShadowStore",
    "WarmupDecay",
]

__getattr__ = lazy_attribute(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
