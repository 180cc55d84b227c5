"""Loading at stage 3 with two processes: what each holds at most, against a model read whole.

Measured is the anonymous memory of each process (its own data, no page cache) while
``load_pretrained`` and the partitioning run, above what it was before; libraries are imported and
one small model is loaded first. Told is the larger of the two processes.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.framework import Benchmark, Case, Context, Goal, Measured, Worker, alternate

RANKS: Final = 2
OURS, WHOLE, BOUND = (
    "weights wait in their files",
    "read whole, in fp32",
    "1.15 shares and a tensor",
)
CASE: Final = "ZeRO-3, bf16, two processes"
LARGE: Final = {"block_out_channels": [512, 768, 1024], "layers_per_block": 2}
SMALL: Final = {"block_out_channels": [32, 64], "layers_per_block": 1}
NOTES = (
    (
        "`memory` is the most that the anonymous memory of one process grew from before "
        "`load_pretrained` until its parts of the weights are in place, looked at every 2 ms."
    ),
    "A share is what one process keeps: all weights in bf16, divided by two.",
)


def cases(quick: bool) -> Sequence[Case]:
    settings = {"unet": dict(SMALL if quick else LARGE), "rounds": 1 if quick else 3}
    return (Case(name=CASE, settings=settings, measure=measure),)


class Rank:
    """One of the processes."""

    def __init__(self, warm_up: str) -> None:
        self._kept: Any = None
        self._warm_up = warm_up

    def warm(self, port: int) -> None:
        """Import everything and load something small."""
        for plan in (True, False):
            self.load(self._warm_up, port + plan, waiting=plan)
        self._kept = None
        gc.collect()

    def load(self, folder: str, port: int, *, waiting: bool) -> int:
        """Load and partition a model; the bytes of this rank's parts."""
        from zerotune import DeepSpeedPlan, EmbeddedPlan, load_pretrained

        os.environ["MASTER_PORT"] = str(port)
        plan = DeepSpeedPlan.build(stage=3, precision="bf16", micro_batch_size=1)
        model: Any = load_pretrained(folder, plan=plan if waiting else None).model
        # So that nothing but loading counts in what the plan is checked for.
        model.requires_grad_(False)
        model.conv_out.requires_grad_(True)
        with EmbeddedPlan(model=model, plan=plan) as run:
            run.shard(model)
        self._kept = model
        return sum(each.ds_tensor.nbytes for each in model.parameters())

    def drop(self) -> None:
        """Let the model go, and what the C library keeps of it."""
        self._kept = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def measure(settings: Mapping[str, Any], context: Context) -> Measured:
    """Write a model, then load it in turns."""
    tiny, folder = context.scratch / "tiny", context.scratch / "model"
    _write(SMALL, tiny)
    elements, largest = _write(settings["unet"], folder)
    context.log(f"  {elements:,} elements are on the disk")
    share = 2 * elements / RANKS
    with ExitStack() as stack:
        pairs = {
            name: [
                stack.enter_context(Worker(Rank, str(tiny), environment=_environment(rank)))
                for rank in range(RANKS)
            ]
            for name in (OURS, WHOLE)
        }
        for pair in pairs.values():
            _together(pair, lambda worker, port: worker.call("warm", port))
        samples = alternate(
            {
                OURS: functools.partial(_load, pairs[OURS], folder, waiting=True),
                WHOLE: functools.partial(_load, pairs[WHOLE], folder, waiting=False),
                BOUND: lambda: {"memory_bytes": 1.15 * share + 2 * largest},
            },
            rounds=settings["rounds"],
            warm_up=0,
        )
    return Measured(
        samples=samples,
        baseline=BOUND,
        facts={
            "elements": elements,
            "bytes on the disk": 4 * elements,
            "share in bytes": share,
            "largest tensor in bytes": 2 * largest,
        },
        notes=NOTES,
    )


def _load(pair: Sequence[Worker], folder: Path, *, waiting: bool) -> dict[str, float]:
    from benchmarks.framework import anon_bytes

    for worker in pair:
        worker.call("drop")
    before = [anon_bytes(worker.pid) for worker in pair]
    began = time.perf_counter()
    found = _together(
        pair, lambda worker, port: worker.peak("load", str(folder), port, waiting=waiting)
    )
    return {
        "memory_bytes": max(peak - held for (_, peak), held in zip(found, before, strict=True)),
        "seconds": time.perf_counter() - began,
    }


def _together(pair: Sequence[Worker], what: Any) -> list[Any]:
    """All ranks at once, since they wait for each other."""
    port = _free_port()
    with ThreadPoolExecutor(len(pair)) as pool:
        return list(pool.map(lambda worker: what(worker, port), pair))


def _environment(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _write(settings: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    """Write a U-Net in fp32 and shards; its elements, and those of its largest tensor."""
    import torch
    from diffusers import UNet2DModel

    count = len(settings["block_out_channels"])
    with torch.device("meta"):
        model: Any = UNet2DModel(
            sample_size=32,
            norm_num_groups=8,
            down_block_types=["DownBlock2D"] * (count - 1) + ["AttnDownBlock2D"],
            up_block_types=["AttnUpBlock2D"] + ["UpBlock2D"] * (count - 1),
            **settings,
        )
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="300MB")
    sizes = [parameter.numel() for parameter in model.parameters()]
    return sum(sizes), max(sizes)


BENCHMARK = Benchmark(
    name="loading",
    title="memory of loading at stage 3 against a share of the weights and the largest tensor",
    cases=cases,
    goals=(
        Goal(
            text="a rank holds at most 1.15 times its share and the largest tensor",
            case=CASE,
            contestant=OURS,
            against=BOUND,
            quantity="memory_bytes",
            limit=1.0,
        ),
    ),
)
