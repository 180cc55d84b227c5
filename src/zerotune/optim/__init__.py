"""Decide which optimizers can run, and choose the optimizer and schedule for a run.

This package imports neither torch nor deepspeed.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
