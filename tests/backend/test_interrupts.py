"""Ctrl-C at random moments of a loop that catches it and goes on, for every kind of engine."""

from __future__ import annotations

import os
from typing import Final

import pytest

from stress.faults.interrupts import ENGINES, Loop
from tests.support.ranks import ranks
from tests.support.sampling import sampled

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

SEED: Final = os.environ.get("ZEROTUNE_INTERRUPTS_SEED", "1")


@pytest.mark.parametrize("name", sampled(ENGINES, ("plain", "host", "eager", "z2 cpu")))
def test_the_loop_goes_on_as_in_torch_or_is_refused(name):
    print(f"ZEROTUNE_INTERRUPTS_SEED={SEED}")
    loop = Loop(name)
    for number in range(12):
        print(number, loop.interrupt(f"{SEED}/{number}"))
