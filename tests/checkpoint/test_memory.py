"""Saving, loading and EMAs need no second copy of the weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.memory import MIB, Peak, in_use, needs_mallinfo
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, start

LAYERS, WIDTH = 8, 1448
"""Eight matrices of 8 MiB: 64 MiB of weights, 192 MiB with Adam's moments."""


def swap(ema: Any) -> None:
    with ema.swapped_in():
        pass


@needs_mallinfo
@ranks(1)
def test_saving_loading_and_emas_need_little_more_memory_than_one_fragment(tmp_path):
    folder = tmp_path / "step"
    from zerotune.checkpoint import load_checkpoint, save_checkpoint
    from zerotune.ema import EMAShadow

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = start(PLAIN, model)
    engine.backward(engine(torch.randn(4, WIDTH)).pow(2).mean())
    engine.step()
    peaks = {}
    before = in_use()
    ema = EMAShadow(decay=0.99).attach(engine)
    peaks["attach"] = (in_use() - before) / MIB
    shadows = {"ema": ema}
    ema.step()
    actions = {
        "step": ema.step,
        "swap": lambda: swap(ema),
        "distance": ema.distance,
        "save": lambda: save_checkpoint(folder, engine=engine, shadows=shadows),
        "load": lambda: load_checkpoint(folder, engine=engine, shadows=shadows),
    }
    for name, action in actions.items():
        with Peak() as peak:
            action()
        peaks[name] = peak.growth
    size = sum(path.stat().st_size for path in folder.iterdir()) / MIB
    shadow = ema.nbytes / MIB
    engine.close()
    assert 64 < shadow < 65
    assert size > 4 * 64
    # The shadow costs 4 bytes per element and hardly any more.
    assert abs(peaks.pop("attach") - shadow) < 0.02 * shadow + 1
    # A full copy would be 64 MiB, a fragment is 8.
    assert all(peak < 20 for peak in peaks.values()), peaks
