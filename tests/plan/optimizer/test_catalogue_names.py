from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.names import normalise_optimizer_name, parse_optimizer_name
from zerotune.plan.optimizer.schedules import SCHEDULERS, normalise_scheduler_name


def test_every_spelling_has_a_canonical_name():
    for written, canonical in [
        ("adamw", "AdamW"),
        ("ADAM_W", "AdamW"),
        ("adam-w", "AdamW"),
        (" Adam W ", "AdamW"),
        ("FusedAdam", "AdamW"),
        ("fused_adam", "AdamW"),
        ("cpuadam", "AdamW"),
        ("CPU-Adam", "AdamW"),
        ("DeepSpeedCPUAdagrad", "Adagrad"),
        ("DeepSpeedCPULion", "Lion"),
        ("FusedLamb", "Lamb"),
        ("1bit-adam", "OneBitAdam"),
        ("1-bit Adam", "OneBitAdam"),
        ("onebit_adam", "OneBitAdam"),
        ("1bit_lamb", "OneBitLamb"),
        ("0/1adam", "ZeroOneAdam"),
        ("0/1 Adam", "ZeroOneAdam"),
        ("zero_one_adam", "ZeroOneAdam"),
        ("adamw_torch", "AdamW"),
        ("rms-prop", "RMSprop"),
    ]:
        assert normalise_optimizer_name(written) == canonical


def test_class_names_are_distinguished_from_optimizer_names():
    assert parse_optimizer_name("FusedAdam").implementation
    assert not parse_optimizer_name("AdamW").implementation


@pytest.mark.parametrize(
    ("written", "suggestion"),
    [("adammw", "AdamW"), ("Adagard", "Adagrad"), ("lyon", "Lion"), ("moun", "Muon")],
)
def test_an_unknown_name_is_an_error_with_a_suggestion(written, suggestion):
    with pytest.raises(OptimizerError) as error:
        normalise_optimizer_name(written)
    assert error.value.key == "optimizer.type"
    assert error.value.value == written
    assert f"did you mean {suggestion}" in error.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "prodigyplus",
        "paged_adamw_8bit",
        # A different AdamW from DeepSpeed's: its prefix must not be dropped.
        "bitsandbytes.optim.AdamW",
        "torch.optim.AdamW",
        "torch.optim.FusedAdam.x",
        "adamw adamw",
        ".",
        "torch.optim.",
    ],
)
def test_an_unknown_name_never_becomes_adamw(name):
    with pytest.raises(OptimizerError):
        normalise_optimizer_name(name)


@pytest.mark.parametrize("name", [None, 3, "", "   ", ["AdamW"]])
def test_a_name_must_be_text(name):
    with pytest.raises(InvalidValueError, match=r"optimizer\.type"):
        normalise_optimizer_name(name)
    with pytest.raises(InvalidValueError, match=r"scheduler\.type"):
        normalise_scheduler_name(name)


@given(st.text(max_size=40))
def test_any_text_gives_a_canonical_name_or_our_error(text):
    try:
        outcome = normalise_optimizer_name(text)
    except (OptimizerError, InvalidValueError) as error:
        outcome = error.key
    assert outcome in {*OPTIMIZERS, "optimizer.type"}


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    separator=st.sampled_from(["", "-", "_", " "]),
    upper=st.booleans(),
    data=st.data(),
)
def test_case_and_separators_in_names_are_ignored(name, separator, upper, data):
    cut = data.draw(st.integers(0, len(name)))
    written = name[:cut] + separator + name[cut:]
    written = written.upper() if upper else written.lower()
    assert normalise_optimizer_name(written) == name


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedule_names_ignore_case(name):
    assert normalise_scheduler_name(name.lower()) == name
    assert normalise_scheduler_name(f"deepspeed.runtime.lr_schedules.{name}") == name


@pytest.mark.parametrize(
    ("written", "suggestion"),
    [
        ("torch.optim.lr_scheduler.LinearLR", "WarmupLR"),
        ("CosineAnnealingLR", "WarmupCosineLR"),
        ("OneCycle", "cosine"),
        ("Polynomial_LR", "WarmupDecayLR"),
    ],
)
def test_unsupported_schedules_are_refused_with_deepspeeds_name(written, suggestion):
    with pytest.raises(OptimizerError) as error:
        normalise_scheduler_name(written)
    assert suggestion in error.value.fix
    assert error.value.value == written


def test_a_misspelt_schedule_gives_a_suggestion():
    with pytest.raises(OptimizerError, match="did you mean WarmupDecayLR"):
        normalise_scheduler_name("WarmupDecyaLR")
