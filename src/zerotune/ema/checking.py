"""Does the shadow do what it is for: is it complete, and does it follow the weights?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from zerotune.ema.arithmetic import squared_distance, squared_norm
from zerotune.errors import EMAError

if TYPE_CHECKING:
    from zerotune.backend.master_weights import MasterWeights

_ROUNDING = 2.0**-23
"""fp32 rounds each element of an update by at most this share of it."""


class UpdateWatch:
    """Measures one update of a shadow that must bring it closer to the weights.

    An update of decay ``d`` leaves ``d`` times the distance, but for rounding.

    Args:
        decay: Share of the shadow the update keeps.
    """

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        self._before = self._after = self._norm = 0.0

    def before(self, shadow: torch.Tensor, value: torch.Tensor) -> None:
        """Measure a fragment that is about to be updated."""
        self._before += squared_distance(shadow, value)
        self._norm += squared_norm(value)

    def after(self, shadow: torch.Tensor, value: torch.Tensor) -> None:
        """Measure a fragment that has been updated."""
        self._after += squared_distance(shadow, value)

    def verdict(self) -> bool:
        """Whether the update proves that the shadow follows the weights.

        ``False`` when it proves nothing, because the weights have not moved enough to be seen: a
        warm-up begins with a learning rate of zero.

        Raises:
            EMAError: The shadow did not come closer, or something is not finite.
        """
        before, after = math.sqrt(self._before), math.sqrt(self._after)
        allowed = self._decay * before + _ROUNDING * math.sqrt(self._norm)
        if not math.isfinite(after + before):
            raise EMAError(
                "the weights or the shadow are not finite",
                key="ema.step()",
                fix="clip gradients or lower the learning rate, and make the shadow anew",
            )
        if after > allowed:
            raise EMAError(
                f"an update of decay {self._decay:.6g} took the shadow from {before:.4g} to "
                f"{after:.4g} away from the weights; {allowed:.4g} was expected",
                key="ema.step()",
                fix="let nothing else write to the shadow or to the weights during the update",
            )
        return allowed < before


def check_complete(master: MasterWeights, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the ranks hold every element of every trainable parameter between them.

    Collective: every rank must call it.

    Raises:
        EMAError: There is nothing to average, or elements are missing, as at stage 3 when a
            partitioned module is taken for a whole one.
    """
    parameters = master.parameters
    if not parameters:
        raise EMAError(
            "there is no trainable parameter to average",
            key="attach",
            fix="call requires_grad_(True) on what should be trained before attaching",
        )
    total = sum(math.prod(shape) for shape in parameters.values())
    owned = master.group.gather(sum(tensor.numel() for tensor in tensors.values()))
    held = owned[master.group.rank] if master.replicated else sum(owned)
    if held != total:
        raise EMAError(
            f"the ranks hold {held} of {total} elements of the trainable parameters",
            key="attach",
            value=owned,
            fix="attach on every rank after the engine was built, or report this with the plan",
        )
