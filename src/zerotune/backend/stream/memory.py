"""``HostMemory``: where units lie, and which of their elements this process steps."""

from __future__ import annotations

import torch


class HostMemory:
    """Memory of this process alone, which steps all of it.

    Args:
        pin: Whether to page-lock it.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, for what only this process has."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self._pin)

    def weights(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, for the weights of a unit; zeros."""
        return self.zeros(numel, dtype)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy weights into some of what ``weights`` returned."""
        target.copy_(source)

    def filled(self) -> None:
        """Return once a unit's weights are all there."""

    def share(self, span: slice) -> slice:
        """Of elements that one group steps, those that this process does."""
        return span

    def keep(self, weights: torch.Tensor) -> torch.Tensor:
        """What ``weights`` returned, for the time after the engine."""
        return weights
