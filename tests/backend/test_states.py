"""Optimizer states moved into a fresh optimizer, for every kind in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import HostileNet
from zerotune.backend.deepspeed.external import master_weights_of
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.master_weights import MasterWeights, ParameterLayout
from zerotune.errors import EngineError

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "Adadelta": {"lr": 1e-1},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-2, "t0": 2, "lambd": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
}


def trained(name: str, steps: int, seed: int = 0) -> tuple[torch.nn.Module, Any, MasterWeights]:
    model = HostileNet(seed)
    optimizer = getattr(torch.optim, name)(
        [p for p in model.parameters() if p.requires_grad], **OPTIMIZERS.get(name, {"lr": 1e-2})
    )
    for step in range(steps):
        train(model, optimizer, step)
    layout = ParameterLayout(module=model, optimizer=optimizer)
    group = ProcessGroup.alone()
    return model, optimizer, MasterWeights(layout=layout, group=group, device=torch.device("cpu"))


def train(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    x = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(step))
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_continues_with_the_states_of_another(name):
    model, optimizer, master = trained(name, steps=3)
    twin, twin_optimizer, twin_master = trained(name, steps=0, seed=1)
    twin.frozen.load_state_dict(model.frozen.state_dict())
    assert not any(states.others for _, states in master.describe())
    with twin_master.editing() as fragments:
        for fragment, source in zip(fragments, master.read(), strict=True):
            fragment.value.copy_(source.value)
            fragment.ensure_states(tuple(source.states))
            for state, tensor in source.states.items():
                fragment.states[state].copy_(tensor)
            fragment.slab_states.set_scalars(source.scalars)
            if source.step is not None:
                fragment.set_step(source.step)
    for step in range(3, 7):
        train(model, optimizer, step)
        train(twin, twin_optimizer, step)
    expected = dict(master.gather())
    for parameter, full in twin_master.gather():
        assert torch.equal(full, expected[parameter]), parameter


def test_counters_of_a_whole_parameter_are_not_exposed_as_states():
    _, _, master = trained("NAdam", steps=2)
    for fragment in master.read():
        single = fragment.address.numel == 1
        assert set(fragment.states) == {"exp_avg", "exp_avg_sq"} | (
            {"mu_product"} if single else set()
        )
        assert set(fragment.scalars) == (set() if single else {"mu_product"})
        assert fragment.step == 2


def test_states_that_cannot_be_partitioned_are_named():
    _, _, master = trained("Adafactor", steps=1)
    others = {address.name: states.others for address, states in master.describe()}
    assert others["first.weight"] == ("row_var", "col_var")
    assert others["first.bias"] == ()


def test_no_states_exist_before_the_first_step():
    _, _, master = trained("AdamW", steps=0)
    for fragment in master.read():
        assert not fragment.states
        assert not fragment.scalars
        assert fragment.step is None


def test_a_module_without_an_optimizer_refuses_new_states():
    master = master_weights_of(HostileNet())
    with master.editing() as fragments:
        for fragment in fragments:
            assert not fragment.states
            assert fragment.step is None
            with pytest.raises(EngineError, match="no optimizer whose states"):
                fragment.ensure_states(("exp_avg",))


def test_iterating_over_fragments_does_not_change_the_grad_mode():
    _, _, master = trained("AdamW", steps=1)
    _, _, other = trained("AdamW", steps=1)
    for fragment, _ in zip(master.read(), other.read(), strict=True):
        assert torch.is_grad_enabled()
        assert not fragment.value.requires_grad
    next(master.read())
    assert torch.is_grad_enabled()
