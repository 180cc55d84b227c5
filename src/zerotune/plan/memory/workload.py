"""What one training step works on, as far as memory is concerned."""

from __future__ import annotations

from typing import Literal

import attrs

EMAPlace = Literal["none", "host", "device", "nvme"]


@attrs.frozen(kw_only=True)
class Workload:
    """Batch, resolution and what runs beside the optimizer."""

    batch: int = 1
    """Samples per forward pass and rank."""
    height: int | None = None
    """Pixels; ``None``: the activations are not estimated."""
    width: int | None = None
    """Pixels."""
    gradient_checkpointing: bool = True
    """Whether blocks are recomputed in the backward pass."""
    activation_offload: bool = False
    """Whether the inputs of recomputed blocks wait in host memory, as ``ActivationOffload`` does
    it; without gradient checkpointing it has no effect."""
    ema: EMAPlace = "none"
    """Where an ``EMAShadow`` keeps its fp32 copy."""
    frozen_bytes: int = 0
    """Bytes of frozen parts (VAE, text encoders) that stay on the device."""
    ranks_per_machine: int | None = None
    """Processes that share the host RAM; ``None``: all of them."""
    exact_pinning: bool | None = None
    """Whether page-locked blocks keep their size, as with ``DS_PIN_MEMORY_BACKEND=native`` or
    torch's ``pinned_max_round_threshold_mb``; else each is rounded up to a power of two.
    ``None``: as the platform's torch can, since the backend asks it to."""
