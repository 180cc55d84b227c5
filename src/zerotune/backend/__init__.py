"""Engines, verification and master weights.

This package contains all code that uses deepspeed or accelerate.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
