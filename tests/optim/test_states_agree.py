"""The memory model's table and the catalogue say the same of every optimizer's states."""

from __future__ import annotations

import pytest

from zerotune.optim import OPTIMIZERS
from zerotune.plan.memory import states as optimizer_states

# States that are smaller than the parameter: factored, or of fewer bits.
SMALLER = {"Adafactor", "AdamW8bit"}
# Small only in tensors of whole blocks, which a ZeRO partition rarely is; counted as fp32.
SELDOM_SMALLER = {"TorchAOAdamW8bit", "TorchAOAdamW4bit"}
# Two bytes a number, where the table counts in fp32.
HALF = {"AdamWBF16States"}
# LBFGS keeps a history of gradients, which no engine here runs.
NOT_COUNTED = {"LBFGS"}


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - NOT_COUNTED))
@pytest.mark.parametrize("params", [{}, {"momentum": 0.9}, {"amsgrad": True}], ids=str)
def test_states_per_element(name, params):
    entry = OPTIMIZERS[name]
    params = {key: value for key, value in params.items() if entry.parameter(key)}
    assert optimizer_states.is_known(name)
    table = optimizer_states.states_per_element(name, params)
    if name in SMALLER:
        assert 0 < table < 1
    elif name in HALF:
        assert table == len(entry.states_for(params)) / 2
    elif name in SELDOM_SMALLER:
        assert table == 2
    elif name == "Muon":
        # One moment for matrices, Adam's two for the rest; the table takes the larger.
        assert table == 2 > len(entry.states_for(params))
    else:
        assert table == len(entry.states_for(params))
