"""The tables, compared with the real constructors that they describe."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from tests.support.needs import needs
from zerotune.plan.optimizer.capability import CONFIGURATION_ONLY
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.schedules import SCHEDULERS

# A DeepSpeed configuration spells Adam's switch adam_w_mode; differentiable has no use here.
LEFT_OUT = {"differentiable", "decoupled_weight_decay"}


@pytest.fixture(scope="module")
def deepspeed_module():
    """Import a module of DeepSpeed, which chooses its accelerator on import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed")
    return importlib.import_module


def defaults_of(cls):
    signature = inspect.signature(cls.__init__)
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in {"self", "params", "model_params"}
    }


def assert_describes(entry, cls, implementation):
    real = defaults_of(cls)
    ours = {
        item.name: item
        for item in entry.parameters
        if item.accepts(implementation) and item.name not in CONFIGURATION_ONLY
    }
    assert set(ours) <= set(real)
    assert set(real) - set(ours) <= LEFT_OUT | {"amsgrad", "adam_w_mode", "adamw_mode"}
    for name, parameter in ours.items():
        if name == "lr" or parameter.optional:
            continue
        assert parameter.unwritten == pytest.approx(real[name]), name


def test_the_catalogue_lists_every_torch_optimizer():
    public = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    } - {"Optimizer"}
    assert public <= OPTIMIZERS.keys()


TORCH_FAMILY = [
    name
    for name, entry in OPTIMIZERS.items()
    if entry.family == "torch" and name not in {"LBFGS", "Adafactor"}
]


@pytest.mark.parametrize("name", TORCH_FAMILY)
def test_torch_entries_match_the_constructors(name):
    assert_describes(OPTIMIZERS[name], getattr(torch.optim, name), name)


@pytest.mark.parametrize(
    ("name", "module", "implementation"),
    [
        ("AdamW", "deepspeed.ops.adam", "FusedAdam"),
        ("AdamW", "deepspeed.ops.adam", "DeepSpeedCPUAdam"),
        ("Adam", "deepspeed.ops.adam", "FusedAdam"),
        ("Adam", "deepspeed.ops.adam", "DeepSpeedCPUAdam"),
        ("Adam", "torch.optim", "Adam"),
        ("Adagrad", "torch.optim", "Adagrad"),
        ("Adagrad", "deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
        ("Lion", "deepspeed.ops.lion", "FusedLion"),
        ("Lion", "deepspeed.ops.lion", "DeepSpeedCPULion"),
    ],
)
def test_deepspeed_entries_match_the_constructors(deepspeed_module, name, module, implementation):
    cls = getattr(deepspeed_module(module), implementation)
    assert_describes(OPTIMIZERS[name], cls, implementation)


@pytest.mark.parametrize(
    "name", [name for name, entry in SCHEDULERS.items() if entry.source == "deepspeed"]
)
def test_schedules_match_the_constructors(deepspeed_module, name):
    lr_schedules = deepspeed_module("deepspeed.runtime.lr_schedules")
    parameters = inspect.signature(getattr(lr_schedules, name).__init__).parameters
    real = {key: item.default for key, item in parameters.items()}
    for ours in SCHEDULERS[name].parameters:
        default = real.pop(ours.name)
        # zerotune takes peaks from the optimizer and lengths from the run.
        if ours.name not in {"warmup_max_lr", "total_num_steps", "cycle_min_lr", "cycle_max_lr"}:
            assert ours.default == default, ours.name
    assert set(real) == {"self", "optimizer", "last_batch_iteration"}


@pytest.mark.parametrize("name", ["AdamWBF16States", "Lion", "Lamb", "Muon"])
def test_zerotunes_entries_match_the_constructors(name):
    from zerotune.backend.optimizers.client import CLASSES

    entry, real = OPTIMIZERS[name], inspect.signature(CLASSES[name].__init__).parameters
    taken = {p.name for p in entry.parameters if p.accepts(name)} - {"muon_lr", "adam_lr"}
    assert taken == set(real) - {"self", "params"}


LOW_BIT = "a large wheel for a back end that is optional; its cells are run by benchmarks"


@pytest.mark.parametrize(
    ("name", "may_lack"),
    [
        ("Prodigy", ""),
        ("AdamWScheduleFree", ""),
        ("AdamW8bit", LOW_BIT),
        ("TorchAOAdamW8bit", LOW_BIT),
        ("TorchAOAdamW4bit", LOW_BIT),
    ],
)
def test_package_entries_match_the_constructors(name, may_lack):
    entry = OPTIMIZERS[name]
    module = needs(entry.package, may_lack=may_lack)
    real = defaults_of(getattr(module, entry.implementation or name))
    assert set(entry.parameter_names) <= set(real)
    for parameter in entry.parameters:
        if not parameter.optional and parameter.name != "lr":
            assert parameter.unwritten == pytest.approx(real[parameter.name]), parameter.name


def states_after_one_step(optimizer_class, **params):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = optimizer_class([weight], lr=0.01, **params)
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    state = optimizer.state[weight]
    return {key for key, value in state.items() if getattr(value, "shape", ()) == weight.shape}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("Adagrad", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adadelta", {}),
        ("ASGD", {}),
        ("Rprop", {}),
    ],
)
def test_states_per_parameter_equal_those_that_torch_creates(name, params):
    real = states_after_one_step(getattr(torch.optim, name), **params)
    assert set(OPTIMIZERS[name].states_for(params)) == real
