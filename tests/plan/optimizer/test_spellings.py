"""All spellings of an optimizer give the same findings, estimate, seconds and settled choice."""

from __future__ import annotations

import pytest

from zerotune import DeepSpeedPlan, Platform
from zerotune.errors import ZeroTuneError
from zerotune.plan import Workload
from zerotune.plan.context import Context
from zerotune.plan.families import family
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.names import BY_WORD
from zerotune.plan.rules.table import check_plan

CUDA = Platform.synthetic("cuda", vram=24 << 30, ram=256 << 30)
PARAMS = {"lr": 1e-4, "weight_decay": 0.0}
MODEL = family("sdxl")
WORK = Workload(batch=1, height=1024, width=1024)
CONTEXT = Context(platform=CUDA, model=MODEL)


def plan(name, *, stage=2, device="cpu", params=PARAMS, **section):
    return DeepSpeedPlan.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": name, "params": params},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {"device": device, **section},
            },
        }
    )


def rules(name, **options):
    return {finding.rule for finding in check_plan(plan(name, **options), CONTEXT)}


def test_adamw_with_bf16_states_is_faster_than_adamw():
    resolved = plan("AdamWBF16States").resolve(platform=CUDA, model=family("flux"))
    seconds = resolved.estimate(WORK).step_time().seconds
    assert seconds < plan("AdamW").estimate("flux", platform=CUDA).step_time().seconds


def test_fused_adam_with_l2_is_not_adamw():
    l2 = {**PARAMS, "adam_w_mode": False}
    assert "partial-offload-optimizer" in rules("FusedAdam", stage=3, ratio=0.5, params=l2)


# -- All optimizers.


PLACES = {
    "stage 2": {"stage": 2},
    "a part on the device": {"stage": 3, "ratio": 0.5},
    "swapped with few buffers": {"stage": 3, "device": "nvme", "buffer_count": 3},
    "not offloaded": {"stage": 1, "device": "none"},
}


def meaning(name, place):
    """Return findings, choice, estimate and seconds, without the spelling."""
    findings = check_plan(plan(name, **place), CONTEXT)
    found = {finding.rule for finding in findings} - {"optimizer-spelling"}
    if any(finding.severity == "error" for finding in findings):
        return found, None
    try:
        resolved = plan(name, **place).resolve(platform=CUDA, model=MODEL)
    except ZeroTuneError as error:  # It cannot run there, and the error's value is the spelling.
        return found, (error.key, error.fix)
    estimate = resolved.estimate(WORK)
    return found, resolved.optimizer, estimate.items, estimate.step_time().seconds


def spellings(name):
    yield from (word for word, stands_for in BY_WORD.items() if stands_for == name)
    yield f" {name[:2].upper()}_{name[2:]} "


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_spelling_gives_the_same_findings_estimate_and_choice(monkeypatch, name):
    # The result must not depend on the installed packages.
    monkeypatch.setattr("zerotune.plan.optimizer.capability.find_spec", lambda _name: True)
    for place, where in PLACES.items():
        expected = meaning(name, where)
        assert [each for each in spellings(name) if meaning(each, where) != expected] == [], place
