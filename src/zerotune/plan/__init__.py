"""Plans: what a DeepSpeed configuration says, what will run, and why.

Values only: nothing here loads torch or deepspeed. Names are loaded on first use.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
