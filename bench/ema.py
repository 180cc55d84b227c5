"""Seconds and bytes of an EMA update, against other libraries and a plain memory copy.

timm and ema-pytorch take part if they are installed (``pip install --no-deps``).
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.runner import Benchmark, Case, Goal, Measured, alternate, timed
from zerotune.ema import EMAShadow, EMAShadows, FileStore
from zerotune.plan.memory.costing import EMA_CHUNK

DECAY = 0.999
WIDTH = 1410
OURS, TWO, COPY = "EMAShadow", "EMAShadows, two", "memory copy"
DISK, DISK_BYTES = "EMAShadow.step, on disk", "the same bytes read and written"
NONE, WITH = "no EMA", "EMAShadow.step"


class Stack(torch.nn.Module):
    """2 million parameters per layer, in matrices and biases as a transformer has them."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_bc: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to (batch, width); only its gradients matter."""
        for layer in self.layers:
            x_bc = torch.tanh(layer(x_bc))
        return x_bc


def cases(quick: bool) -> Sequence[Case]:
    size = {"layers": 2, "width": 256} if quick else {"layers": 100, "width": WIDTH}
    trained = {"rounds": 2 if quick else 7, "batch": 8 if quick else 128}
    return (
        Case("update", update, {**size, "rounds": 2 if quick else 15}),
        Case("training step", training_step, {**size, **trained}),
        # 410 million parameters, of which the page cache would hold all.
        Case(
            "on disk", on_disk, {**size, "layers": 2 if quick else 206, "rounds": 2 if quick else 9}
        ),
    )


