"""Resident and streamed weights train as ZeRO-2 with CPU offload does, bit for bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.backend.host.streaming import Run, differences, train
from tests.support.ranks import ranks
from tests.support.sampling import nightly
from zerotune.plan.context import Streaming

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

ALL = 99
NAMED = ("blocks.0", "blocks.2", "blocks.3", "blocks.5")
MATRIX = [
    Run(
        family=family, checkpointing=checkpointing, accumulation=accumulation, clipping=clipping,
        lora=lora, steps=20,
    )
    for family, checkpointing, accumulation, clipping, lora in product(
        ("web", "unet", "flux", "qwen"), ("off", "on", "reentrant"), (1, 3), (0.0, 0.05),
        (False, True),
    )
    # Web's tied and repeated blocks run twice in a pass, which reentrant checkpoints cut in two.
    if (family, checkpointing) != ("web", "reentrant")
]  # fmt: skip
COMPILED = [
    Run(
        family=family, checkpointing=checkpointing, accumulation=2, clipping=clipping, lora=lora,
        compiled=compiled, steps=8,
    )
    for family, compiled, checkpointing, clipping, lora in product(
        ("web", "flux", "unet", "qwen"), ("aot_eager", "inductor"), ("off", "on"), (0.0, 0.05),
        (False, True),
    )
    # Use inductor for few runs, since g++ takes a minute for each.
    if compiled == "aot_eager" or (lora, clipping) == (False, 0.0)
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        (Run(family="apart", steps=6), (2,)),
        (Run(family="web", accumulation=3, steps=3), (3,)),
        (Run(family="web", precision="fp32", clipping=0.0, evaluate=True, steps=3), (1,)),
        (Run(family="web", optimizer="AdamWBF16States", groups=True, steps=3), (2,)),
        *nightly(
            (Run(family="unet", groups=True, steps=4), (1,)),
            (Run(family="flux", precision="fp32", steps=4), (2,)),
            (Run(family="web", compiled="aot_eager", steps=3), (2,)),
            *((run, (1, 2)) for run in (*MATRIX, *COMPILED)),
        ),
    ],
    ids=str,
)
def test_weights_on_the_device_equal_those_of_zero_bit_for_bit(run, stages):
    for stage in stages:
        # On one rank at stage 3, the host engine has the bits of ZeRO-2.
        theirs = train(run, engine="deepspeed", stage=min(stage, 2))
        mine = train(run, engine="host", stage=stage, seed=stage)
        assert (theirs["engine"], mine["engine"]) == ("DeepSpeedEngine", "HostEngine")
        assert not differences(theirs, mine), stage
        assert not mine["units"]


@pytest.mark.parametrize(
    ("run", "windows"),
    [
        (Run(family="web", accumulation=3, clipping=0.0, evaluate=True, steps=3), (3,)),
        (Run(family="web", checkpointing="on", clipping=0.0, compiled="aot_eager", steps=3), (2,)),
        (Run(family="flux", checkpointing="reentrant", accumulation=3, steps=3), (2,)),
        (Run(family="flux", clipping=0.0, lora=True, steps=3), (2,)),
        (Run(family="qwen", precision="fp32", steps=3), (ALL,)),
        *nightly(
            (Run(family="unet", checkpointing="on", clipping=0.0, groups=True, steps=4), (3,)),
            (Run(family="web", optimizer="AdamWBF16States", clipping=0.0, groups=True), (2,)),
            *((run, (2, 3, ALL)) for run in (*MATRIX, *COMPILED)),
        ),
    ],
    ids=str,
)
def test_streaming_equals_zero_2_bit_for_bit(run, windows):
    theirs = train(run)
    assert theirs["engine"] == "DeepSpeedEngine"
    for window in windows:
        # As many gradient buffers as units.
        streamed = Streaming(window=window, gradient_buffers=window)
        mine = train(run, streamed=streamed, seed=window)
        assert mine["engine"] == "HostEngine"
        assert not differences(theirs, mine), window
        counts = mine["counts"]
        assert counts.fetched > 0
        assert (counts.evicted > 0) == (window != ALL)


MIXED = [
    (Run(family="web", accumulation=2, steps=3), Streaming(units=NAMED, window=2)),
    (Run(family="web", clipping=0.0, steps=3), Streaming(units=NAMED, memory=2**15)),
    *nightly(
        (Run(family="flux", checkpointing="on", steps=3), Streaming(memory="700KiB")),
        (
            Run(family="flux", lora=True, clipping=0.0, steps=3),
            Streaming(units=("FluxSingleTransformerBlock",)),
        ),
    ),
]


@pytest.mark.parametrize(("run", "streamed"), MIXED, ids=str)
def test_a_mixture_of_resident_and_streamed_weights_equals_zero_2_bit_for_bit(run, streamed):
    mine, theirs = train(run, streamed=streamed, seed=2), train(run)
    assert mine["engine"] == "HostEngine"
    assert not differences(theirs, mine)
    whole, largest = sum(mine["units"].values()), max(mine["units"].values())
    if streamed.memory is not None:
        assert 2 * largest < mine["counts"].peak - mine["resident"] < whole
    elif not run.lora:
        assert mine["resident"] > largest


def test_split_master_weights_train_like_whole_ones():
    run = Run(family="flux", groups=True, steps=4)
    mine = train(run, streamed=Streaming(window=2, split_masters=True), seed=2)
    theirs = train(run)
    assert mine["losses"] == theirs["losses"]
    assert mine["norms"] == theirs["norms"]
    moved = 0
    for name, (weight, *kept) in mine["contents"].items():
        same, *whole = theirs["contents"][name]
        if name.startswith("ema "):
            torch.testing.assert_close(weight, same, rtol=1e-6, atol=1e-9)
            continue
        assert torch.equal(weight, same), name
        assert all(map(torch.equal, kept[1:], whole[1:])), name
        for one, other in zip(kept[:1], whole[:1], strict=True):
            units = (one.view(torch.int32) - other.view(torch.int32)).abs()
            assert int(units.max()) <= run.steps
            moved += int((units > 0).sum())
    assert 0 < moved < 50, "one in 131,072 at each step, of 4 steps of 400,000 weights"
    assert [d.after for d in mine["decisions"] if d.key == "streamed.split_masters"]


def test_the_window_limits_the_resident_units():
    run = Run(family="flux", steps=3)
    mine = train(run, streamed=Streaming(window=2))
    (said,) = [d for d in mine["decisions"] if d.key == "streamed"]
    assert "5 units" in said.after
    resident = 2 * max(mine["units"].values())
    assert mine["counts"].peak <= resident + mine["resident"]


def test_no_fetch_is_late_in_the_steady_state():
    few, many = (
        train(Run(family="flux", checkpointing="on", steps=steps), streamed=True)["counts"].late
        for steps in (3, 6)
    )
    assert few == many, "late are at most those of the first pass"
