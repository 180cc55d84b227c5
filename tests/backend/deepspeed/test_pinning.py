"""Page-locked blocks keep their size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks
from zerotune.backend.deepspeed import start
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.memory.estimate import Workload
from zerotune.plan.resolve import SETTING, pins_exactly, pins_natively
from zerotune.platform import Platform, detect_platform
from zerotune.platform.facts import GIB, HostMemory


def resolved(accelerator: Any = "cuda", torch_version: str | None = None, **more: Any) -> Any:
    versions = {} if torch_version is None else {"torch": torch_version}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16", **{"offload": "cpu", **more})
    model = ModelFacts.from_shapes([("weight", (3 * 2**14, 2**14))])
    return plan.resolve(platform=Platform.synthetic(accelerator, versions=versions), model=model)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's process-wide allocator settings by a list, and return it."""
    written = ["expandable_segments:True"]
    read, write = "_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings"
    monkeypatch.setattr(torch._C, read, lambda: written[-1], raising=False)
    monkeypatch.setattr(torch._C, write, written.append, raising=False)
    return written


def test_exact_pinning_keeps_other_allocator_settings(
    settings: list[str], resources: ExitStack
) -> None:
    (decision,) = start.pin_exactly(resolved(), resources=resources, environ={})
    assert settings == ["expandable_segments:True", f"expandable_segments:True,{SETTING}:1"]
    assert (decision.key, decision.after) == (f"torch.{SETTING}", 1)
    start.pin_exactly(resolved(), resources=resources, environ={})
    assert len(settings) == 2, "a second engine has nothing left to set"


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        ({"PYTORCH_ALLOC_CONF": f"expandable_segments:True, {SETTING}:4096"}, "4096"),
        ({"PYTORCH_CUDA_ALLOC_CONF": f"{SETTING}:7"}, "7"),
        ({"DS_PIN_MEMORY_BACKEND": "Native"}, None),
    ],
)
def test_the_users_own_allocator_settings_win(
    settings: list[str], environ: dict[str, str], after: str | None, resources: ExitStack
) -> None:
    (decision,) = start.pin_exactly(resolved(), resources=resources, environ=environ)
    assert (decision.after, decision.severity) == (after, "note")
    assert len(settings) == 1


@pytest.mark.parametrize(
    "plan",
    [
        resolved("cpu"),
        resolved(offload="none"),
        resolved(offload_optimizer={"device": "cpu", "pin_memory": False}, offload="none"),
    ],
    ids=["cpu", "no offload", "not pinned"],
)
def test_a_plan_that_pins_nothing_changes_no_allocator_setting(
    settings: list[str], plan: Any, resources: ExitStack
) -> None:
    assert start.pin_exactly(plan, resources=resources, environ={}) == ()
    assert len(settings) == 1


def test_a_torch_that_rounds_despite_the_setting_is_detected(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, resources: ExitStack
) -> None:
    monkeypatch.setattr(start, "_pinned_bytes_of", lambda _nbytes: 4 * 2**20)
    (decision,) = start.pin_exactly(resolved(), resources=resources, environ={})
    assert (decision.after, decision.severity) == (None, "warning")
    assert "DS_PIN_MEMORY_BACKEND=native" in decision.reason


def test_a_torch_without_the_setting_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, resources: ExitStack
) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    (decision,) = start.pin_exactly(resolved(), resources=resources, environ={})
    assert decision.severity == "warning"


def old_platform(**more: Any) -> Platform:
    return Platform.synthetic("cuda", versions={"torch": "2.11.0", "deepspeed": "0.19.8"}, **more)


