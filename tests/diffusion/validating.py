"""What ranks do to compute a validation loss."""

from __future__ import annotations

from tests.support.models import digits_batch, tiny_unet
from tests.support.runs import Case, start, unet_loss
from zerotune.diffusion import ClassConditional, FlowMatchingObjective, validation_loss

OBJECTIVE = FlowMatchingObjective(family=ClassConditional(null_label=10, dropout=0.3))


def held_out(sizes=(4, 4, 2)):
    batches = []
    for number, size in enumerate(sizes):
        images, labels = digits_batch(size, seed=50 + number)
        batches.append({"images": images, "labels": labels})
    return batches


def validate_and_train(case: Case) -> tuple[list[dict[float, float]], list[int], list[float]]:
    """Figures before and after two steps, sizes of the parameters meanwhile, the steps' losses."""
    engine = start(case, tiny_unet())
    figures, losses = [], []
    for step in range(2):
        figures.append(validation_loss(OBJECTIVE, engine, held_out()).by_quantile)
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    figures.append(validation_loss(OBJECTIVE, engine, held_out()).by_quantile)
    sizes = [parameter.numel() for parameter in engine.module.parameters()]
    engine.close()
    return figures, sizes, losses
