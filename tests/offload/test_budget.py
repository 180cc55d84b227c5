"""Host memory: the needs of a plan, compared with the memory of a machine."""

from __future__ import annotations

import attrs
import psutil
import pytest
import torch

from zerotune.errors import OffloadError
from zerotune.offload import OffloadManager
from zerotune.offload.space import check_host_memory, host_budget
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform
from zerotune.training.setup import start_hosted

GIB = 1024**3
MODEL = ModelFacts.from_shapes([(f"layer{n}.weight", (4096, 4096)) for n in range(12)])


def machine(gib, *, accelerator="cuda", lockable=None, torch="2.9.1"):
    # Assume a torch that rounds page-locked blocks up to powers of two, unless a test changes it.
    platform = Platform.synthetic(accelerator, versions={"torch": torch})
    memory = attrs.evolve(platform.host_memory, available=int(gib * GIB), total=int(gib * GIB))
    return attrs.evolve(platform, host_memory=memory, memlock_limit=lockable)


def resolved(platform, *, stage=2, offload="cpu", world_size=1, model=MODEL, **zero):
    plan = DeepSpeedPlan.build(stage=stage, offload=offload, precision="bf16", **zero)
    found = plan.resolve(platform=platform, model=model, world_size=world_size)
    return OptimizerResolver().resolve(found)


def test_enough_memory_gives_a_note_with_the_numbers():
    plan = resolved(machine(64))
    (note,) = check_host_memory(plan, ranks=1, held=0)
    assert note.severity == "note"
    assert "64.00 GiB available" in note.reason


def test_the_needs_of_ranks_add_up_and_allocated_memory_is_subtracted():
    one = host_budget(resolved(machine(64)), ranks=1, held=0)
    two = host_budget(resolved(machine(64)), ranks=2, held=0)
    assert two.needed == 2 * one.needed
    held = host_budget(resolved(machine(64)), ranks=2, held=GIB)
    assert held.needed == two.needed - 2 * GIB
    assert host_budget(resolved(machine(64)), ranks=1, held=10**15).needed == 0


def test_pinned_memory_is_rounded_up_unless_deepspeed_pins_it_itself():
    plan = resolved(machine(64))
    torch = host_budget(plan, ranks=1, held=0, environ={})
    native = host_budget(plan, ranks=1, held=0, environ={"DS_PIN_MEMORY_BACKEND": " Native "})
    assert torch.pinned > native.pinned > 0
    # 12 x 16.8 million elements of 4 bytes are 0.75 GiB, which torch rounds up to 1 GiB.
    assert (torch.pinned - native.pinned) % (GIB // 8) == 0
    assert torch.locked == 0
    assert native.locked == native.pinned
    newer = host_budget(resolved(machine(64, torch="2.13.0")), ranks=1, held=0, environ={})
    assert (newer.pinned, newer.locked) == (native.pinned, 0)


def test_a_plan_that_needs_too_much_is_refused_with_a_remedy():
    plan = resolved(machine(1.5))
    with pytest.raises(OffloadError) as caught:
        check_host_memory(plan, ranks=1, held=0)
    error = caught.value
    assert error.key == "offload.host_memory"
    assert "1 rank(s) x" in error.reason
    assert "1.50 GiB available" in error.reason
    for way in ("pin_memory to false", "DS_PIN_MEMORY_BACKEND=native", "NVMe at stage 3"):
        assert way in error.fix


def test_exceeding_the_memlock_limit_is_refused():
    plan = resolved(machine(64, lockable=8 * 1024**2), stage=3, offload="nvme")
    with pytest.raises(OffloadError, match=r"may lock only 8\.00 MiB.*ulimit -l"):
        check_host_memory(plan, ranks=1, held=0)
    assert check_host_memory(resolved(machine(64, lockable=1)), ranks=1, held=0)


def test_without_a_model_the_needs_are_unknown():
    plan = resolved(machine(0.001), model=None)
    (note,) = check_host_memory(plan, ranks=1)
    assert "without a model" in note.reason


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_a_lease_is_refused_before_anything_is_created(tmp_path, offload):
    plan = resolved(machine(0.01), stage=3, offload=offload)
    with pytest.raises(OffloadError, match="needs more host memory"):
        OffloadManager(root=tmp_path / "swap").lease(plan).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_decisions_of_the_lease_are_part_of_its_plan(tmp_path):
    with OffloadManager(root=tmp_path).lease(resolved(machine(64), stage=3, offload="nvme")) as one:
        keys = {decision.key for decision in one.plan.decisions}
        assert {"offload.host_memory", "offload.space", "offload.root"} <= keys
        assert "available" in one.plan.explain()


def test_memory_is_checked_again_when_deepspeed_runs_instead_of_the_host_engine():
    plan = resolved(machine(64, torch="2.13.0"))
    held = psutil.Process().memory_info().rss
    budgets = [
        host_budget(each, ranks=1, held=held).needed
        for each in (plan, attrs.evolve(plan, engine="deepspeed"))
    ]
    assert plan.waits_for_proof
    assert budgets[0] < budgets[1]
    roomy = start_hosted(model=torch.nn.Linear(2, 2), plan=plan, timeout_s=1)
    assert (roomy.engine, roomy.decisions[-1].key) == ("deepspeed", "offload.host_memory")
    tight = resolved(machine(sum(budgets) / 2 / GIB, torch="2.13.0"))
    check_host_memory(tight, ranks=1)
    with pytest.raises(OffloadError, match="needs more host memory"):
        start_hosted(model=torch.nn.Linear(2, 2), plan=tight, timeout_s=1)
