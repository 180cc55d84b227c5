"""Schedules as data and as an image."""

from __future__ import annotations

import attrs
import pytest

from zerotune.errors import InvalidValueError
from zerotune.optim import OptimizerResolver, ParameterGroups
from zerotune.plan.context import RunFacts
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.curves import lr_at


@pytest.fixture
def plan(make_plan):
    plan = make_plan(
        "AdamW", {"lr": 1e-3}, scheduler="cosine", run=RunFacts(total_steps=40, warmup_steps=5)
    )
    return attrs.evolve(
        plan, model=ModelFacts.from_shapes([("unet.weight", (4, 4)), ("text.weight", (4, 4))])
    )


def test_the_curve_equals_the_rates_of_the_steps(plan):
    resolver = OptimizerResolver()
    curve = resolver.schedule_curve(plan)
    scheduler = resolver.resolve(plan).scheduler
    assert curve.steps == 40
    assert curve.groups == ("all",)
    assert curve.rates[0] == tuple(lr_at(scheduler, step, 1e-3) for step in range(40))


def test_each_group_has_a_curve(plan):
    groups = ParameterGroups.per_part({"unet": {"lr": 1e-3}, "text": {"lr": 1e-4}})
    curve = OptimizerResolver(groups=groups).schedule_curve(plan, steps=10)
    assert curve.groups == ("unet", "text")
    assert curve.rates[1] == pytest.approx([rate / 10 for rate in curve.rates[0]])


def test_a_curve_requires_steps(plan):
    with pytest.raises(InvalidValueError, match="at least one step"):
        OptimizerResolver().schedule_curve(plan, steps=-1)


def test_the_plot_is_a_png_and_leaves_no_other_file(plan, tmp_path):
    pytest.importorskip("matplotlib")
    path = OptimizerResolver().plot_schedule(plan, tmp_path / "lr.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
