"""Full tensors of a model, seen as one rank's state of a shadow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from zerotune.backend.master_weights import FragmentAddress


class FullState(Mapping[str, torch.Tensor]):
    """What ``EMAShadow.load_state_dict`` takes, cut out of full tensors one by one.

    Args:
        own: The shadow's own state, for what is not given.
        addresses: This rank's fragments.
        full: Full tensors by parameter name; ``None`` to keep the shadow's own.
        steps: Optimizer steps seen.
    """

    def __init__(
        self,
        *,
        own: Mapping[str, torch.Tensor],
        addresses: Sequence[FragmentAddress],
        full: Mapping[str, torch.Tensor] | None,
        steps: int,
    ) -> None:
        self._own, self._full, self._steps = own, full, steps
        self._addresses = {address.key: address for address in addresses}

    @staticmethod
    def gathered(values: Iterator[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Tensors by position, from pairs in any order."""
        return [value for _, value in sorted(values, key=lambda pair: pair[0])]

    @override
    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "steps":
            return torch.tensor(self._steps)
        if self._full is None:
            return self._own[key]
        address = self._addresses[key]
        return self._full[address.name].detach().reshape(-1)[address.start : address.stop]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    @override
    def __len__(self) -> int:
        return len(self._own)
