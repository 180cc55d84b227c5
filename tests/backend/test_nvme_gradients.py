"""Gradients that DeepSpeed swaps to NVMe return unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ranks import run_ranks
from tests.support.runs import Case, start
from zerotune.backend.deepspeed.mends import split_aligned

ROWS, COLUMNS = 761, 760
"""Half of such a matrix exceeds 1 MiB, below which DeepSpeed swaps nothing."""


def train(case: Case, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    # The odd sizes put every gradient at an offset that is not a multiple of the sector size.
    model = torch.nn.Sequential(
        torch.nn.Linear(33, COLUMNS),
        torch.nn.Tanh(),
        torch.nn.Linear(COLUMNS, ROWS),
        torch.nn.Tanh(),
        torch.nn.Linear(ROWS, COLUMNS),
        torch.nn.Linear(COLUMNS, 5),
    )
    engine = start(attrs.evolve(case, engine="deepspeed"), model)
    losses = []
    for step in range(steps * case.accumulation):
        generator = torch.Generator().manual_seed(10 * step + engine.group.rank)
        x = torch.randn(4, 33, generator=generator).to(engine.device, engine.dtype)
        loss = (engine(x).float() - 1).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    swapper = getattr(engine.deepspeed_engine.optimizer, "optimizer_swapper", None)
    swapped = swapper.swap_params_info.values() if swapper else ()
    sums = {name: float(full.double().sum()) for name, full in engine.master_weights.gather()}
    return {
        "losses": losses,
        "weights": sums,
        "swapped": sum(len(i.swapped_gradients) for i in swapped),
    }


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 2)])
def test_steps_with_nvme_equal_those_in_host_memory(world_size, accumulation, tmp_path):
    overrides = (("sub_group_size", 700_000),)
    nvme = Case(
        stage=3,
        offload="nvme",
        offload_param="cpu",
        nvme_path=str(tmp_path),
        accumulation=accumulation,
        overrides=overrides,
    )
    host = Case(
        stage=3,
        offload="cpu",
        offload_param="cpu",
        accumulation=accumulation,
        overrides=overrides,
    )
    expected = run_ranks(train, host, 3, world_size=world_size)
    for actual, wanted in zip(
        run_ranks(train, nvme, 3, world_size=world_size), expected, strict=True
    ):
        assert actual["swapped"] >= 2, "nothing was swapped, so nothing was tested"
        assert actual["losses"] == wanted["losses"]
        assert actual["weights"] == wanted["weights"]


class Skipping(torch.nn.Module):
    """Layers of which every step leaves out another, whose weights then get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, COLUMNS) for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else torch.tanh(layer(x))
        return x


def train_skipping(case: Case, orders: tuple[int, ...]) -> dict[str, float]:
    torch.manual_seed(0)
    engine = start(case, Skipping())
    for step, skipped in enumerate(orders):
        generator = torch.Generator().manual_seed(step + 10 * engine.group.rank)
        x = torch.randn(4, COLUMNS, generator=generator).to(engine.device, engine.dtype)
        engine.backward((engine(x, skipped).float() - 1).pow(2).mean())
        engine.step()
    return {name: float(full.double().sum()) for name, full in engine.master_weights.gather()}


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize("world_size", [2])
def test_weights_without_a_gradient_are_updated_as_in_host_memory(world_size, tmp_path):
    overrides = (("sub_group_size", 1_300_000),)
    # The host engine would leave such weights as they are.
    case = Case(
        stage=3, offload="cpu", offload_param="cpu", overrides=overrides, engine="deepspeed"
    )
    nvme = attrs.evolve(case, offload="nvme", nvme_path=str(tmp_path), engine=None)
    orders = (0, 2, 1, 0)
    expected = run_ranks(train_skipping, case, orders, world_size=world_size)
    assert run_ranks(train_skipping, nvme, orders, world_size=world_size) == expected


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    unit=st.sampled_from([1, 4, 32]),
    units=st.integers(2, 10),
)
def test_gradient_parts_cover_every_element_and_are_swapped_only_if_aligned(lengths, unit, units):
    least = unit * units

    def is_swappable_tensor(tensor: Any) -> bool:
        return tensor.numel() >= least

    swapper = SimpleNamespace(numel_alignment=unit, is_swappable_tensor=is_swappable_tensor)
    flat = torch.arange(sum(lengths))
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    gradients = list(torch.split(flat, lengths))
    parts, places = split_aligned(swapper, gradients, offsets)
    assert torch.equal(torch.cat(parts), flat)
    assert places == [sum(part.numel() for part in parts[:i]) for i in range(len(parts))]
    for part, place in zip(parts, places, strict=True):
        if is_swappable_tensor(tensor=part):
            assert place % unit == 0
            assert part.numel() % unit == 0
