"""A model that another one is trained through, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zerotune.backend.engine import Engine


@contextmanager
def frozen(engine: Engine) -> Iterator[torch.nn.Module]:
    """The model of an engine, through which gradients pass while none stay in it.

    For a loss of one engine that runs through the model of another, such as a generator's
    through its critic; forward and backward belong into the block::

        with frozen(critic) as judge:
            loss = -judge(made).mean()
            generator.backward(loss)
        generator.step()

    Not through the engine itself: DeepSpeed takes every backward pass through an engine's output
    for one of that engine's own.
    """
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield engine.module
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
