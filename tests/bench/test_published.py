import runpy
from pathlib import Path

import pytest

from bench.published import left_out, published, residuals, spread
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.memory.rates import PUBLISHED_SPREAD, catalogued_rates
from zerotune.platform import Platform

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_predictions_is_current():
    written = runpy.run_path(str(DOCS / "generate_predictions.py"))["page"]()
    assert written == (DOCS / "predictions.md").read_text(encoding="utf-8"), (
        "run python docs/generate_predictions.py"
    )


def test_the_spread_that_advise_prints_is_that_of_residuals_with_each_run_left_out():
    assert spread(left_out(residuals(published()))) == PUBLISHED_SPREAD


def test_lean_runs_of_others_are_compared_with_lean_plans():
    lean = [one for one in published() if "Adafactor" in one.setting]
    assert len(lean) == 5
    # Weights in bf16 and Adafactor's sums; with masters and moments, it would be four times that.
    weights = {"flux": 11.9, "qwen-image": 20.4, "chroma": 8.9, "sdxl": 2.57}
    names = [next(name for name in weights if one.setting.lower().startswith(name.split("-")[0]))
             for one in lean]  # fmt: skip
    for one, name in zip(lean, names, strict=True):
        assert 2 * weights[name] * 1e9 / 2**30 < one.host < 2.2 * weights[name] + 3


def test_a_run_is_compared_with_predictions_refitted_to_the_others_only():
    assert left_out([0.0, 0.0, 1.0]) == [pytest.approx(-1 / 3), pytest.approx(-1 / 3), 1.0]


def test_advise_prints_the_spread_only_for_catalogued_rates_of_a_card():
    machine = Platform.synthetic("cuda", vram=24 * 2**30, ram=64 * 2**30)
    rates = catalogued_rates(machine)
    asked = {"platform": machine, "precision": "bf16"}
    told = DeepSpeedPlan.advise("sdxl", **asked, rates=rates)
    words = " ".join(told.explain().split())
    assert "published runs lie -40 to +35 % beside predictions" in words
    assert told.chosen.time is not None
    assert told.chosen.time.published_spread == PUBLISHED_SPREAD
    measured = rates.with_measured({"products": rates.products}, origin="measured here")
    assert "published runs" not in DeepSpeedPlan.advise("sdxl", **asked, rates=measured).explain()
