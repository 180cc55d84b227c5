"""How much a step reads from and writes to swap files.

Counted by the kernel (``/proc/self/io``) in real runs of DeepSpeed 0.19.8: the optimizer reads and
writes weight, gradient and states of every element once per step; parameters are read for the
forward and for the backward pass of each micro batch and written once per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from zerotune.errors import InvalidValueError
from zerotune.plan.kinds import is_number

if TYPE_CHECKING:
    from zerotune.plan.memory.values import MemoryEstimate


@attrs.frozen(kw_only=True)
class SwapTraffic:
    """Bytes of one rank and one optimizer step."""

    read: int
    written: int

    def seconds(self, *, read_rate: float, write_rate: float) -> float:
        """The least time a step spends on the disk, when nothing overlaps.

        Args:
            read_rate: Bytes per second, shared by the ranks of a machine.
            write_rate: Bytes per second, likewise.

        Raises:
            InvalidValueError: A rate that is not positive.
        """
        for key, rate in (("read_rate", read_rate), ("write_rate", write_rate)):
            if not is_number(rate) or rate <= 0:
                raise InvalidValueError(
                    "must be a positive number of bytes per second",
                    key=key,
                    value=rate,
                    fix="measure it with `zerotune offload bench ROOT`",
                )
        return self.read / read_rate + self.written / write_rate


def swap_traffic(estimate: MemoryEstimate) -> SwapTraffic:
    """What a step moves, from what lies in the files; zero without NVMe."""
    weights = optimizer = 0
    for item in estimate.items:
        if item.place == "nvme" and item.component == "weights":
            weights += item.nbytes
        elif item.place == "nvme" and item.component != "EMA":
            optimizer += item.nbytes
    passes = 2 * estimate.resolved.gradient_accumulation_steps
    return SwapTraffic(read=optimizer + passes * weights, written=optimizer + weights)
