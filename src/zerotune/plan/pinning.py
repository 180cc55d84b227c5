"""Whether page-locked host memory keeps its size.

torch rounds each page-locked block up to a power of two, so that 9.6 GiB take 16. Newer releases
take a size from which on they do not (``pinned_max_round_threshold_mb``), and the backend sets it
before an engine starts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from zerotune.platform import Platform

SETTING: Final = "pinned_max_round_threshold_mb"
"""Key of ``PYTORCH_ALLOC_CONF``; MiB from which on a block keeps its size."""
THRESHOLD: Final = 1
"""Smaller blocks are still rounded, which lets torch use them again."""
OLDEST_TORCH: Final = (2, 13)
"""First release that was read and has the setting; the backend tries it with older ones too."""
ROUNDING: Final = frozenset({"cuda", "rocm"})
"""Accelerators on which torch page-locks memory through this allocator."""


def pins_exactly(platform: Platform) -> bool:
    """Whether blocks keep their size there, as far as can be said from here.

    Args:
        platform: Its version of torch decides; a machine that does not say is taken for current.
    """
    if platform.accelerator not in ROUNDING:
        return True
    version = platform.versions.get("torch")
    if version is None:
        return True
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH
