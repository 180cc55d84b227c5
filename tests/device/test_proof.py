"""``zerotune doctor --prove`` on the device: it passes in every order, and sees planted faults."""

from __future__ import annotations

import pytest
import torch

from tests.device import on_device
from zerotune.backend.host import lanes
from zerotune.backend.proof import PATHS, Combination
from zerotune.platform import Platform
from zerotune.platform.facts import GIB
from zerotune.training import proving

pytestmark = pytest.mark.deepspeed

CARD = Platform.synthetic("cuda", vram=8 * GIB, ram=24 * GIB, versions={"torch": "2.13.0"})
ORDERS = [(seed, lateness) for seed in range(3) for lateness in (0.3, 0.02)]


@on_device(lateness=0.02)
def test_every_fast_path_is_proven():
    proof = proving.prove(platform=CARD)
    assert proof.combination == Combination.here("cuda")
    assert proof.combination.device == torch.simdev.get_device_properties().name + ", 9.0"
    assert proof.failed == (), proof
    assert not any(map(proof.obstacle, PATHS))


@on_device()
def test_a_host_that_reads_before_the_copy_is_seen():
    wait, seen = torch.simdev.Stream.synchronize, []
    for order in ORDERS:
        torch.simdev.seed_order(*order, 3000)
        assert proving.run_check("page-locked copies", CARD).passed
        torch.simdev.Stream.synchronize = lambda _stream: None
        try:
            seen.append(proving.run_check("page-locked copies", CARD).passed)
        finally:
            torch.simdev.Stream.synchronize = wait
    assert False in seen


@on_device(lateness=0.02)
def test_weights_that_are_not_waited_for_are_seen():
    lanes.Copy.receive = lambda _copy: None
    outcome = proving.run_check("training", CARD)
    assert outcome.passed is False
    assert "weights" in outcome.detail
