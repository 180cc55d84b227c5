"""Checkpoints without pickle: whole or not there, checked before they are loaded."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
