"""The plain engine's loss scale from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from zerotune.backend.plain import carried_scale


@pytest.mark.parametrize(
    "saved", [{}, {"scale": 8.0}, {"scale": 8.0, "_growth_tracker": 3, "growth_factor": 0, "x": 1}]
)
def test_a_loss_scale_is_restored_whatever_else_was_saved(saved):
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0)
    fresh = scaler.state_dict()
    scaler.load_state_dict(carried_scale(saved, fresh=fresh))
    assert scaler.get_scale() == saved.get("scale", 4.0)
    after = scaler.state_dict()
    assert after["_growth_tracker"] == saved.get("_growth_tracker", 0)
    assert after["growth_factor"] == fresh["growth_factor"]
