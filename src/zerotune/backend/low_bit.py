"""States of bitsandbytes' 8-bit optimizers as numbers, for checkpoints and other readers.

bitsandbytes stores one code per weight, and one scale per block of 256 weights of the tensor that
the optimizer updates. Under ZeRO, this tensor is a partition, whose blocks are no part of any
parameter. Checkpoints therefore contain the decoded moments in fp32, which any layout and any Adam
can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from typing_extensions import override

from zerotune.backend.fragments import OptimizerStates, StateFormat
from zerotune.errors import CheckpointError

_MOMENTS: Final = {"exp_avg": "1", "exp_avg_sq": "2"}
"""Names of Adam's moments, and the suffix of each in the states of bitsandbytes."""
_BLOCK: Final = 256
_SMALLEST: Final = 1e-6
"""Lower bound of a codebook's most negative value; unsigned codebooks begin at 0."""


class BitsAndBytesStates(OptimizerStates, package="bitsandbytes"):
    """Moments of ``AdamW8bit``, decoded when read and encoded by ``write_back``.

    Encoding decoded moments restores every code; a block's scale may change by its last bit. Small
    tensors have fp32 moments, which do not change.
    """

    @property
    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, fp32, 1-D, copied; empty before the first step."""
        if not self._copies:
            self._copies = {name: decode(self._state, _MOMENTS[name]) for name in self.formats}
        return self._copies

    @property
    @override
    def formats(self) -> dict[str, StateFormat]:
        """Format of every moment that exists, by name."""
        found = (name for name, suffix in _MOMENTS.items() if f"state{suffix}" in self._state)
        return {name: StateFormat() for name in found}

    @property
    @override
    def scalars(self) -> dict[str, float]:
        """An empty dictionary; scales of blocks are no scalars."""
        return {}

    @property
    @override
    def others(self) -> tuple[str, ...]:
        """An empty tuple, because the moments contain codes, scales and codebooks."""
        return ()

    @override
    def write_back(self) -> None:
        """Encode the moments from ``tensors`` into the optimizer's states."""
        for name, copy in self._copies.items():
            encode(copy, self._writable, _MOMENTS[name])

    @override
    def create(self, names: tuple[str, ...]) -> None:
        """Create the states as the optimizer does at its first step."""
        optimizer: Any = self._optimizer
        # No state depends on a group's settings, and stage 3 empties groups outside of steps.
        group = optimizer.param_groups[0]
        members, group["params"] = group["params"], [self._key]
        try:
            optimizer.init_state(group, self._key, 0, 0)
        finally:
            group["params"] = members
        self._copies = {}


def decode(state: Mapping[str, Any], suffix: str) -> torch.Tensor:
    """Return a moment in fp32, 1-D.

    Args:
        state: The optimizer's state dict for one tensor.
        suffix: ``"1"`` or ``"2"``.

    Raises:
        CheckpointError: The codes are not contiguous, so that their blocks are unknown.
    """
    codes: torch.Tensor = state[f"state{suffix}"]
    if not codes.is_contiguous():
        raise CheckpointError(
            "the order of bitsandbytes' blocks depends on the device if weights are not "
            "contiguous, so their states cannot be saved",
            "remove memory_format=torch.channels_last, or use AdamW",
            f"state{suffix}",
            tuple(codes.shape),
        )
    if f"qmap{suffix}" not in state:
        return codes.clone().view(-1)
    scales = state[f"absmax{suffix}"].repeat_interleave(_BLOCK)[: codes.numel()]
    moment: torch.Tensor = state[f"qmap{suffix}"][codes.view(-1).int()]
    return moment.mul_(scales)


def encode(moment: torch.Tensor, state: Mapping[str, Any], suffix: str) -> None:
    """Set the codes and scales of a moment.

    Args:
        moment: Numbers in fp32, 1-D.
        state: The optimizer's state dict for one tensor; its tensors are changed in place.
        suffix: ``"1"`` or ``"2"``.
    """
    codes: torch.Tensor = state[f"state{suffix}"].view(-1)
    if f"qmap{suffix}" not in state:
        codes.copy_(moment)
        return
    book, scales = state[f"qmap{suffix}"], state[f"absmax{suffix}"]
    blocks = torch.nn.functional.pad(moment, (0, -moment.numel() % _BLOCK)).view(-1, _BLOCK)
    # A block's largest number has the code of 1, or the lowest code, whose value is above -1.
    low = blocks.amin(1).neg().clamp(min=0) / book[0].neg().clamp(min=_SMALLEST)
    scales.copy_(torch.maximum(blocks.amax(1), low))
    shares = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    nearest = torch.bucketize(shares, (book[:-1] + book[1:]) / 2)
    codes.copy_(nearest.view(-1)[: moment.numel()])
