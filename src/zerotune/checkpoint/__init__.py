"""Checkpoints without pickle: written atomically, and verified before loading."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
