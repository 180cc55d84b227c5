"""Optimizers that DeepSpeed lacks, has as CUDA kernels only, or not for every stage, in torch.

They take whole parameters as well as the flat shards of ZeRO: see ``ShardAware``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from zerotune.backend.optimizers.adamw_bf16_states import AdamWBF16States
from zerotune.backend.optimizers.classes import Lamb, Lion, Muon, ShardAware

CLASSES: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    "AdamWBF16States": AdamWBF16States,
    "Lion": Lion,
    "Lamb": Lamb,
    "Muon": Muon,
}
"""Classes by the name that ``OptimizerChoice.implementation`` gives them."""

__all__ = ["CLASSES", "AdamWBF16States", "Lamb", "Lion", "Muon", "ShardAware"]
