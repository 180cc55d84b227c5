"""A model in evaluation mode for a while, whatever kind it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch


def evaluating(model: Any) -> AbstractContextManager[None]:
    """No gradients and evaluation mode inside of it; what was before is back afterwards.

    Args:
        model: An ``Engine`` or a ``torch.nn.Module``.
    """
    if hasattr(model, "evaluating"):
        return cast("AbstractContextManager[None]", model.evaluating())
    return _module_evaluating(model)


@contextmanager
def _module_evaluating(module: torch.nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
