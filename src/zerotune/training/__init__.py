"""Trainer, training loop, callbacks, reports and memory checks.

Names are loaded on first use, so importing this package does not load torch.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
