"""Rank functions that compute a validation loss."""

from __future__ import annotations

from typing import Any

from tests.support.models import digits_batch, tiny_unet
from tests.support.runs import Case, start, unet_loss
from zerotune.diffusion import ClassConditional, FlowMatchingObjective, validation_loss
from zerotune.diffusion.held_out import HeldOutLoss

OBJECTIVE = FlowMatchingObjective(family=ClassConditional(null_label=10, dropout=0.3))


def held_out(sizes=(4, 4, 2)):
    batches = []
    for number, size in enumerate(sizes):
        images, labels = digits_batch(size, seed=50 + number)
        batches.append({"images": images, "labels": labels})
    return batches


def validate(model: Any) -> HeldOutLoss:
    return validation_loss(OBJECTIVE, model, held_out(), quantiles=(0.3, 0.7))


def validate_and_train(case: Case) -> tuple[list[HeldOutLoss], list[int]]:
    """Return the losses before and after a step, and the parameters' sizes afterwards."""
    engine = start(case, tiny_unet())
    figures = [validate(engine)]
    engine.backward(unet_loss(engine, 0))
    engine.step()
    figures.append(validate(engine))
    sizes = [parameter.numel() for parameter in engine.module.parameters()]
    engine.close()
    return figures, sizes
