"""``offload_optimizer.ratio`` below 1: part of the optimizer stays on the device.

The CPU accelerator has no second device, so that part gets host memory under another device's name;
everything else is DeepSpeed's own code path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import Case, start, unet_loss
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

pytestmark = pytest.mark.deepspeed

STEPS = 5
SUB_GROUP = 6_000
BESIDE = "cpu:0"


def case(ratio: float) -> Case:
    section = {"device": "cpu", "ratio": ratio}
    return Case(
        stage=3,
        precision="bf16",
        engine="deepspeed",
        overrides=(("sub_group_size", SUB_GROUP), ("offload_optimizer", section)),
    )


def train(ratio: float, folder: str | None = None) -> dict[str, Any]:
    """Train with part of the optimizer on the device and return the results."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from tests.support.models import tiny_unet

    original = DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions

    def share_out(self: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(get_accelerator(), "_name", BESIDE)
            original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer_Stage3, "_create_fp32_partitions", share_out)
        engine = start(case(ratio), tiny_unet())
    losses = []
    for step in range(STEPS):
        if folder is not None and step == STEPS - 2:
            come_back(engine, folder)
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    wrapper = engine._engine.optimizer
    found = {
        "losses": losses,
        "beside": [at == BESIDE for at in wrapper.subgroup_to_device.values()],
        "sizes": [slab.numel() for slab in wrapper.fp32_partitioned_groups_flat],
        "bytes": bytes_beside(wrapper),
        "steps": {fragment.step for fragment in engine.master_weights.read()},
        "decisions": {decision.key: decision.after for decision in engine.decisions},
    }
    engine.close()
    return found


def come_back(engine: Any, folder: str) -> None:
    """Save a checkpoint, overwrite weights and states, and load it."""
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    save_checkpoint(folder, engine=engine)
    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            fragment.value.zero_()
            for state in fragment.states.values():
                state.fill_(3.0)
    load_checkpoint(folder, engine=engine)


def bytes_beside(wrapper: Any) -> dict[str, int]:
    """Count bytes of weights, gradients and states of the sub-groups stepped on the device."""
    found = dict.fromkeys(("master weights", "gradients", "optimizer states"), 0)
    for index, slab in enumerate(wrapper.fp32_partitioned_groups_flat):
        if wrapper.subgroup_to_device[index] != BESIDE:
            continue
        found["master weights"] += slab.nbytes
        found["gradients"] += slab.grad.nbytes
        states = wrapper.optimizer.state.get(slab, {})
        for name in ("exp_avg", "exp_avg_sq"):
            found["optimizer states"] += states[name].nbytes if name in states else 0
    return found


def test_the_optimizers_share_on_the_device_follows_the_schedule_and_is_saved(
    tmp_path: Path,
) -> None:
    (whole,) = run_ranks(train, 1.0)
    (shared,) = run_ranks(train, 0.6, str(tmp_path / "checkpoint"))
    assert not any(whole["beside"])
    count = len(shared["beside"])
    assert count >= 5
    assert shared["beside"] == [index < int(0.4 * count) for index in range(count)]
    # Not bit-identical, since two implementations of AdamW are compared.
    assert shared["losses"] == pytest.approx(whole["losses"], rel=2e-4)
    assert shared["bytes"]["optimizer states"] > 0
    assert shared["steps"] == whole["steps"] == {STEPS}
    assert "zero_optimization.offload_optimizer.ratio" in shared["decisions"]
    assert shared["bytes"] == counted(shared)


def counted(real: dict[str, Any]) -> dict[str, int]:
    """Return the memory model's bytes for the same plan on a machine with a GPU."""
    from tests.support.models import tiny_unet

    estimate = DeepSpeedPlan.build(
        stage=3, precision="bf16", sub_group_size=SUB_GROUP, micro_batch_size=4,
        offload_optimizer={"device": "cpu", "ratio": 0.6},
    ).estimate(
        ModelFacts.from_module(tiny_unet()),
        platform=Platform.synthetic("cuda", vram=2**33, ram=2**35),
    )  # fmt: skip
    return {
        name: sum(
            item.nbytes
            for item in estimate.items
            if (item.component, item.place) == (name, "device")
        )
        for name in real["bytes"]
    }
