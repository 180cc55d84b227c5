"""Page-locked blocks keep their size."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks
from zerotune.backend.deepspeed import start
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.memory.items import Workload
from zerotune.plan.resolve.sizes import SETTING, pins_exactly
from zerotune.platform import Platform, detect_platform
from zerotune.platform.facts import GIB


def resolved(accelerator: Any = "cuda", torch_version: str | None = None, **more: Any) -> Any:
    versions = {} if torch_version is None else {"torch": torch_version}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16", **{"offload": "cpu", **more})
    model = ModelFacts.from_shapes([("weight", (3 * 2**14, 2**14))])
    platform = Platform.synthetic(accelerator, versions=versions)
    return plan.resolve(platform=platform, model=model, engine="deepspeed")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's process-wide allocator settings by a list, and return it."""
    written = ["expandable_segments:True"]
    read, write = "_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings"
    monkeypatch.setattr(torch._C, read, lambda: written[-1], raising=False)
    monkeypatch.setattr(torch._C, write, written.append, raising=False)
    return written


def test_exact_pinning_keeps_other_allocator_settings(settings: list[str]) -> None:
    (decision,) = start.pin_exactly(resolved(), environ={})
    assert settings == ["expandable_segments:True", f"expandable_segments:True,{SETTING}:1"]
    assert (decision.key, decision.after) == (f"torch.{SETTING}", 1)
    start.pin_exactly(resolved(), environ={})
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
    settings: list[str], environ: dict[str, str], after: str | None
) -> None:
    (decision,) = start.pin_exactly(resolved(), environ=environ)
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
    settings: list[str], plan: Any
) -> None:
    assert start.pin_exactly(plan, environ={}) == ()
    assert len(settings) == 1


def test_a_torch_without_the_setting_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    (decision,) = start.pin_exactly(resolved(), environ={})
    assert (decision.after, decision.severity) == (None, "warning")
    assert "DS_PIN_MEMORY_BACKEND=native" in decision.reason


def test_the_installed_torch_has_the_allocator_setting() -> None:
    version = torch.__version__
    if not pins_exactly(Platform.synthetic("cuda", versions={"torch": version})):
        pytest.skip(f"torch {version} cannot be told")
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
    plan = attrs.evolve(resolved(), platform=here)
    (decision,) = start.pin_exactly(plan, environ={})
    before = rounded()
    block = get_accelerator().pin_memory(torch.zeros(5 * 2**20, dtype=torch.uint8))
    if decision.severity == "warning":
        pytest.skip(f"torch {torch.__version__} rounds: {decision.reason}")
    assert rounded() - before == 5 * 2**20
    assert block.is_pinned(), "copies of memory that the driver does not know make the host wait"
