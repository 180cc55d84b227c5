"""Page-locked blocks keep their size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotune.backend.deepspeed import placement as pinning
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.fill import SETTING, pins_exactly
from zerotune.plan.memory.model import Workload
from zerotune.platform import GIB, Platform


def resolved(accelerator: Any = "cuda", torch_version: str | None = None, **more: Any) -> Any:
    versions = {} if torch_version is None else {"torch": torch_version}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16", **{"offload": "cpu", **more})
    model = ModelFacts.from_shapes([("weight", (3 * 2**14, 2**14))])
    return plan.resolve(platform=Platform.synthetic(accelerator, versions=versions), model=model)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for torch's allocator, which this process must not change for other tests."""
    written = ["expandable_segments:True"]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: written[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", written.append)
    return written


def test_other_settings_are_kept(settings: list[str]) -> None:
    (decision,) = pinning.pin_exactly(resolved(), environ={})
    assert settings == ["expandable_segments:True", f"expandable_segments:True,{SETTING}:1"]
    assert (decision.key, decision.after) == (f"torch.{SETTING}", 1)
    pinning.pin_exactly(resolved(), environ={})
    assert len(settings) == 2, "a second engine has nothing left to set"


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        ({"PYTORCH_ALLOC_CONF": f"expandable_segments:True, {SETTING}:4096"}, "4096"),
        ({"PYTORCH_CUDA_ALLOC_CONF": f"{SETTING}:7"}, "7"),
        ({"DS_PIN_MEMORY_BACKEND": "Native"}, None),
    ],
)
def test_what_the_user_wrote_stands(
    settings: list[str], environ: dict[str, str], after: str | None
) -> None:
    (decision,) = pinning.pin_exactly(resolved(), environ=environ)
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
def test_nothing_is_touched_where_nothing_is_pinned(settings: list[str], plan: Any) -> None:
    assert pinning.pin_exactly(plan, environ={}) == ()
    assert len(settings) == 1


def test_a_torch_that_rounds_all_the_same_is_found_out(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_pinned_bytes_of", lambda _nbytes: 4 * 2**20)
    (decision,) = pinning.pin_exactly(resolved(), environ={})
    assert (decision.after, decision.severity) == (None, "warning")
    assert "DS_PIN_MEMORY_BACKEND=native" in decision.reason


def test_a_torch_without_the_setting_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    (decision,) = pinning.pin_exactly(resolved(), environ={})
    assert decision.severity == "warning"


def test_this_torch_has_the_setting() -> None:
    assert callable(torch._C._accelerator_setAllocatorSettings)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "exact"),
    [(None, True), ("2.13.0+cu130", True), ("3.0", True), ("2.9.1", False), ("odd", False)],
)
def test_the_estimate_follows_the_torch_installed(version: str | None, exact: bool) -> None:
    plan = resolved(torch_version=version)
    assert pins_exactly(plan.platform) is exact
    estimate = plan.estimate(Workload())
    (master,) = [item for item in estimate.items if item.component == "master weights"]
    assert master.nbytes == (3 * GIB if exact else 4 * GIB)
    stated = plan.estimate(Workload(exact_pinning=not exact))
    (master,) = [item for item in stated.items if item.component == "master weights"]
    assert master.nbytes == (4 * GIB if exact else 3 * GIB)


@pytest.mark.gpu
def test_a_gpu_pins_exactly() -> None:
    (decision,) = pinning.pin_exactly(resolved(), environ={})
    assert decision.severity == "note"
    assert pinning._pinned_bytes_of(5 * 2**20) in (0, 5 * 2**20)
