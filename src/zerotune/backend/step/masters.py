"""``Masters``: the fp32 weights that an optimizer in host memory steps, whole or split.

Split, a master weight is the bf16 weight that the model computes with and its own low 16 bits: 2
bytes less. Rounding to nearest adds half a unit and cuts the low bits off, so a low half above
0x8000 says that the bf16 weight was rounded up. Exactly 0x8000 lies halfway and is rounded to the
even number, up or down; where that is up, 0x8001 is kept. So one master weight in 2 ** 17 becomes
one unit in its last place more, whose bf16 weight is the same; all others keep every bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import attrs
import torch
from typing_extensions import override

_TIE = 0x8000
_LOW = 0xFFFF
_AT_ONCE = 2**20
"""Elements that are joined or split at a time, whose temporaries take 16 bytes each."""


class Masters(ABC):
    """Flat fp32 weights, however they are kept."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What the compiled functions take them by: ``weight``, or ``high`` and ``low``."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """Elements."""

    @abstractmethod
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        """Elements in fp32: a view where they are kept so, else a copy."""

    @abstractmethod
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        """Set elements to fp32 values; those that ``read`` returned, changed in place, too."""


@attrs.frozen(eq=False)
class WholeMasters(Masters):
    """Weights in fp32."""

    weight: torch.Tensor
    """fp32, 1-D."""

    @property
    @override
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"weight": self.weight}

    @property
    @override
    def numel(self) -> int:
        return self.weight.numel()

    @override
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        return self.weight[part]

    @override
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        if values.data_ptr() != self.weight[part].data_ptr():
            self.weight[part].copy_(values)


@attrs.frozen(kw_only=True, eq=False)
class SplitMasters(Masters):
    """Weights whose upper halves are bf16 weights."""

    high: torch.Tensor
    """bf16, 1-D: the fp32 weights rounded to nearest."""
    low: torch.Tensor
    """int16, 1-D: their low halves."""

    @property
    @override
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"high": self.high, "low": self.low}

    @property
    @override
    def numel(self) -> int:
        return self.low.numel()

    @override
    def read(self, part: slice = slice(None)) -> torch.Tensor:
        high, low = self.high[part], self.low[part]
        found = torch.empty(low.numel(), dtype=torch.float32)
        pieces = (torch.split(each, _AT_ONCE) for each in (high, low, found))
        for above, below, into in zip(*pieces, strict=True):
            half = below.int() & _LOW
            bits = (above.view(torch.int16).int() - (half > _TIE).int()) << 16
            into.view(torch.int32).copy_(bits | half)
        return found

    @override
    def write(self, values: torch.Tensor, part: slice = slice(None)) -> None:
        kept = values, self.high[part], self.low[part]
        pieces = (torch.split(each, _AT_ONCE) for each in kept)
        for value, above, below in zip(*pieces, strict=True):
            bits = value.view(torch.int32)
            half = bits & _LOW
            below.copy_(half + ((half == _TIE) & ((bits >> 16) & 1).bool()).int())
            above.copy_(value)
