"""The pieces of a session on a GPU, in the order of what they teach, and what each of them does."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from benchmarks.session import Piece

GIB: Final = 2**30
LOOK: Final = Piece(name="machine", made="benchmarks.gpu:machine", least_s=0.0)
_OPS: Final = ("cpu_adam", "host_step", "pin_memory")
_CAPS: Final = (8, 4, 6, 12)
_MARKS: Final = re.compile(r"\bmark\.(gpu|device)\b")
_ENDING_S: Final = 20.0
"""Of a piece's limit, for an interrupted pytest to say what it has found."""


def pieces(about: Mapping[str, Any], *, quick: bool) -> Iterator[Piece]:
    """All of them.

    Args:
        about: What ``machine`` gave.
        quick: One of each kind, tiny.
    """
    here = about.get("built", _OPS)
    yield Piece(
        name="ops", made="benchmarks.gpu:build", settings={"ops": _OPS}, limit_s=240.0,
        # Results go along from machine to machine; what was compiled stays behind.
        lost=lambda made: any(op not in here and f"{op}_failed" not in made for op in _OPS),
    )  # fmt: skip
    yield Piece(name="rates", made="benchmarks.gpu:rates", settings={"quick": quick}, limit_s=60.0)
    for stage in (2, 3):
        yield _tiny(stage)
    yield Piece(
        name="tests",
        made="benchmarks.gpu:tests",
        settings={"files": ["tests/backend/test_cuda.py"] if quick else ["tests"]},
        limit_s=240.0,
        least_s=30.0 if quick else 90.0,
    )
    yield from _quick_sizes() if quick else _sizes(about)


def _sizes(about: Mapping[str, Any]) -> Iterator[Piece]:
    from benchmarks.large import PLANS

    two, three = PLANS.values()
    for turn in (1, 2):
        # In turns, since what slows the machine for a while slows both.
        for made, plan in (("Ours", two), ("Reference", None)):
            yield _large(
                f"sdxl 1024², batch 8: {made}, {turn}", made, plan, 1024, 8, trace=turn == 1
            )
    yield _large("sdxl 1024², batch 1: stage 2", "Ours", two, 1024, 1)
    yield _large("sdxl 1024², batch 1: stage 3", "Ours", three, 1024, 1)
    yield _large("sdxl 128², batch 8: stage 3", "Ours", three, 128, 8)
    yield _large("sdxl 128², batch 8: stage 2", "Ours", two, 128, 8)
    yield _large("sdxl 128², batch 8: Reference", "Reference", None, 128, 8)
    for cap in _CAPS:
        yield _large(f"sdxl, card of {cap} GiB", "Advised", None, 1024, 1, steps=2, cap_gib=cap)
    double, single = about["flux_depth"]
    config = {"num_layers": double, "num_single_layers": single}
    for made, plan in (("Ours", two), ("Reference", None)):
        name = f"flux, {double} + {single} blocks, 1024², batch 1: {made}"
        yield _large(name, made, plan, 1024, 1, family=name, model="flux", more=config, steps=3)


def _quick_sizes() -> Iterator[Piece]:
    yield _large("tiny: Reference", "Reference", None, 64, 2, model="tiny", steps=2)
    yield _large("tiny, card of 1 GiB", "Advised", None, 64, 2, model="tiny", steps=1, cap_gib=1)


def _tiny(stage: int) -> Piece:
    parameters = {"offload_param": "cpu"} if stage == 3 else {}
    plan = {"stage": stage, "offload": "cpu", **parameters}
    name, traced_too = f"tiny training at stage {stage}", stage == 2
    return _large(name, "Ours", plan, 64, 2, model="tiny", steps=2, trace=traced_too)


def _large(
    name: str,
    made: str,
    plan: Mapping[str, Any] | None,
    side: int,
    batch: int,
    *,
    model: str = "sdxl",
    family: str | None = None,
    more: Mapping[str, Any] | None = None,
    steps: int = 4,
    cap_gib: float | None = None,
    trace: bool = False,
) -> Piece:
    settings: dict[str, Any] = {
        "made": made, "model": model, "family": family or model, "more": dict(more or {}),
        "side": side, "batch": batch, "steps": steps, "trace": trace,
    }  # fmt: skip
    settings["plan"] = None if plan is None else dict(plan)
    if cap_gib is not None:
        settings["cap_gib"] = cap_gib
    large = model != "tiny"
    return Piece(
        name=name, made="benchmarks.gpu:contestant", settings=settings,
        limit_s=240.0 if large else 120.0, least_s=75.0 if large else 20.0,
    )  # fmt: skip


_GOALS: Final = (
    ("1024², batch 8 in 8.5 GiB", "sdxl 1024², batch 8: Ours, 1", 8.5),
    ("1024², batch 1 in 6.9 GiB, set-up included", "sdxl 1024², batch 1: stage 2", 6.9),
    ("1024², batch 1 in 4 GiB at stage 3", "sdxl 1024², batch 1: stage 3", 4.0),
    ("128², batch 8 in 3.5 GiB", "sdxl 128², batch 8: stage 3", 3.5),
)
_TIME: Final = 0.7


