"""Reading, gathering and writing fp32 master weights under every layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.models import HostileNet
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.errors import EngineError

pytestmark = pytest.mark.deepspeed

CASES = [
    PLAIN,
    Case(stage=0, precision="bf16"),
    Case(stage=1, precision="bf16"),
    Case(stage=2, offload="cpu", precision="bf16"),
    Case(stage=3, precision="bf16"),
    Case(stage=3, offload="cpu", offload_param="cpu"),
    # Several sub-groups, so that the order of slabs matters.
    Case(stage=3, offload="cpu", overrides=(("sub_group_size", 100),)),
]


def hostile_engine(case: Case) -> Any:
    from tests.support.models import HostileNet

    return start(case, HostileNet(scalar=not case.deepspeed))


def train_hostile(engine: Any, steps: int) -> None:
    import torch

    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + engine.group.rank)
        x = torch.randn(4, 7, 7, generator=generator).to(engine.dtype)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()


def examine(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write before the first step, then train and read, on one engine."""
    engine = hostile_engine(case)
    return edit(engine), inspect(engine)


def inspect(engine: Any) -> dict[str, Any]:
    """Train a little, then read the weights through every interface."""
    import torch

    master = engine.master_weights
    names_before = dict(master.gather())
    train_hostile(engine, 3)
    owned: dict[str, list[tuple[int, int]]] = {}
    states, steps = set(), set()
    for fragment in master.read():
        address = fragment.address
        owned.setdefault(address.name, []).append((address.start, address.stop))
        assert fragment.value.shape == (address.numel,)
        assert fragment.value.dtype == torch.float32
        states |= set(fragment.states)
        steps.add(fragment.step)
        assert all(state.shape == fragment.value.shape for state in fragment.states.values())
    gathered = dict(master.gather())
    moments = dict(master.gather(lambda fragment: fragment.states["exp_avg"]))
    low = low_precision(engine)
    return {
        "owned": owned,
        "states": states,
        "steps": steps,
        "shapes": {name: tuple(value.shape) for name, value in gathered.items()},
        "moved": all(not torch.equal(gathered[name], names_before[name]) for name in gathered),
        "moments": {name: float(value.abs().max()) for name, value in moments.items()},
        "agrees": all(
            torch.equal(gathered[name].to(value.dtype), value) for name, value in low.items()
        ),
    }


def low_precision(engine: Any) -> dict[str, Any]:
    """Copy whole trainable parameters as the forward pass sees them."""
    if engine.plan.stage == 3:
        import deepspeed

        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        with deepspeed.zero.GatheredParameters(parameters):
            return _copies(engine.module)
    return _copies(engine.module)


