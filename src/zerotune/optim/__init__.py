"""Optimizers and schedules: what can run where, and what will; the names are ``optimizers``.

Pure: neither torch nor deepspeed is imported.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
