"""An exponential moving average that lives where the fp32 master weights live."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
