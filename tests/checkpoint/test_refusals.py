"""Damaged and foreign checkpoints and impossible saves give one clear error each."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
import torch

from tests.checkpoint import refusals
from tests.checkpoint.refusals import told
from tests.support.models import HostileNet
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, start
from zerotune.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> dict[str, Any]:
    return run_ranks(refusals.damaged, str(tmp_path_factory.mktemp("damaged")))[0]


@pytest.fixture(scope="module")
def refused_in(tmp_path_factory) -> Any:
    return tmp_path_factory.mktemp("refused")


@pytest.fixture(scope="module")
def refused(refused_in) -> dict[str, Any]:
    return run_ranks(refusals.refused, str(refused_in))[0]


FILE = r"optimizer\.exp_avg-00001-of-00001\.safetensors"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("flipped", rf"CheckpointCorruptError: .*flipped/{FILE}: was changed after it was written"),
        ("header", rf"CheckpointCorruptError: .*header/{FILE}: was changed after it was written"),
        ("truncated", rf"CheckpointCorruptError: .*{FILE}: has 1500 bytes instead of \d+"),
        ("missing", rf"CheckpointCorruptError: .*{FILE}: is missing"),
        ("manifest", r"CheckpointCorruptError: .*manifest/manifest\.json: "),
        ("beheaded", r"CheckpointError: .*beheaded: is not a checkpoint \(contains no manifest"),
    ],
)
def test_damage_is_detected_before_anything_is_loaded(damaged, harm, message):
    assert re.match(message, damaged[f"load {harm}"])
    assert re.match(message, damaged[f"verify {harm}"])
    assert damaged[f"unchanged {harm}"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("extra tensor", r"extra\.a\[1\] = tensor\(\[0\.\]\): cannot be saved as JSON"),
        ("extra nan", r"extra\.a\.b = nan: cannot be saved as JSON"),
        ("extra key", r"extra\.a = 1: is not a string, but JSON keys must be strings.*write '1'"),
        ("shadow name", r"shadows = 'a/b'"),
        ("accumulating", r"gradient_accumulation_steps = 2: 1 of 2 micro batches"),
        ("not ours", r"mine: exists and is not a checkpoint, so it is not overwritten"),
        ("a file", r"thesis\.txt: exists and is not a checkpoint"),
        ("a link", r"link: is a symbolic link.*pass the folder that the link points to, .*good"),
        ("disk too small", r"needs .* KiB of disk space, but only 16\.00 MiB are free.*prune"),
        (
            "disk full",
            r"OSError: .*No space left on device: .*\.safetensors",
        ),
        ("no such folder", r"none: does not exist.*latest_checkpoint"),
        ("no checkpoint", r"mine: is not a checkpoint"),
        ("parent", r"steps: is not a checkpoint.*did you mean .*step-00000002"),
    ],
)
def test_impossible_saves_and_loads_are_refused_with_the_reason(refused, what, message):
    assert refused[what].startswith("CheckpointError: ")
    assert re.search(message, refused[what]), refused[what]


def test_non_finite_checkpoints_are_not_saved_unless_allowed(refused):
    for name in ("not finite", "former stays"):
        assert refused[name].startswith("CheckpointNotFiniteError: ")
        assert "NaN or infinity in weights/" in refused[name]
        assert "allow_not_finite=True" in refused[name]
    kinds = {name.split("/")[0] for name in refused["asked"]}
    assert kinds == {"weights", "optimizer.exp_avg"}
    assert refused["finite"].endswith("step-00000001"), "unknown ones are read"


def test_a_nan_in_a_buffer_prevents_saving_and_an_infinity_does_not(refused):
    said = refused["not a number in a buffer"]
    assert said.startswith("CheckpointNotFiniteError: ")
    assert "in buffer/average, so the checkpoint is not saved" in said
    assert refused["buffer asked"] == ("buffer/average",)
    assert refused["infinite buffer"] == ""


def test_a_swapped_in_shadow_is_not_saved_as_trained_weights(refused):
    assert refused["swapped in"].startswith(
        "EMAError: state_dict(): cannot be called while the shadow is swapped in"
    )


def test_shadows_are_matched_by_name(refused):
    assert "CheckpointMismatchError: shadows = ['slow']" in refused["unknown shadow"]
    assert "its shadows are ['ema']" in refused["unknown shadow"]
    (decision,) = refused["shadow left out"]
    assert decision.startswith("shadows.ema: 'saved' -> unset")


def test_failed_saves_leave_only_the_good_checkpoint(refused):
    assert refused["left"] == ["good", "link", "mine", "steps"]
    assert refused["good"] == ""


@ranks(1)
def test_differences_to_another_model_are_reported_by_name(refused, refused_in):
    folder = refused_in / "good"

    class Another(HostileNet):
        def __init__(self) -> None:
            super().__init__()
            self.second = torch.nn.Linear(13, 8)
            self.third = torch.nn.Linear(2, 2)
            self.scale.requires_grad_(False)
            self.register_buffer("calls", torch.zeros(2))

    engine = start(attrs.evolve(PLAIN, accumulation=2), Another())
    error = told(lambda: load_checkpoint(folder, engine=engine))
    engine.close()
    assert error.startswith("CheckpointMismatchError: model = 'Another'")
    assert "parameters missing from the checkpoint: third.weight, third.bias" in error
    assert "parameters only in the checkpoint: scale" in error
    assert "second.weight (7, 13) instead of (8, 13)" in error
    assert "second.bias (7,) instead of (8,)" in error
    assert "buffers only in the checkpoint: average" in error
    assert "calls () instead of (2,)" in error


def test_differences_to_another_plan_are_reported_by_key(refused, refused_in):
    folder = str(refused_in / "good")
    case = attrs.evolve(PLAIN, precision="bf16", lr=5e-4)
    for decisions in run_ranks(refusals.other_plan, folder, case, world_size=2):
        for said in (
            "precision: 'fp32' -> 'bf16' (the checkpoint",
            "gradient_accumulation_steps: 2 -> 1",
            "optimizer.params.lr: 0.001 -> 0.0005",
            "shadows.ema",
            "world_size: 1 -> 2",
            "rng: 1 -> 2 (ranks that existed",
        ):
            assert any(d.startswith(said) for d in decisions), said


def test_loading_into_an_open_accumulation_window_is_refused(refused):
    assert refused["load accumulating"].startswith("CheckpointError: gradient_accumulation_steps")
    assert "applied to the loaded weights" in refused["load accumulating"]


def test_a_different_optimizer_begins_with_fresh_states(refused, refused_in):
    sgd = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}
    case = attrs.evolve(PLAIN, accumulation=2, optimizer=sgd)
    (found,) = run_ranks(refusals.other_optimizer, str(refused_in / "good"), case)
    assert found["weights"]
    assert found["ema"]
    assert found["states"] == {("momentum_buffer", False)}
    assert found["step"] == 2
    (decision,) = [d for d in found["decisions"] if d.startswith("optimizer.states: ")]
    assert decision.startswith("optimizer.states: 'AdamW' -> 'SGD' (the states of the two")
