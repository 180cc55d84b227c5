"""``RunningAccelerator``: one module answers for every kind of device, also for unknown kinds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerotune
from zerotune.backend.accelerator import (
    DeviceMemory,
    RunningAccelerator,
    accelerator_for,
    accelerator_of,
    current_accelerator,
)
from zerotune.platform.facts import GIB

CPU = accelerator_of(torch.device("cpu"))
ROOT = Path(zerotune.__file__).parent
ANSWERS = (ROOT / "backend" / "accelerator.py", ROOT / "platform")


def named_kinds(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of a module that name CUDA or XPU, other than in a docstring."""
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = node.value.id == "torch" and node.attr in ("cuda", "xpu")
        elif isinstance(node, ast.Import):
            found = any(name.name.startswith(("torch.cuda", "torch.xpu")) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            found = module.startswith(("torch.cuda", "torch.xpu")) or (
                module == "torch" and any(name.name in ("cuda", "xpu") for name in node.names)
            )
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            found = isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"
        else:
            continue
        if found:
            yield node.lineno


def test_no_other_module_names_a_kind_of_device() -> None:
    files = [
        path
        for path in ROOT.rglob("*.py")
        if not any(path == answer or answer in path.parents for answer in ANSWERS)
    ]
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in named_kinds(ast.parse(path.read_text()))
    ]
    assert len(files) > 100
    assert places == [], "ask zerotune.backend.accelerator or zerotune.platform.facts instead"


def test_the_cpu_answers_without_branches_in_callers() -> None:
    CPU.synchronize()
    CPU.empty_cache()
    assert CPU.is_host
    assert CPU.streams is None
    assert CPU.memory() is None
    assert CPU.page_locked("peak") is None
    assert CPU.random_state() is None
    assert not CPU.registers_memory
    assert not CPU.is_nvidia
    assert CPU.fuses_adam
    assert (CPU.communication_backend, CPU.driver) == ("gloo", "none")


def test_a_plan_for_the_cpu_runs_on_the_cpu_and_others_on_the_running_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = torch.device("meta")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: running)
    assert current_accelerator().device == accelerator_for("cuda").device == running
    assert accelerator_for("cpu") is CPU


@pytest.mark.parametrize(
    ("kind", "name"), [("cuda", "cuda"), ("rocm", "cuda"), ("xpu", "xpu"), ("mps", "mps")]
)
def test_without_an_accelerator_the_kind_names_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    assert accelerator_for(kind).device.type == name
    assert current_accelerator() is CPU


# -- Devices that this machine does not have, as their torch modules describe them.


def device(monkeypatch: pytest.MonkeyPatch, module: Any, kind: str = "privateuseone") -> Any:
    """Return what torch offers for a device whose module is ``module``."""
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    return RunningAccelerator(torch.device(kind))


def module(**more: Any) -> SimpleNamespace:
    """Return a device module with what every kind has."""
    facts = SimpleNamespace(name="Card", major=9, minor=1)
    known = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _index: facts,
        "mem_get_info": lambda _device: (70 * GIB, 80 * GIB),
        "memory_reserved": lambda _device: 8 * GIB,
        "max_memory_reserved": lambda _device: 9 * GIB,
        "max_memory_allocated": lambda _device: 7 * GIB,
        "Stream": object,
    }
    return SimpleNamespace(**known | more)


def test_a_registered_device_needs_no_name_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "privateuseone", "its-own")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "its-own")
    card = device(monkeypatch, module(host_memory_stats=lambda: {"allocated_bytes.peak": 5}))
    assert not card.is_host
    assert card.streams is not None
    assert card.fuses_adam
    assert card.name == "Card, 9.1"
    assert card.communication_backend == "its-own"
    assert card.memory() == DeviceMemory(
        total=80 * GIB,
        free=70 * GIB,
        allocated_peak=7 * GIB,
        reserved=8 * GIB,
        reserved_peak=9 * GIB,
    )
    assert (card.page_locked("peak"), card.page_locked("current")) == (5, 0)


