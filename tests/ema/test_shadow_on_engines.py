"""EMAShadow on the real engines: parity with float64, exact swapping."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.ema.engines import follow
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case
from tests.support.sampling import nightly
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError

# Partition every parameter of the tiny model, in several sub-groups.
PARTITIONED = (("sub_group_size", 100), ("stage3_param_persistence_threshold", 0))
PERSISTENT = (("sub_group_size", 100), ("stage3_param_persistence_threshold", 20))

CASES = [
    (attrs.evolve(PLAIN, precision="bf16"), 2),
    (Case(stage=2, offload="cpu", precision="bf16"), 2),
    (Case(stage=3, offload="cpu", precision="bf16", overrides=PERSISTENT, engine="deepspeed"), 1),
]
NIGHTLY = [
    (PLAIN, 1),
    (Case(stage=0, precision="bf16"), 1),
    (Case(stage=1), 2),
    (Case(stage=3, overrides=PARTITIONED), 2),
    (Case(stage=2, precision="bf16"), 1),
    (Case(stage=1, offload="cpu", precision="bf16"), 1),
    (Case(stage=2), 2),
    (Case(stage=3, offload="cpu", overrides=PARTITIONED), 2),
    (Case(stage=3, precision="bf16", overrides=PARTITIONED), 1),
]


def check(results: list[dict[str, Any]]) -> None:
    for seen in results:
        assert seen["fast"] <= 1e-6
        assert seen["slow"] <= 1e-6
        claims = {name: value for name, value in seen.items() if isinstance(value, bool)}
        claims.pop("replicated")
        assert all(claims.values()), claims
        assert 0 < seen["distance"] == results[0]["distance"] < 1
    share = sum(seen["nbytes"] for seen in results)
    copies = len(results) if results[0]["replicated"] else 1
    # 4 bytes per element over all ranks, without duplicates or padding.
    assert share == 4 * results[0]["numel"] * copies


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("case", "world_size"),
    [*CASES, *nightly(*NIGHTLY)],
    ids=str,
)
def test_the_shadow_follows_the_weights_and_swaps_with_them_exactly(case, world_size):
    results = run_ranks(follow, case, world_size=world_size)
    check(results)
    for seen in results:
        assert seen["replicated"] == (case.stage == 0)
        if case.overrides == PARTITIONED:
            assert not seen["whole"]
        elif case.overrides == PERSISTENT:
            assert 0 < len(seen["whole"]) < 9


@pytest.mark.deepspeed
@ranks(2)
def test_master_weights_that_deepspeed_confuses_are_refused():
    import deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 7))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    with pytest.raises(EngineError, match="round_robin_gradients"):
        EMAShadow(decay=0.9).attach(engine)
    engine.destroy()


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize(
    ("precision", "world_size"),
    [("fp32", 2), *nightly(("bf16", 2))],
)
def test_the_shadow_follows_weights_on_nvme(precision, world_size, tmp_path):
    case = Case(
        stage=3,
        precision=precision,
        offload="nvme",
        offload_param="nvme",
        nvme_path=str(tmp_path),
        overrides=(("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0)),
    )
    results = run_ranks(follow, case, world_size=world_size)
    check(results)
    assert all(seen["swapped"] >= 2 and not seen["whole"] for seen in results)
