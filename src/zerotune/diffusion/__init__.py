"""What is learned and how images are drawn from it: objectives, families, data, sampling.

Every part works with an ``Engine`` and with a bare ``torch.nn.Module`` alike.
"""

from __future__ import annotations

from zerotune.diffusion.data import Batch, BatchStream, DataStream, ImageTensors, RepeatedBatches
from zerotune.diffusion.families.base import Conditioning, Denoiser, Family
from zerotune.diffusion.families.unconditional import ClassConditional, Unconditional
from zerotune.diffusion.grid import images_to_grid
from zerotune.diffusion.objective import DenoisingObjective, FlowMatchingObjective, Objective
from zerotune.diffusion.sampling import sample

__all__ = [
    "Objective",
    "DenoisingObjective",
    "FlowMatchingObjective",
    "Family",
    "Unconditional",
    "ClassConditional",
    "Conditioning",
    "Denoiser",
    "Batch",
    "BatchStream",
    "DataStream",
    "RepeatedBatches",
    "ImageTensors",
    "sample",
    "images_to_grid",
]
