"""The large models of a GPU session: how many of their layers fit."""

from __future__ import annotations

import pytest

from bench.contestants import DOUBLE, SINGLE, flux_depth, flux_need
from zerotune.platform import Platform
from zerotune.platform.facts import GIB


def machine(ram: int, torch: str) -> Platform:
    return Platform.synthetic("cuda", vram=80 * GIB, ram=ram * GIB, versions={"torch": torch})


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0"])
def test_flux_has_as_many_blocks_as_fit_in_memory(torch: str) -> None:
    """Seven double blocks would need 131 GiB: the reference's page-locked memory is rounded up."""
    assert flux_depth(machine(1024, torch)) == (DOUBLE, SINGLE)
    here = machine(128, torch)
    assert flux_depth(here) == (6, 12)
    assert flux_need(7, here) > 128 * GIB > 1.1 * flux_need(6, here)
