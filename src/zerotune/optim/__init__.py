"""Optimizers and schedules: names, facts, and what will really run.

Pure: neither torch nor deepspeed is imported.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
