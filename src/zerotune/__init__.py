"""Train diffusion models with ZeRO offload, and explain every automatic choice.

Each object works on its own in your training loop; ``Trainer`` combines them. Names are loaded on
first use: importing zerotune loads neither torch nor deepspeed and changes nothing in the process.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__version__ = "0.1.0"

__all__, __dir__, __getattr__ = exports(__name__, __file__)
