"""Walk the modules of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def every_module(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all modules inside it, several times faster than ``modules()``.

    Args:
        module: The outermost module.
    """
    found, seen = [module], {module}
    for each in found:
        for child in each._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def every_parameter(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield all parameters of a model; one that several modules share is yielded for each.

    Args:
        module: The outermost module.
    """
    for each in every_module(module):
        yield from (parameter for parameter in each._parameters.values() if parameter is not None)
