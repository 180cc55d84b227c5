"""Trainer, training loop, callbacks, reports and memory checks.

Names are loaded on first use, because this package imports torch.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
