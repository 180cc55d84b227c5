"""Two ranks stream one copy of the weights, and train as ZeRO-2 with CPU offload does on two."""

from __future__ import annotations

import pytest

from tests.backend.stream.streaming import Run, differences, train
from tests.support.ranks import ranks
from zerotune.plan.model import Streaming

pytestmark = [pytest.mark.deepspeed, ranks(2)]

CLIPPED = Run(family="web", accumulation=3, steps=4, evaluate=True)
EAGER = Run(family="web", checkpointing="on", clipping=0.0, steps=4)
ADAPTERS = Run(family="flux", lora=True, checkpointing="on", steps=4)


@pytest.mark.parametrize(
    "run",
    [
        CLIPPED,
        EAGER,
        ADAPTERS,
        Run(family="unet", clipping=0.0, accumulation=3, groups=True, steps=3),
        Run(family="qwen", precision="fp32", clipping=0.0, steps=4),
    ],
    ids=str,
)
def test_every_bit_is_that_of_zero_2(run):
    mine = train(run, streamed=Streaming(window=2), seed=3)
    theirs = train(run)
    assert (mine["engine"], theirs["engine"]) == ("SharedStreamEngine", "DeepSpeedEngine")
    assert not differences(theirs, mine)
    assert mine["counts"].evicted
