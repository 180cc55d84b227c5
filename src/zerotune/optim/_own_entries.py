"""Optimizers that only zerotune has."""

from __future__ import annotations

from typing import Final

from zerotune.optim.entries import ADAM_LR, OptimizerEntry, betas, eps, lr, weight_decay

OWN_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="AdamWBF16States",
        family="zerotune",
        summary="AdamW with fp32 master weights and its moments in bf16, stochastically rounded",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(1e-2)),
        states=("exp_avg", "exp_avg_sq"),
        adam_like=True,
    ),
)
