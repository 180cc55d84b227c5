"""Whole tensors of parameters that nobody trains, also where stage 3 has partitioned them."""

from __future__ import annotations

import sys

import torch


def whole_parameter(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A parameter in full, on the CPU, in the dtype the engine holds it in.

    Collective under ZeRO-3: every rank must call it, in the same order.
    """
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu()
    # Whoever partitioned it has imported DeepSpeed; a second import could choose otherwise.
    zero = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)
