"""What is learned and how images are drawn from it: objectives, families, data, sampling.

Every part works with an ``Engine`` and with a bare ``torch.nn.Module`` alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune._util.lazy import lazy_attribute
from zerotune.backend.adapters import AdapterFacts
from zerotune.backend.trained_parts import TrainedParts
from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.data import (
    Batch,
    BatchStream,
    DataStream,
    ImageTensors,
    RepeatedBatches,
)
from zerotune.diffusion.encoding import encode_dataset
from zerotune.diffusion.families.flux import Flux
from zerotune.diffusion.families.stable_diffusion import StableDiffusion
from zerotune.diffusion.families.stable_diffusion_3 import StableDiffusion3
from zerotune.diffusion.families.stable_diffusion_xl import StableDiffusionXL
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.families.unconditional import ClassConditional, Unconditional
from zerotune.diffusion.family import (
    Conditioning,
    Denoiser,
    Drawing,
    Family,
    LabelFamily,
    PromptFamily,
)
from zerotune.diffusion.grid import images_to_grid
from zerotune.diffusion.held_out import HeldOutLoss, validation_loss
from zerotune.diffusion.lora import LoRA, add_lora, load_adapters
from zerotune.diffusion.noise import (
    DrawnNoise,
    GaussianNoise,
    InputPerturbation,
    Noise,
    OffsetNoise,
)
from zerotune.diffusion.noise_schedule import ResolutionShift, Shift
from zerotune.diffusion.objective import (
    DenoisingObjective,
    FlowMatchingObjective,
    LevelObjective,
    Objective,
)
from zerotune.diffusion.pipeline import FrozenParts
from zerotune.diffusion.pretrained import FAMILIES, Pretrained, load_pretrained
from zerotune.diffusion.sampling import sample

if TYPE_CHECKING:
    from zerotune.diffusion.data import PriorPreservation

__all__ = [
    "Objective",
    "DenoisingObjective",
    "FlowMatchingObjective",
    "LevelObjective",
    "Noise",
    "DrawnNoise",
    "GaussianNoise",
    "OffsetNoise",
    "InputPerturbation",
    "Shift",
    "ResolutionShift",
    "load_pretrained",
    "Pretrained",
    "FAMILIES",
    "Family",
    "LabelFamily",
    "PromptFamily",
    "Unconditional",
    "ClassConditional",
    "TextToImage",
    "StableDiffusion",
    "StableDiffusionXL",
    "StableDiffusion3",
    "Flux",
    "LoRA",
    "add_lora",
    "load_adapters",
    "AdapterFacts",
    "ActivationOffload",
    "TrainedParts",
    "FrozenParts",
    "encode_dataset",
    "Drawing",
    "Conditioning",
    "Denoiser",
    "Batch",
    "BatchStream",
    "DataStream",
    "RepeatedBatches",
    "PriorPreservation",
    "ImageTensors",
    "sample",
    "validation_loss",
    "HeldOutLoss",
    "images_to_grid",
]

_LATE = {"PriorPreservation": "data"}

__getattr__ = lazy_attribute(globals(), _LATE)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
