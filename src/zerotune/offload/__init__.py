"""Swap folders: each run creates and locks a separate folder inside a shared root.

This package needs neither torch nor DeepSpeed: it only manages paths and locks.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