def test_memory_is_registered_with_the_driver_and_refusals_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError("the driver refuses")

    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, _flags: calls.append((address, nbytes)) or 0,
        cudaHostUnregister=lambda address: address == 0 or 1,
    )
    card = device(monkeypatch, module(cudart=lambda: driver, check_error=check_error))
    tensor = torch.zeros(4)
    assert card.registers_memory
    card.register_memory(tensor)
    assert calls == [(tensor.data_ptr(), 16)]
    with pytest.raises(RuntimeError, match="refuses"):
        card.unregister_memory(tensor)


def test_what_a_device_does_not_report_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_device: Any) -> Any:
        raise RuntimeError("the driver does not report free memory")

    properties = SimpleNamespace(name="Arc", driver_version="1.2.3")
    arc = device(
        monkeypatch,
        module(mem_get_info=unsupported, get_device_properties=lambda _index: properties),
        "xpu",
    )
    assert arc.memory() is None
    assert arc.page_locked("peak") is None
    assert not arc.registers_memory
    assert (arc.name, arc.driver) == ("Arc", "1.2.3")


def test_a_device_without_streams_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    apple = device(monkeypatch, SimpleNamespace(is_available=lambda: True), "mps")
    assert not apple.is_host
    assert apple.streams is None
    assert apple.memory() is None
    assert not apple.fuses_adam
    assert apple.name == "mps"


def test_a_device_that_is_not_available_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = device(monkeypatch, module(is_available=lambda: False), "cuda")
    assert absent.memory() is None
    assert absent.page_locked("peak") is None
    assert absent.random_state() is None
    assert absent.name == "cuda"
    assert not absent.is_nvidia
    absent.empty_cache()


def test_a_generator_that_was_never_used_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([1])]
    ready = [False]
    card = device(
        monkeypatch,
        module(
            is_initialized=lambda: ready[0],
            get_rng_state=lambda: states[-1],
            set_rng_state=states.append,
        ),
    )
    assert card.random_state() is None
    ready[0] = True
    card.restore_random_state(torch.tensor([2]))
    assert card.random_state() is states[-1]


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
@pytest.mark.parametrize("built", [True, False])
def test_a_backend_that_torch_was_not_built_with_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str, built: bool
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda _name: built)
    chosen = accelerator_of(torch.device(kind)).communication_backend
    assert chosen == (backend if built else "gloo")


def test_the_devices_peak_includes_memory_of_libraries_loaded_after_the_start() -> None:
    """The CUDA context takes 0.5 GiB at the start, 2 GiB once all kernels are loaded."""

    def figures(free: int = 70 * GIB, others: int = 0) -> DeviceMemory:
        return DeviceMemory(
            total=80 * GIB,
            free=free,
            allocated_peak=7 * GIB,
            reserved=8 * GIB,
            reserved_peak=9 * GIB,
            others=others,
        )

    assert figures().context == 2 * GIB
    assert figures().peak == 11 * GIB
    assert figures(others=GIB).peak == 10 * GIB
    assert figures(free=75 * GIB).peak == 9 * GIB, "figures of two moments never go below zero"


@pytest.mark.gpu
def test_a_gpu_answers_everything() -> None:
    card = current_accelerator()
    here = torch.ones(2**20, pin_memory=True).to(card.device)
    card.synchronize()
    memory = card.memory()
    assert memory is not None
    assert memory.allocated_peak >= here.nbytes
    assert memory.total > memory.free > 0
    assert card.page_locked("peak") > 0
    assert card.name != card.device.type
    assert card.driver
    block = torch.zeros(2**12)
    card.register_memory(block)
    card.unregister_memory(block)
    state = card.random_state()
    first = torch.rand(3, device=card.device)
    card.restore_random_state(state)
    assert torch.equal(torch.rand(3, device=card.device), first)
