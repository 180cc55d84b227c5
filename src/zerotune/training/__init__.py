"""Training: the wiring of all parts, and what a loop wants around it.

Loaded late, because it brings torch with it.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
