"""Exponential moving averages of the fp32 master weights, computed on the ranks that own them."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
