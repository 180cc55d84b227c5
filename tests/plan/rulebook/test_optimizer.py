from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, read, zero
from zerotune.plan import ModelFacts, RunFacts

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
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, {}, {}, 0),
    ],
)
def test_clipping_unset(config, launch, run, found):
    assert len(find("clipping-unset", read(config, **launch), run=RunFacts(**run))) == found


def test_clipping_among_the_arguments_of_the_optimizer():
    config = {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}
    found = one("clipping-in-optimizer", config)
    assert (found.severity, found.key) == ("error", "optimizer.params.max_grad_norm")
    assert "gradient_clipping at the top level" in found.fix
    assert find("clipping-in-optimizer", {"optimizer": {"type": "AdamW"}}) == []


def test_clipping_unset_says_what_happens():
    assert "norm of 1.0" in one("clipping-unset", {}).reason
