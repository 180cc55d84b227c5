from __future__ import annotations

import pytest

from zerotune.plan.optimizer.catalogue import OPTIMIZERS


@pytest.mark.parametrize(
    ("name", "params", "states"),
    [
        ("AdamW", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
        # One moment for matrices, two (Adam) for the rest.
        ("Muon", {}, 2),
        # Two states of two bytes each count as one.
        ("AdamWBF16States", {}, 1),
        # torchao quantizes only states of whole blocks, and a ZeRO partition rarely consists of
        # those.
        ("TorchAOAdamW4bit", {}, 2),
    ],
)
def test_the_states_per_weight_follow_from_the_arguments(name, params, states):
    assert OPTIMIZERS[name].states_per_weight(params) == states


@pytest.mark.parametrize("name", ["Adafactor", "AdamW8bit"])
def test_factored_and_8_bit_states_take_few_bytes(name):
    assert 0 < OPTIMIZERS[name].states_per_weight() < 1
