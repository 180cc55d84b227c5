"""Objectives, model families, data pipelines and sampling.

All functions and classes work with an ``Engine`` and with a plain ``torch.nn.Module``.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
