"""What this machine is: accelerator, memory, cores, versions, and whether DeepSpeed can run.

Importing this package loads neither torch nor deepspeed; ``detect_platform`` imports torch. What
looks at the machine is loaded on first use, so that describing one costs nothing. Compilers and
libraries are in ``zerotune.platform.toolchain``.
"""

from __future__ import annotations

from zerotune._util.lazy import exports

__all__, __dir__, __getattr__ = exports(__name__, __file__)
