"""Exponential moving averages on the fp32 master weights, on the rank that owns them."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
