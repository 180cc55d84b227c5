"""Plans: what a DeepSpeed configuration requests, what will run, and why.

This package imports neither torch nor deepspeed. Its modules are imported on first use.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
