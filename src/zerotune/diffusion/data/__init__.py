"""Training data: image sources, aspect-ratio buckets, sample order and caches."""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
