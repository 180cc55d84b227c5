from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError
from zerotune.plan.optimizer.arguments import check
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.entries import Parameter
from zerotune.plan.optimizer.schedules import SCHEDULERS
from zerotune.plan.values import Choice

ADAMW = OPTIMIZERS["AdamW"]


def checked(name, value, entry=ADAMW):
    return check(entry.parameter(name), value, section="optimizer.params")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0),
        ("lr", -1e-4),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", True),
        ("lr", "fast"),
        ("lr", None),
        ("lr", [1e-4]),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9,)),
        ("betas", (0.9, 0.99, 0.999)),
        ("betas", 0.9),
        ("betas", "0.9"),
        ("betas", (0.9, math.nan)),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("weight_decay", -0.01),
        ("weight_decay", math.inf),
        ("bias_correction", 1),
        ("adam_w_mode", "maybe"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key_and_value(name, value):
    with pytest.raises(InvalidValueError) as error:
        checked(name, value)
    assert error.value.key == f"optimizer.params.{name}"
    assert error.value.value is value


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("lr", "1e-4", 1e-4),
        ("lr", 1, 1.0),
        ("betas", [0.9, "0.999"], (0.9, 0.999)),
        ("betas", [0, 0], (0.0, 0.0)),
        ("weight_decay", 0, 0.0),
        ("adam_w_mode", "False", False),
        ("foreach", None, None),
    ],
)
def test_values_are_converted_to_their_type(name, value, result):
    found = checked(name, value)
    assert found == result
    assert type(found) is type(result)


def test_a_count_accepts_an_integral_float_and_refuses_a_fraction():
    steps = next(
        item for item in SCHEDULERS["WarmupLR"].parameters if item.name == "warmup_num_steps"
    )
    assert check(steps, 5e2, section="scheduler.params") == 500
    assert isinstance(check(steps, "5e2", section="scheduler.params"), int)
    with pytest.raises(InvalidValueError, match=r"scheduler\.params\.warmup_num_steps = 1\.5"):
        check(steps, 1.5, section="scheduler.params")


def test_a_choice_is_normalised_to_deepspeeds_spelling():
    kind = Parameter(name="warmup_type", kind=Choice(choices=("log", "linear")))
    assert check(kind, " Linear", section="scheduler.params") == "linear"


def test_every_default_passes_its_own_check():
    for name in sorted(OPTIMIZERS):
        for parameter in OPTIMIZERS[name].parameters:
            if parameter.optional:
                continue
            for value in (parameter.default, parameter.unwritten):
                assert check(parameter, value, section="optimizer.params") == value


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3),
    max_leaves=5,
)


@given(value=JSON, name=st.sampled_from(ADAMW.parameter_names))
def test_any_json_value_is_accepted_in_range_or_refused(value, name):
    parameter = ADAMW.parameter(name)
    try:
        accepted = check(parameter, value, section="optimizer.params")
    except InvalidValueError:
        return
    numbers = accepted if isinstance(accepted, tuple) else (accepted,)
    for number in numbers:
        if isinstance(number, float):
            assert math.isfinite(number)
            kind = getattr(parameter.kind, "each", parameter.kind)
            assert kind.minimum <= number < (math.inf if kind.below is None else kind.below)
