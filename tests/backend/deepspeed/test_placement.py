"""Stages 1 and 2 start without a second copy of the weights on the device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.memory import Peak, exact_heap, resident
from tests.support.models import HostileNet
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, start, train_unet
from zerotune.backend.deepspeed import engine as engines
from zerotune.backend.deepspeed import partitioned
from zerotune.backend.deepspeed.partitioned import flatten_on_host


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(3, 5), (1,), (2, 3, 3, 3), (7,)]
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


@pytest.mark.parametrize("moved", [False, True])
def test_the_flat_tensor_equals_the_one_deepspeed_would_make(moved: bool) -> None:
    wanted = torch.cat([p.detach().reshape(-1) for p in parameters()])
    given = parameters()
    if moved:
        for parameter in given:
            parameter.cpu_data = parameter.data  # type: ignore[attr-defined]
            parameter.data = torch.empty(1)
    flat = flatten_on_host(given, alignment=4, padding=[1, 0, 2, 0], moved=moved)
    assert len(flat) % 4 == 0
    assert torch.equal(flat[:15], wanted[:15])
    assert flat[15] == 0
    assert torch.equal(flat[16:71], wanted[15:70])
    assert torch.equal(flat[71:73], torch.zeros(2))
    assert torch.equal(flat[73:80], wanted[70:])
    if not moved:
        assert [p.numel() for p in given] == [0] * 4


@ranks(1)
def test_each_weight_is_freed_as_soon_as_it_is_copied() -> None:
    exact_heap()
    layers = [torch.nn.Parameter(torch.ones(2**20, dtype=torch.bfloat16)) for _ in range(32)]
    before = resident()
    with Peak(resident) as peak:
        flat = flatten_on_host(layers, alignment=2)
    # torch.cat, which DeepSpeed uses, holds the weights twice.
    assert (peak.nbytes - before) < 0.2 * flat.nbytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "case",
    [
        Case(stage=1, offload="cpu", precision="bf16"),
        Case(stage=2, offload="cpu"),
    ],
    ids=str,
)
@ranks(1)
def test_the_engine_flattens_weights_on_the_host(case: Case) -> None:
    engine = start(case, HostileNet(scalar=False))
    wrapper = engine.deepspeed_engine.optimizer
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    wanted = {
        name: parameter.detach().to(dtype).float()
        for name, parameter in HostileNet(scalar=False).named_parameters()
    }
    weights = dict(engine.module.named_parameters())
    master = {one.address.name: one.value.clone() for one in engine.master_weights.read()}
    views = {_address(p) for p in weights.values() if p.requires_grad}
    flat = {_address(one) for one in wrapper.bit16_groups_flat}
    masters = {_address(one) for one in wrapper.single_partition_of_fp32_groups}
    engine.close()
    (decision,) = [d for d in engine.decisions if d.key == partitioned.KEY]
    assert (decision.after, decision.severity) == ("host", "note")
    assert (
        [n for n, p in weights.items() if not torch.equal(p.float(), wanted[n])],
        [n for n, m in master.items() if not torch.equal(m, wanted[n].view(-1))],
        len(master),
    ) == ([], [], 8)
    assert views == flat
    assert not masters & flat, "master weights that share the weights' memory would be rounded"


@pytest.mark.deepspeed
@ranks(1)
def test_the_allocator_cache_is_emptied_before_the_flat_block_is_allocated() -> None:
    # Otherwise the allocator's cached small blocks and the flat one take twice the weights' memory.
    from deepspeed.accelerator import get_accelerator

    model = HostileNet(scalar=False)
    seen: list[int] = []
    type(get_accelerator()).empty_cache = lambda _self: seen.append(
        sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    start(Case(stage=2, offload="cpu"), model).close()
    assert 0 in seen, f"the cache was emptied only while weights were held: {seen}"


@pytest.mark.deepspeed
@ranks(2)
def test_each_rank_sets_its_device_before_anything_is_placed(monkeypatch) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    asked, calls = accelerator.current_device_name, []

    def current(self: Any) -> str:
        calls.append("read")
        return str(asked(self))

    pin = engines.pin_exactly
    monkeypatch.setattr(accelerator, "set_device", lambda _self, index: calls.append(index))
    monkeypatch.setattr(accelerator, "current_device_name", current)
    pinned = lambda plan, **more: calls.append("pin") or pin(plan, **more)  # noqa: E731
    monkeypatch.setattr(engines, "pin_exactly", pinned)
    start(Case(stage=2, offload="cpu"), HostileNet(scalar=False)).close()
    assert {"pin", "read"} <= set(calls)
    rank = int(os.environ["RANK"])
    assert calls[0] == rank, f"the device was used before it was chosen: {calls[:4]}"


def train_as_deepspeed_does(case: Case, steps: int) -> list[float]:
    partitioned.FLATTENING = ()  # type: ignore[misc]
    return train_unet(case, steps)


@pytest.mark.deepspeed
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_equals_that_with_deepspeeds_placement_bit_for_bit(precision: str) -> None:
    case = Case(stage=2, offload="cpu", precision=precision)
    ours = run_ranks(train_unet, case, 4, world_size=2)
    assert ours == run_ranks(train_as_deepspeed_does, case, 4, world_size=2)
    assert ours[0][-1] != ours[0][0]


@pytest.mark.deepspeed
@ranks(1)
def test_an_unknown_deepspeed_keeps_its_own_flattening_with_a_warning() -> None:
    partitioned.FLATTENING = ()  # type: ignore[misc]
    engine = start(Case(stage=2, offload="cpu"), HostileNet(scalar=False))
    found = [d for d in engine.decisions if d.key == partitioned.KEY]
    engine.close()
    (decision,) = found
    assert (decision.after, decision.severity) == ("device", "warning")


@pytest.mark.gpu
@pytest.mark.deepspeed
@ranks(1)
def test_the_device_holds_only_one_copy_of_the_weights() -> None:
    elements = 48 * 1024**2
    layers = (torch.nn.Linear(1024, 1024, bias=False) for _ in range(48))
    case = Case(stage=2, offload="cpu", precision="bf16")
    model = torch.nn.Sequential(*layers)
    torch.cuda.reset_peak_memory_stats()
    engine = start(case, model)
    assert engine.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    engine.close()
    weights = 2 * 48 * 1024**2
    assert weights < peak[0] < 1.1 * weights
    assert (peak[1] - 2 * elements) < 0.5 * weights
