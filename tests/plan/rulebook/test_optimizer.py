from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, read, zero
from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.platform import Platform

LINEAR = ModelFacts.from_shapes([("a.weight", (8, 8)), ("a.bias", (8,))])


def muon(**keys):
    return {**zero(**keys), "optimizer": {"type": "Muon"}}


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"stage": 3}, 1),
        ({"stage": 3, "reduce_scatter": True}, 1),
        ({"stage": 3, "reduce_scatter": False}, 0),
        ({"stage": 2}, 0),
    ],
)
def test_muon_reduce_scatter(keys, found):
    assert len(find("muon-reduce-scatter", muon(**keys))) == found
    assert find("muon-reduce-scatter", {**muon(**keys), "optimizer": {"type": "AdamW"}}) == []


@pytest.mark.parametrize(("stage", "found"), [(1, 0), (2, 1), (3, 1)])
def test_muon_convolutions(stage, found, unet):
    findings = find("muon-convolutions", muon(stage=stage), model=unet)
    assert len(findings) == found
    if found:
        assert "conv_in.weight" in findings[0].reason
    assert find("muon-convolutions", muon(stage=stage), model=LINEAR) == []
    assert find("muon-convolutions", muon(stage=stage)) == []


@pytest.mark.parametrize(
    ("config", "launch", "run", "found"),
    [
        ({}, {}, {}, 1),
        ({"gradient_clipping": 0}, {}, {}, 0),
        ({"gradient_clipping": "auto"}, {}, {}, 0),
        ({}, {"gradient_clipping": 1.0}, {}, 0),
        ({}, {}, {"gradient_clipping": 0.0}, 0),
    ],
)
def test_clipping_unset(config, launch, run, found):
    assert len(find("clipping-unset", read(config, **launch), run=RunFacts(**run))) == found


@pytest.mark.parametrize("norm", [1, None])
def test_clipping_among_the_arguments_of_the_optimizer(norm):
    config = {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": norm}}}
    found = one("clipping-in-optimizer", config)
    assert (found.severity, found.key) == ("error", "optimizer.params.max_grad_norm")
    assert "gradient_clipping at the top level" in found.fix
    assert find("clipping-in-optimizer", {"optimizer": {"type": "AdamW"}}) == []


SPELLINGS = ["AdamW", "adamw", "ADAM", "Lion", "SGD", "RMSprop", "Adafactor"]
REJECTED = [
    "adamw_torch",
    "AdamW_torch_fused",
    "FusedAdam",
    "DeepSpeedCPUAdam",
]


@pytest.mark.parametrize("name", [*SPELLINGS, *REJECTED])
def test_a_spelling_that_deepspeed_rejects(name):
    findings = find("optimizer-spelling", {"optimizer": {"type": name, "params": {"lr": 1e-4}}})
    assert bool(findings) == (name in REJECTED)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", [*SPELLINGS, *REJECTED])
def test_deepspeed_rejects_the_same_spellings(name):
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = {"train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": 1e-4}}}
    read = DeepSpeedConfig(config).optimizer_name
    assert DeepSpeedEngine._is_supported_optimizer(None, read) == (name in SPELLINGS)


@pytest.mark.parametrize("name", ["AdamW8bit", "Prodigy", "AdamWBF16States", "OneBitAdam"])
def test_the_spelling_of_an_optimizer_that_deepspeed_lacks_is_not_reported(name):
    assert find("optimizer-spelling", {"optimizer": {"type": name}}) == []


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        ({"type": "AdamW"}, True),
        ({"type": "AdamW", "params": {}}, True),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.99]}}, False),
        ({"type": "Adam", "params": {}}, False),
    ],
)
def test_defaults_that_differ_from_deepspeeds(optimizer, decay):
    plan = DeepSpeedPlan.from_dict({"optimizer": optimizer})
    finding = one("optimizer-lr-unset", plan)
    assert ("weight decay" in finding.reason) == decay
    ours = plan.resolve(platform=Platform.synthetic("cuda")).optimizer.params
    assert (ours["lr"], ours["weight_decay"]) == (1e-4, 0.01 if decay else 0.0)
    assert "0.0001" in finding.reason


@pytest.mark.deepspeed
def test_the_defaults_that_deepspeeds_adam_has():
    import inspect

    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    for each in (DeepSpeedCPUAdam, FusedAdam):
        defaults = inspect.signature(each).parameters
        assert (defaults["lr"].default, defaults["weight_decay"].default) == (1e-3, 0)


@pytest.mark.parametrize(
    ("config", "run"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, {}),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}),
        ({"optimizer": {"type": "AdamW"}}, {"lr": 1e-4}),
        ({}, {}),
    ],
)
def test_a_learning_rate_that_is_set_has_no_other_default(config, run):
    assert find("optimizer-lr-unset", config, run=RunFacts(**run)) == []