def _copies(module: Any) -> dict[str, Any]:
    return {
        name: parameter.detach().clone().cpu()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


EXPECTED = {
    "convolution.weight": (3, 1, 3, 3),
    "convolution.bias": (3,),
    "first.weight": (13, 7),
    "first.bias": (13,),
    "second.weight": (7, 13),
    "second.bias": (7,),
    "scale": (1,),
    "single": (1,),
}


@pytest.mark.parametrize(
    ("case", "world_size"), [(case, 2 - number % 2) for number, case in enumerate(CASES)], ids=str
)
def test_every_layout_exposes_the_same_weights_and_trains_written_ones(
    case: Case, world_size: int
) -> None:
    results = run_ranks(examine, case, world_size=world_size)
    for edited, _ in results:
        assert edited["master"]
        assert edited["low"]
        assert edited["states"] == {0.5}
        assert edited["steps"] == {8}, "the counter goes on from what was written"
    ranks = [inspected for _, inspected in results]
    for seen in ranks:
        expected = EXPECTED | ({} if case.deepspeed else {"scale": ()})
        assert seen["shapes"] == expected, "frozen left out, tied counted once, full shapes"
        assert seen["states"] == {"exp_avg", "exp_avg_sq"}
        assert seen["steps"] == {11}
        assert seen["moved"]
        assert all(value > 0 for value in seen["moments"].values())
        assert seen["agrees"], "low-precision weights are the rounded master weights"
    for name, shape in EXPECTED.items():
        numel = 1
        for size in shape:
            numel *= size
        covered = sorted(span for seen in ranks for span in seen["owned"].get(name, []))
        if not case.deepspeed or case.stage == 0:
            assert covered == [(0, numel)] * world_size
        else:
            assert covered[0][0] == 0
            assert covered[-1][1] == numel
            joints = itertools.pairwise(covered)
            assert all(left[1] == right[0] for left, right in joints), f"{name}: {covered}"


def edit(engine: Any) -> dict[str, Any]:
    """Write values, states and steps before the first step; check what the engine uses."""
    import torch

    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            fragment.value.copy_(pattern(fragment.address))
            fragment.ensure_states(("exp_avg", "exp_avg_sq"))
            for state in fragment.states.values():
                state.fill_(0.5)
            fragment.set_step(7)
    gathered = dict(engine.master_weights.gather())
    whole = {
        name: torch.arange(value.numel(), dtype=torch.float32).view(value.shape) / 64
        for name, value in gathered.items()
    }
    low = low_precision(engine)
    result = {
        "master": all(torch.equal(gathered[name], whole[name]) for name in whole),
        "low": all(torch.equal(low[name], whole[name].to(low[name].dtype)) for name in whole),
        "states": {
            float(state.float().mean())
            for fragment in engine.master_weights.read()
            for state in fragment.states.values()
        },
    }
    train_hostile(engine, 1)
    result["steps"] = {fragment.step for fragment in engine.master_weights.read()}
    return result


def pattern(address: Any) -> Any:
    import torch

    return torch.arange(address.start, address.stop, dtype=torch.float32) / 64


@pytest.mark.nvme
@ranks(2)
def test_swapped_out_shards_are_read_and_written(tmp_path) -> None:
    # Sub-groups larger than 1 MiB, so that DeepSpeed really swaps them out.
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(600, 701), torch.nn.Tanh(), torch.nn.Linear(701, 600)
    )
    case = Case(stage=3, offload="nvme", offload_param="nvme", nvme_path=tmp_path, precision="bf16")
    engine = start(case, model)
    assert engine.plan.offload_param == "nvme"

    def train() -> None:
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(engine.group.rank))
        engine.backward(engine(x.bfloat16()).float().pow(2).mean())
        engine.step()

    train()
    wrapper = engine.deepspeed_engine.optimizer
    swapped = [t.numel() == 0 for t in wrapper.fp32_partitioned_groups_flat]
    before = dict(engine.master_weights.gather())
    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            fragment.value.mul_(2)
            fragment.states["exp_avg"].fill_(0.25)
    after = dict(engine.master_weights.gather())
    low = low_precision(engine)
    result = {
        "swapped": any(swapped),
        "empty_again": [t.numel() == 0 for t in wrapper.fp32_partitioned_groups_flat] == swapped,
        "doubled": all(torch.equal(after[name], 2 * before[name]) for name in before),
        "low": all(torch.equal(low[name], after[name].bfloat16()) for name in low),
        "states": {
            float(fragment.states["exp_avg"].mean()) for fragment in engine.master_weights.read()
        },
    }
    train()
    result["trains"] = any(
        not torch.equal(value, after[name]) for name, value in engine.master_weights.gather()
    )
    assert result == {
        "swapped": True,
        "empty_again": True,
        "doubled": True,
        "low": True,
        "states": {0.25},
        "trains": True,
    }


@ranks(1)
def test_a_zero_dimensional_parameter_is_refused_before_deepspeed_fails_on_it() -> None:
    with pytest.raises(EngineError, match=r"model\.scale = \(\).*one element"):
        start(Case(stage=2), HostileNet(scalar=True))