def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the setting, as in torch 2.11."""
    for name in ("get", "set"):
        monkeypatch.delattr(torch._C, f"_accelerator_{name}AllocatorSettings", raising=False)


@pytest.mark.deepspeed
@ranks(1)
def test_deepspeed_page_locks_memory_while_the_engine_lives_if_torch_cannot_pin_exactly(
    monkeypatch,
) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.pin_memory import get_native_pinned_memory

    limit = detect_platform(log=False).memlock_limit
    if limit is not None and limit < 4 * 2**20:
        pytest.skip(f"this process may lock {limit} bytes only")
    old_torch(monkeypatch)
    monkeypatch.setattr(start, "why_unproven", lambda *_, **__: None)
    plan = attrs.evolve(resolved(), platform=old_platform())
    assert "DS_PIN_MEMORY_BACKEND" not in os.environ
    with ExitStack() as resources:
        (decision,) = start.pin_exactly(plan, resources=resources)
        assert (decision.after, decision.severity) == ("native", "note")
        block = get_accelerator().pin_memory(torch.zeros(3 * 2**18))
        assert block.untyped_storage().nbytes() < 4 * 2**20, "as large as what was asked for"
        assert get_accelerator().is_pinned(block)
        assert os.environ["DS_PIN_MEMORY_BACKEND"] == "native"
        little = HostMemory(total=2**20, available=2**20)
        monkeypatch.setattr(start, "host_memory", lambda *_, **__: little)
        few = r"not enough memory: 2\.00 MiB must be page-locked, but only 1\.00 MiB are free"
        with pytest.raises(MemoryError, match=few):
            get_accelerator().pin_memory(torch.zeros(2**19))
    assert "_new_locked" not in vars(get_native_pinned_memory()), "nothing of DeepSpeed is changed"
    assert "DS_PIN_MEMORY_BACKEND" not in os.environ


def test_memory_that_deepspeed_may_not_lock_is_left_to_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, resources: ExitStack
) -> None:
    old_torch(monkeypatch)
    plan = attrs.evolve(resolved(), platform=old_platform(memlock_limit=8 * 2**20))
    (decision,) = start.pin_exactly(plan, resources=resources, environ={})
    assert (decision.after, decision.severity) == (None, "warning")
    assert "requires unlimited locked memory" in decision.reason
    assert "DS_PIN_MEMORY_BACKEND" not in os.environ


def test_the_estimate_is_exact_where_deepspeed_page_locks_memory_itself() -> None:
    plan = attrs.evolve(resolved(), platform=old_platform())
    assert not pins_exactly(plan.platform)
    assert pins_natively(plan.platform)
    assert not pins_natively(old_platform(memlock_limit=2**16))
    (master,) = [
        item for item in plan.estimate(Workload()).items if item.component == "master weights"
    ]
    assert master.nbytes == 3 * GIB
    limited = attrs.evolve(plan, platform=old_platform(memlock_limit=2**16))
    (master,) = [
        item for item in limited.estimate(Workload()).items if item.component == "master weights"
    ]
    assert master.nbytes == 4 * GIB


def test_the_installed_torch_has_the_allocator_setting() -> None:
    version = torch.__version__
    if not pins_exactly(Platform.synthetic("cuda", versions={"torch": version})):
        pytest.skip(f"torch {version} cannot be told; DeepSpeed page-locks memory itself there")
    assert callable(torch._C._accelerator_setAllocatorSettings)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "exact"),
    [(None, True), ("2.13.0+cu130", True), ("3.0", True), ("2.9.1", False), ("odd", False)],
)
def test_the_estimate_follows_the_installed_torch_version(version: str | None, exact: bool) -> None:
    plan = resolved(torch_version=version)
    assert pins_exactly(plan.platform) is exact
    estimate = plan.estimate(Workload())
    (master,) = [item for item in estimate.items if item.component == "master weights"]
    assert master.nbytes == (3 * GIB if exact else 4 * GIB)
    stated = plan.estimate(Workload(exact_pinning=not exact))
    (master,) = [item for item in stated.items if item.component == "master weights"]
    assert master.nbytes == (4 * GIB if exact else 3 * GIB)


@pytest.mark.gpu
@pytest.mark.deepspeed
@ranks(1)
def test_pinning_on_a_gpu_allocates_exact_sizes() -> None:
    from deepspeed.accelerator import get_accelerator

    def rounded() -> int:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.allocated", 0))

    # The installed torch decides, not the versions that the plan was made for.
    here = Platform.synthetic("cuda", versions=detect_platform(log=False).versions)
    with ExitStack() as resources:
        plan = attrs.evolve(resolved(), platform=here)
        (decision,) = start.pin_exactly(plan, resources=resources, environ={})
        before = rounded()
        block = get_accelerator().pin_memory(torch.zeros(5 * 2**20, dtype=torch.uint8))
        known = block.is_pinned()
        if decision.severity == "warning":
            pytest.skip(f"torch {torch.__version__} rounds: {decision.reason}")
        # Memory page-locked by DeepSpeed does not pass through torch's allocator.
        assert (rounded() - before) == (0 if decision.after == "native" else 5 * 2**20)
        assert known, "copies of memory that the driver does not know make the host wait"
