"""Every random number of a run is fixed by one seed."""

from __future__ import annotations

import base64
import random

import numpy as np
import torch

from zerotune.diffusion.data import derive_seed


def seed_everything(seed: int, *, rank: int) -> torch.Generator:
    """Seed python, numpy and torch, and give this rank's generator for the objective.

    Ranks get different numbers, so that noise and dropout differ between them.

    Args:
        seed: The run's seed.
        rank: This process.

    Returns:
        A CPU generator.
    """
    random.seed(derive_seed(seed, "python", rank))
    np.random.seed(derive_seed(seed, "numpy", rank) % 2**32)
    torch.manual_seed(derive_seed(seed, "torch", rank))
    return torch.Generator().manual_seed(derive_seed(seed, "objective", rank))


def generator_to_text(generator: torch.Generator) -> str:
    """A generator's state as text, for JSON."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def generator_from_text(generator: torch.Generator, text: str) -> None:
    """Restore what ``generator_to_text`` gave."""
    generator.set_state(torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8))