def update(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure the update alone, in the foreground."""
    model = Stack(settings["layers"], settings["width"])
    parameters = list(model.parameters())

    def move() -> None:
        with torch.no_grad():
            torch._foreach_add_(parameters, 1e-3)

    samples = alternate(
        {name: timed(act) for name, act in _contestants(model).items()},
        rounds=settings["rounds"],
        warm_up=4,  # The first three updates of a shadow are checked.
        before=move,
    )
    count = sum(parameter.numel() for parameter in parameters)
    # Least fp32 memory traffic: a copy reads once and writes once; an EMA reads twice and writes
    # once.
    moved = dict.fromkeys(samples, 12 * count) | {COPY: 8 * count, TWO: 20 * count}
    for name, found in samples.items():
        found["bytes_per_second"] = [moved[name] / seconds for seconds in found["seconds"]]
    return Measured(samples=samples, baseline=COPY, facts={"parameters": count})


def _contestants(model: Stack) -> dict[str, Callable[[], object]]:
    """Return functions that update an EMA of ``model``, by name."""
    from diffusers.training_utils import EMAModel

    parameters = list(model.parameters())
    copies = [torch.empty_like(parameter) for parameter in parameters]

    def copy() -> None:
        with torch.no_grad():
            for target, parameter in zip(copies, parameters, strict=True):
                target.copy_(parameter)

    pair = EMAShadows(shadows={"a": EMAShadow(decay=DECAY), "b": EMAShadow(decay=0.99)})
    found: dict[str, Callable[[], object]] = {
        COPY: copy,
        OURS: EMAShadow(decay=DECAY).attach(model).step,
        TWO: pair.attach(model).step,
    }
    for name, foreach in (("diffusers EMAModel", False), ("diffusers EMAModel, foreach", True)):
        theirs = EMAModel(parameters, decay=DECAY, foreach=foreach)
        found[name] = functools.partial(theirs.step, parameters)
    if importlib.util.find_spec("timm"):
        average = _timm().ModelEmaV3(model, decay=DECAY, foreach=True)
        found["timm ModelEmaV3, foreach"] = functools.partial(average.update, model)
    if importlib.util.find_spec("ema_pytorch"):
        from ema_pytorch import EMA

        found["ema-pytorch EMA, foreach"] = EMA(
            model, beta=DECAY, update_every=1, update_after_step=0, use_foreach=True,
            include_online_model=False,
        ).update  # fmt: skip
    return found


def _timm() -> Any:
    """Load timm's EMA module by its file: only the rest of timm needs torchvision."""
    (folder,) = importlib.util.find_spec("timm").submodule_search_locations  # type: ignore[union-attr]
    path = Path(folder, "utils", "model_ema.py")
    spec: Any = importlib.util.spec_from_file_location("timm_model_ema", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_disk(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Measure the update of an EMA on disk, beside the disk itself."""
    model = Stack(settings["layers"], settings["width"])
    parameters = list(model.parameters())
    ema = EMAShadow(decay=DECAY, store=FileStore(folder=scratch)).attach(model)

    def move() -> None:
        with torch.no_grad():
            torch._foreach_add_(parameters, 1e-3)

    with _moved(scratch, ema.nbytes) as move_bytes:
        samples = alternate(
            {DISK: timed(ema.step), DISK_BYTES: timed(move_bytes)},
            rounds=settings["rounds"],
            warm_up=4,  # The first three updates of a shadow are checked.
            before=move,
        )
    for found in samples.values():
        found["bytes_per_second"] = [2 * ema.nbytes / seconds for seconds in found["seconds"]]
    return Measured(samples=samples, baseline=DISK_BYTES, facts={"bytes": ema.nbytes})


@contextmanager
def _moved(folder: Path, nbytes: int) -> Iterator[Callable[[], None]]:
    """Yield a function that reads and writes a file of ``nbytes``, past the page cache."""
    path = folder / "bytes"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    nbytes = -(-nbytes // EMA_CHUNK) * EMA_CHUNK
    os.posix_fallocate(descriptor, 0, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)

    def move() -> None:
        for offset in range(0, nbytes, EMA_CHUNK):
            os.preadv(descriptor, [memory], offset)
            os.pwritev(descriptor, [memory], offset)

    with mmap.mmap(-1, EMA_CHUNK) as memory:
        memory.write(os.urandom(EMA_CHUNK))
        try:
            yield move
        finally:
            os.close(descriptor)


def training_step(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Measure whole steps by EMA implementation; forward and backward use the same cores."""
    model = Stack(settings["layers"], settings["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x_bc = torch.randn(settings["batch"], settings["width"])

    def two_steps(update_average: Callable[[], object]) -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(2):
            model(x_bc).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update_average()
        return {"seconds": (time.perf_counter() - began) / 2}

    ema = EMAShadow(decay=DECAY).attach(model)
    updates: dict[str, Callable[[], object]] = {NONE: lambda: None, WITH: ema.step}
    samples = alternate(
        {name: functools.partial(two_steps, step) for name, step in updates.items()},
        rounds=settings["rounds"],
        warm_up=2,
    )
    return Measured(samples=samples, baseline=NONE)


FOREACH, TIMM = "diffusers EMAModel, foreach", "timm ModelEmaV3, foreach"
DEARER = "an update of an EMA on disk takes at most 1.5 times as long as moving its bytes"

BENCHMARK = Benchmark(
    name="ema",
    title="an EMA update of 200 million weights, compared with other libraries and a memory copy",
    cases=cases,
    ours=(OURS, TWO, WITH, DISK),
    goals=(
        Goal("an `EMAShadow` update takes at most 1.3 times as long as a copy of the weights",
             "update", OURS, "seconds", 1.3, COPY),
        Goal("an `EMAShadow` update is faster than one with diffusers' `EMAModel` and `foreach`",
             "update", OURS, "seconds", 1.0, FOREACH),
        Goal("compared with timm's `ModelEmaV3`", "update", OURS, "seconds", None, TIMM),
        Goal(DEARER, "on disk", DISK, "seconds", 1.5, DISK_BYTES),
        Goal("a step with an EMA, compared with one without",
             "training step", WITH, "seconds", None, NONE),
    ),
)  # fmt: skip
