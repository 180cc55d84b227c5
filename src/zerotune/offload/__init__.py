"""Swap folders that one run owns, inside a root that many may share.

Needs neither torch nor DeepSpeed: it hands out paths and holds locks.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
