"""The memory model's table of states agrees with the catalogue."""

from __future__ import annotations

import pytest

from zerotune.optim.catalogue import OPTIMIZERS
from zerotune.plan.optimizer_states import is_known, states_per_element

# A state of another size than the parameter: Adafactor's factors, 8-bit blocks, Muon's one moment
# for matrices beside Adam's two for the rest.
OTHER_SIZES = {"Adafactor", "AdamW8bit", "TorchAOAdamW8bit", "TorchAOAdamW4bit", "Muon"}
ARGUMENTS = ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True})


def cases():
    for name, entry in sorted(OPTIMIZERS.items()):
        if name not in OTHER_SIZES and is_known(name):
            for params in ARGUMENTS:
                if set(params) <= set(entry.parameter_names):
                    yield pytest.param(name, params, id=f"{name}-{'-'.join(params)}")


@pytest.mark.parametrize(("name", "params"), list(cases()))
def test_states_are_those_of_the_catalogue(name, params):
    assert states_per_element(name, params) == len(OPTIMIZERS[name].states_for(params))


def test_every_optimizer_is_in_the_table():
    missing = {name for name in OPTIMIZERS if not is_known(name)}
    # L-BFGS keeps a history of steps, whose length is an argument.
    assert missing <= {"LBFGS"}
