"""One update of one shadow, fragment by fragment, whoever iterates over the fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zerotune.ema.checking import UpdateWatch

if TYPE_CHECKING:
    from zerotune.backend.master_weights import Fragment, MasterWeights
    from zerotune.ema.shadow import EMAShadow


class ShadowUpdate:
    """Takes in the fragments of one step.

    Args:
        tensors: The shadow, by the fragments' keys.
        decay: Share of the shadow the update keeps.
        watch: Measures whether the shadow comes closer; ``None`` to trust it.
        done: Called at the end with whether the update proved that the shadow follows.
    """

    def __init__(
        self,
        *,
        tensors: Mapping[str, torch.Tensor],
        decay: float,
        watch: UpdateWatch | None,
        done: Callable[[bool], None],
    ) -> None:
        self._tensors, self._decay, self._watch, self._done = tensors, decay, watch, done

    @torch.no_grad()
    def take(self, fragment: Fragment) -> None:
        """Move the fragment's part of the shadow towards the weights."""
        shadow = self._tensors[fragment.address.key]
        value = fragment.value.to(shadow.device)
        if self._watch is not None:
            self._watch.before(shadow, value)
        shadow.lerp_(value, 1.0 - self._decay)
        if self._watch is not None:
            self._watch.after(shadow, value)

    def finish(self) -> None:
        """Judge the update.

        Raises:
            EMAError: The shadow is farther from the weights than it was.
        """
        self._done(self._watch is not None and self._watch.verdict())


def update_together(*shadows: EMAShadow) -> None:
    """One step of several shadows of the same weights, in one pass over the fragments.

    At NVMe offload every pass brings the master weights in once.

    Raises:
        EMAError: As ``EMAShadow.step``.
    """
    updates = [update for shadow in shadows if (update := shadow.begin_update()) is not None]
    if updates:
        apply_updates(shadows[0].source, updates)


def apply_updates(master: MasterWeights, updates: Sequence[ShadowUpdate]) -> None:
    """Give every fragment to every update, and judge them."""
    for fragment in master.read():
        for update in updates:
            update.take(fragment)
    for update in updates:
        update.finish()
