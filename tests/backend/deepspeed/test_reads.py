"""A step synchronises with the device as rarely as possible."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backend.step.test_host_step import begin, digest
from tests.support.models import HostileNet, tiny_unet
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, unet_loss
from zerotune.backend.deepspeed import partitioned
from zerotune.backend.deepspeed.partitioned import READS_KEY as KEY
from zerotune.backend.deepspeed.replicated import HalfWrapper
from zerotune.backend.deepspeed.wrapper import read_at_once


class Reads(TorchDispatchMode):
    """Records the tensors whose value the host reads, each storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # Keep the tensors alive, so that no address is reused.
            self.asked[args[0].untyped_storage()._cdata] = args[0]
        return func(*args, **(kwargs or {}))

    def take(self) -> int:
        """Return the number of reads since the last call."""
        found = len(self.asked)
        self.asked = {}
        return found


def train(case: Case, fixed: bool, host_step: bool = False) -> dict[str, Any]:
    """Train with a third gradient that is not finite; return results and reads."""
    with pytest.MonkeyPatch.context() as patch:
        if not fixed:
            for kind in (partitioned.PartitionedWrapper, HalfWrapper):
                patch.setattr(kind, "improve", lambda _: ())
        engine = begin(case, tiny_unet(), host_step)
    told = [decision.after for decision in engine.decisions if decision.key in (KEY, WHOLE)]
    reads: dict[str, list[int]] = {"backward": [], "step": []}
    outcomes = []
    with Reads() as counted:
        for step in range(5):
            loss = unet_loss(engine, step) * (torch.inf if step == 2 else 1.0)
            counted.take()
            engine.backward(loss)
            reads["backward"].append(counted.take())
            found = engine.step()
            reads["step"].append(counted.take())
            outcomes.append((found.applied, found.grad_norm))
    kept = {
        "told": told,
        "outcomes": outcomes,
        "master": digest(engine),
        "parameters": sum(p.requires_grad for p in engine.module.parameters()),
        **reads,
    }
    engine.close()
    return kept


def both(case: Case) -> list[dict[str, Any]]:
    return [train(case, fixed) for fixed in (False, True)]


CASES = [
    Case(stage=2, offload="cpu", precision="bf16"),
    Case(stage=1, offload="cpu", precision="bf16"),
    Case(stage=2, offload="cpu", accumulation=2),
]


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", CASES, ids=["stage 2", "stage 1", "fp32, accumulated"])
def test_one_device_read_per_step_gives_the_same_results(case: Case) -> None:
    ((raw, ours),) = run_ranks(both, case)
    assert (raw["told"], ours["told"]) == ([], ["once per step"])
    assert ours["outcomes"] == raw["outcomes"]
    assert ours["master"] == raw["master"]
    assert ours["parameters"] > 20
    if case.precision == "bf16":
        assert [applied for applied, _ in ours["outcomes"]] == [True, True, False, True, True]
        assert min(raw["backward"]) >= raw["parameters"], "DeepSpeed asks per parameter"
    assert max(ours["backward"]) == 0, "nothing is asked while the backward pass is queued"
    assert max(raw["step"]) > raw["parameters"] / 2
    assert max(ours["step"]) < 12, f"{ours['step']} of {ours['parameters']} parameters"


WHOLE = "optimizer.reads"


@pytest.mark.deepspeed
def test_whole_gradients_are_checked_with_one_read_too() -> None:
    ((raw, ours),) = run_ranks(both, Case(stage=0, precision="bf16"))
    assert (raw["told"], ours["told"]) == ([], ["once per step"])
    assert ours["outcomes"] == raw["outcomes"]
    assert [applied for applied, _ in ours["outcomes"]] == [True, True, False, True, True]
    assert ours["master"] == raw["master"]
    assert max(raw["step"]) >= raw["parameters"], "DeepSpeed asks per parameter"
    assert max(ours["step"]) < 12


@pytest.mark.deepspeed
@ranks(1)
def test_deepspeed_itself_needs_few_reads_without_offload() -> None:
    found = train(Case(stage=2, precision="bf16"), fixed=True)
    assert found["told"] == []
    assert max(found["backward"]) == 0
    assert max(found["step"]) < 12


@pytest.mark.deepspeed
@ranks(1)
def test_the_step_in_one_pass_needs_few_reads_too() -> None:
    found = train(Case(stage=2, offload="cpu", precision="bf16"), True, True)
    assert max(found["backward"]) == 0
    assert max(found["step"]) < 12
    assert [applied for applied, _ in found["outcomes"]] == [True, True, False, True, True]


@pytest.mark.deepspeed
@ranks(1)
def test_a_discarded_window_leaves_no_overflow_flag() -> None:
    engine = begin(CASES[0], tiny_unet(), False)
    # Its gradient is not finite.
    engine.backward(unet_loss(engine, 0) * torch.inf)
    engine.discard()
    engine.backward(unet_loss(engine, 1))
    assert engine.step().applied
    engine.close()


@pytest.mark.deepspeed
@ranks(1)
def test_an_unknown_deepspeed_keeps_its_reads_per_parameter_with_a_decision(monkeypatch) -> None:
    replaced = (*partitioned.FLAGS.replaced, "moved_elsewhere")
    monkeypatch.setattr(partitioned, "FLAGS", attrs.evolve(partitioned.FLAGS, replaced=replaced))
    engine = begin(attrs.evolve(CASES[0], stage=1), HostileNet(scalar=False), False)
    (decision,) = [decision for decision in engine.decisions if decision.key == KEY]
    assert decision.after == "per parameter"
    assert "DeepSpeed's moved_elsewhere" in decision.reason
    engine.close()


def test_reading_several_norms_at_once_gives_the_same_numbers() -> None:
    norms = {0: torch.tensor(1 / 3), 1: torch.tensor([2.5], dtype=torch.bfloat16)}
    norms[2] = torch.tensor(torch.inf, dtype=torch.float64)
    wanted = [norm.item() for norm in norms.values()]
    read_at_once(norms)
    assert [norm.item() for norm in norms.values()] == wanted
    assert len({norm.untyped_storage()._cdata for norm in norms.values()}) == 1
    read_at_once(nothing := {})
    assert nothing == {}
