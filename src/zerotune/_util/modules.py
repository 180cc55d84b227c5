"""``ModelParts``: the modules and parameters of a model, walked again only after a change."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ModelParts:
    """The modules and parameters of a model, as of the last call of ``refresh``.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = [model]
        self.parameters: list[torch.nn.Parameter] = []
        """The parameters; one that several modules share is listed for each."""
        self._ids: list[int] = []

    def refresh(self) -> None:
        """Walk the model again, with new lists, if its modules or parameters have changed."""
        if self._ids == _ids_in(self.modules):
            return
        found, seen = self.modules[:1], {*self.modules[:1]}
        for each in found:
            for child in each._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    found.append(child)
        self.modules, self._ids = found, _ids_in(found)
        held = (each._parameters.values() for each in found)
        self.parameters = [one for some in held for one in some if one is not None]


def _ids_in(modules: Iterable[torch.nn.Module]) -> list[int]:
    # Ids stay unique, because modules and parameters of the last walk are referenced.
    held = (part for each in modules for part in (each._modules, each._parameters) if part)
    return [*map(id, chain.from_iterable(part.values() for part in held))]
