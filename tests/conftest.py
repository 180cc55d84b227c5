"""Skip tests whose hardware is missing, and fail tests that leave something behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import call_in_ranks, compile_device, compile_io, share_fork_server
from tests.support.recording import RECORD
from zerotune import decisions

_IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}
_ENDING_S = 5.0
UNKNOWN_S = 30
"""Taken for a file with engines that is not recorded."""
_LEAKY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


def _unmet(item: pytest.Item) -> list[str]:
    """Return every reason why this test cannot run here."""
    reasons = []
    if item.get_closest_marker("deepspeed") and not importlib.util.find_spec("deepspeed"):
        reasons.append("deepspeed is not installed (pip install deepspeed)")
    if item.get_closest_marker("nvme") and not Path("/usr/include/libaio.h").exists():
        reasons.append("libaio's header is missing (apt install libaio-dev)")
    if item.get_closest_marker("simdev") and (missing := _why_no_device()):
        reasons.append(missing)
    if item.get_closest_marker("gpu") and not _has_cuda():
        reasons.append("no CUDA device")
    return reasons


def _why_no_device() -> str | None:
    from tests.device.build import why_missing

    return why_missing()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Collecting imports libraries, whose objects the garbage collector would scan again and again.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        share_fork_server()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker ends alone with one of them."""
    known = json.loads(RECORD.read_text(encoding="utf-8"))
    root = RECORD.parents[1]
    # Tests that wait for other processes take longer than their processor seconds.
    seconds = {
        root / file: max(cost.get("seconds", 0), cost.get("wall", 0))
        for file, cost in known.items()
    }
    for item in items:
        if item.get_closest_marker("deepspeed"):
            seconds.setdefault(item.path, UNKNOWN_S)
    items.sort(key=lambda item: -seconds.get(item.path, 0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    reasons = _unmet(item)
    if not reasons:
        return
    message = "; ".join(reasons)
    # CI must have everything but a GPU: skipping would hide a broken installation.
    if _IN_CI and reasons != ["no CUDA device"]:
        pytest.fail(f"CI lacks a component it should have: {message}", pytrace=False)
    pytest.skip(message)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    call_in_ranks(pyfuncitem, mark)
    return True


# No deadlines: they would measure other load on the machine.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("zerotune", deadline=None)
    settings.load_profile("zerotune")


@pytest.fixture(autouse=True, scope="module")
def libraries_are_not_collected() -> None:
    """Keep the garbage collector from scanning loaded libraries again (0.25 s per collection)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_announced_yet() -> None:
    """Forget logged decisions: a process logs each one only once, and many tests share it."""
    decisions._announced.clear()


@pytest.fixture(autouse=True)
def tiny_models_have_several_units(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divide the weights of tiny models into as many units as those of large ones."""
    if {"backend", "device"} & set(request.path.parts):
        monkeypatch.setattr("zerotune.plan.facts.SMALLEST_UNIT", 1)


@pytest.fixture(autouse=True)
def io_is_compiled(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("nvme"):
        compile_io()
    if request.node.get_closest_marker("simdev"):
        compile_device()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    environment = {name: os.environ.get(name) for name in _LEAKY}
    threads = set(threading.enumerate())
    yield
    leaked = {name for name in _LEAKY if os.environ.get(name) != environment[name]}
    assert not leaked, f"the test changed {sorted(leaked)} and did not restore it"
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            # Other libraries' pools may still be shutting down.
            thread.join(_ENDING_S)
    new = {t.name for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon}
    assert not new, f"the test left threads running: {sorted(new)}"
    _torch_as_it_was()


def _torch_as_it_was() -> None:
    """Check that neither a process group nor a changed grad mode is left for later tests."""
    if "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    assert not (dist.is_available() and dist.is_initialized()), "a process group was left"
    with_gradients = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert with_gradients, "gradients were left switched off"


@pytest.fixture
def mounted():
    """Return a function that mounts a file system or skips; unmount everything afterwards."""
    points = []

    def mount(point, *options):
        point.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", *options, str(point)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", str(point)], check=True)
