"""Saving, loading and averaging need no second copy of the weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, start

MIB = 2**20
LAYERS, WIDTH = 8, 1448
"""Eight matrices of 8 MiB: 64 MiB of weights, 192 MiB with Adam's moments."""


class Peak:
    """Largest growth of this process's own memory inside a ``with`` block, in MiB.

    Pages of mapped files do not count: the kernel drops them when it needs the room.
    """

    def __enter__(self) -> Peak:
        self._before = anonymous()
        self.mib, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.mib = max(self.mib, (anonymous() - self._before) / MIB)


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def measure(folder: str) -> dict[str, Any]:
    from zerotune.checkpoint import load_checkpoint, save_checkpoint
    from zerotune.ema import EMAShadow

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = start(PLAIN, model)
    engine.backward(engine(torch.randn(4, WIDTH)).pow(2).mean())
    engine.step()
    peaks = {}
    before = anonymous()
    ema = EMAShadow(decay=0.99).attach(engine)
    peaks["attach"] = (anonymous() - before) / MIB
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
        peaks[name] = peak.mib
    size = sum(path.stat().st_size for path in Path(folder).iterdir()) / MIB
    shadow = ema.nbytes / MIB
    engine.close()
    return {"peaks": peaks, "checkpoint": size, "shadow": shadow}


def swap(ema: Any) -> None:
    with ema.swapped_in():
        pass


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_stays_within_one_fragment(tmp_path):
    (seen,) = run_ranks(measure, str(tmp_path / "step"))
    peaks = seen["peaks"]
    assert 64 < seen["shadow"] < 65
    assert seen["checkpoint"] > 4 * 64
    # The shadow costs 4 bytes per element and next to nothing beside.
    assert abs(peaks.pop("attach") - seen["shadow"]) < 0.02 * seen["shadow"] + 1
    # A full copy would be 64 MiB, a fragment is 8.
    assert all(peak < 20 for peak in peaks.values()), peaks