def goals(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was aimed at for SDXL's full U-Net, and what was reached."""
    lines = []
    for text, piece, limit in _GOALS:
        reached = (entries.get(piece, {}).get("result") or {}).get("device_bytes")
        shown = None if reached is None else f"{reached / GIB:.2f} GiB"
        lines.append(_line(text, shown, met=reached is not None and reached <= limit * GIB))
    ours, theirs = (
        [
            second
            for turn in (1, 2)
            for second in (
                entries.get(f"sdxl 1024², batch 8: {made}, {turn}", {}).get("result") or {}
            ).get("seconds", ())
        ]
        for made in ("Ours", "Reference")
    )
    ratio = statistics.median(ours) / statistics.median(theirs) if ours and theirs else None
    text = f"1024², batch 8 in {_TIME} of the reference's time"
    shown = None if ratio is None else f"{ratio:.2f}"
    return [*lines, _line(text, shown, met=ratio is not None and ratio <= _TIME)]


def _line(text: str, reached: str | None, *, met: bool) -> str:
    if reached is None:
        return f"- {text}: not measured"
    return f"- {text}: {'met' if met else 'missed'}, {reached}"


# -- What the pieces do, each in a process of its own.


def machine(_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Hardware and versions, what is compiled, and how many of Flux's blocks fit."""
    from benchmarks.flux import depth
    from benchmarks.framework.hardware import hardware, versions
    from zerotune import detect_platform

    return {
        "hardware": hardware(),
        "versions": versions(),
        "flux_depth": list(depth(detect_platform(log=False))),
        "built": [op for op in _OPS if _is_built(op)],
    }


def _is_built(op: str) -> bool:
    from zerotune.backend.ops.diagnose import build_folder, built_library
    from zerotune.backend.step.kernel import host_step_status

    if op == "host_step":
        return host_step_status().state == "built"
    return built_library(build_folder(op)) is not None


def build(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Compile ops, as the first engine that needs them would; why one cannot be."""
    found: dict[str, Any] = {}
    for op in settings["ops"]:
        began = time.perf_counter()
        try:
            _load(op)
        except Exception as error:  # noqa: BLE001 - what a compiler says is what is to be learnt
            found[f"{op}_failed"] = _told(error)
        found[f"{op}_seconds"] = time.perf_counter() - began
    return found


def _told(error: BaseException) -> str:
    """An error and what it came from: a compiler says last what was wrong."""
    causes = []
    while error is not None:
        causes.append(f"{type(error).__name__}: {error}"[-1500:])
        error = error.__cause__  # type: ignore[assignment]
    return "\nfrom ".join(causes)


def _load(op: str) -> None:
    from zerotune.backend.ops.build import build_op, building
    from zerotune.backend.step.kernel import load_host_step

    if op == "host_step":
        load_host_step()
    elif op == "pin_memory":
        with building():
            from deepspeed.utils.pin_memory import get_native_pinned_memory

            get_native_pinned_memory()
    else:
        build_op(op)


def rates(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes and operations per second: what every step is made of.

    Those of ``zerotune doctor --rates`` too, which later pieces predict their seconds by.
    """
    import torch

    from benchmarks.large_runs import RATES
    from zerotune import detect_platform
    from zerotune.backend.rates import measure_rates
    from zerotune.plan.memory.rates import store_rates

    nbytes = 2**24 if settings["quick"] else 2**30
    found: dict[str, Any] = {"sampled_bytes": nbytes}
    there, here = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    seconds = _fastest(lambda: there.copy_(here))
    found["host_copy_bytes_per_second"] = 2 * nbytes / seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        found |= _bus(nbytes, here)
    side = 8192 if device == "cuda" and not settings["quick"] else 512
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    seconds = _fastest(lambda: left @ left)
    found["matrix_product_flop_per_second"] = 2 * side**3 / seconds
    of_kinds = measure_rates(scale=1 / 32 if settings["quick"] else 1.0)
    store_rates(detect_platform(log=False), of_kinds, file=Path(settings["folder"]) / RATES)
    return found | {"of this kind of work, per second": of_kinds}


def _bus(nbytes: int, pageable: Any) -> dict[str, float]:
    import torch

    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    locked = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    ways: dict[str, Callable[[], Any]] = {
        "up_pinned": lambda: there.copy_(locked, non_blocking=True),
        "down_pinned": lambda: locked.copy_(there, non_blocking=True),
        "up_pageable": lambda: there.copy_(pageable),
        "down_pageable": lambda: pageable.copy_(there),
    }
    rates_of = {f"{name}_bytes_per_second": nbytes / _fastest(way) for name, way in ways.items()}
    twin = torch.empty_like(there)
    rates_of["device_copy_bytes_per_second"] = 2 * nbytes / _fastest(lambda: twin.copy_(there))
    return rates_of


def _fastest(act: Callable[[], object], *, rounds: int = 5) -> float:
    from benchmarks.large_runs import synchronize

    def once() -> float:
        synchronize()
        began = time.perf_counter()
        act()
        synchronize()
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(rounds))


_INTERRUPTIBLE: Final = (
    "import signal, sys, pytest; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main())"
)
"""Pytest: what a shell begins in the background is born without an ear for interrupts."""


def tests(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tests that need a GPU, counted; which failed, and how.

    Those that time was left for: an interrupted pytest still says what it has found.
    """
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "tests.xml")
        command = [sys.executable, "-c", _INTERRUPTIBLE, "-v", "-m", "gpu or device",
                   "-p", "no:cacheprovider", "--continue-on-collection-errors",
                   f"--junitxml={xml}", *marked(settings["files"])]  # fmt: skip
        process = subprocess.Popen(command)
        whole = True
        try:
            process.wait(max(1.0, settings["limit_s"] - _ENDING_S))
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)
            process.wait()
        return {**counted(xml), "whole": whole}


def marked(places: Iterable[str]) -> list[str]:
    """Files among these, and in these folders, with tests for a device.

    pytest itself would import all others too, for minutes, also those that need what this machine
    lacks.
    """
    files = [
        file
        for place in map(Path, places)
        for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])
    ]
    return [str(file) for file in files if _MARKS.search(file.read_text(encoding="utf-8"))]


def counted(xml: Path) -> dict[str, Any]:
    """What a file of pytest says of its tests; none where it was ended before any began."""
    if not xml.exists():
        return {"passed": 0, "skipped": 0, "failed": 0, "failures": {}, "skips": []}
    (suite,) = ElementTree.parse(xml).getroot().iter("testsuite")
    cases = list(suite.iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        # A test that was interrupted is a case as well, but none that was counted.
        "passed": int(suite.get("tests", 0)) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": len(bad),
        "failures": {f"{one.get('classname')}.{one.get('name')}": _why(one) for one in bad},
        "skips": sorted({one.find("skipped").get("message") for one in skipped}),
    }


def _why(case: ElementTree.Element) -> str:
    texts = [found.text or "" for kind in ("failure", "error") for found in case.findall(kind)]
    return "\n".join(texts)[-1500:]


def contestant(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps of a large model: memory after set-up and at its peak, seconds by phase, waits."""
    from benchmarks import large_runs
    from benchmarks.families import FLUX, SDXL
    from benchmarks.framework import AnonPeak
    from benchmarks.large import host_bytes
    from benchmarks.sdxl import TINY

    config = {"sdxl": SDXL, "flux": FLUX, "tiny": TINY}[settings["model"]] | settings["more"]
    runner = getattr(large_runs, settings["made"])({**settings, "config": config})
    runner.load()
    with AnonPeak(os.getpid(), interval=0.01) as memory:
        began = time.perf_counter()
        about = runner.start()
        about["start_seconds"] = time.perf_counter() - began
        about |= {f"set_up_{key}": value for key, value in held_now().items()}
        samples = runner.run(settings["steps"])
    about |= samples | runner.memory()
    about["host_bytes"] = host_bytes(memory.growth, about)
    yield about
    # Last, since looking costs time and memory, and may fail where the driver does not allow it.
    looks: dict[str, Callable[[], Any]] = {"host_waits": lambda: waits(runner)}
    if settings["trace"]:
        looks["trace"] = lambda: traced(runner, Path(settings["folder"]))
    for key, look in looks.items():
        try:
            about[key] = look()
        except Exception as error:  # noqa: BLE001 - what was measured before stands all the same
            about[f"{key}_failed"] = _told(error)
        yield about
    runner.close()


def held_now() -> dict[str, float]:
    """What the device's allocator holds, bytes; nothing without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_bytes": float(torch.cuda.memory_allocated()),
        "reserved_bytes": float(torch.cuda.memory_reserved()),
    }


def waits(runner: Any) -> dict[str, int]:
    """How often a step waits for the device, as torch tells; numbers read, without a GPU too."""
    import warnings

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # By storage: numbers that came to the host together do not wait one by one. Kept, so that no
    # address is used twice.
    asked: dict[int, Any] = {}

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                asked[args[0].untyped_storage()._cdata] = args[0]
            return func(*args, **(kwargs or {}))

    cuda = torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as told, Reads():
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        runner._step(split=False)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    synchronizing = sum("synchroniz" in str(one.message) for one in told)
    return {"numbers_read": len(asked), **({"synchronizations": synchronizing} if cuda else {})}


def traced(runner: Any, folder: Path) -> str:
    """Profile one step; the name of the trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        runner._step(split=False)
    name = f"{runner._settings['model']}-{runner._settings['made'].lower()}-trace.json.gz"
    profiler.export_chrome_trace(str(folder / name))
    return name
