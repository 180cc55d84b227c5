"""Streamed checkpoints resume under any engine, and those of other engines resume streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from tests.backend.host.streaming import Run, advance, contents, make_model, start
from tests.support.codes import encode
from tests.support.ranks import ranks
from tests.support.sampling import nightly
from zerotune.backend.optimizers.classes import decode
from zerotune.backend.step.kernel import HostStepOp
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.checkpoint.manifest import Manifest
from zerotune.ema import EMAShadow
from zerotune.errors import CheckpointCorruptError
from zerotune.plan.context import Streaming

pytestmark = [pytest.mark.deepspeed, ranks(1)]

ENGINES: dict[str, dict[str, Any]] = {
    "streamed": {"streamed": Streaming(window=2)},
    "streamed at stage 3": {"streamed": True, "stage": 3},
    "split": {"streamed": Streaming(window=2, split_masters=True)},
    "stage 2": {"streamed": None},
    "stage 3": {"streamed": None, "stage": 3},
    "plain": {"streamed": None, "stage": 0, "deepspeed": False},
}
FULL = Run(family="web", accumulation=2, clipping=0.05)
EAGER = Run(family="web", clipping=0.0)
ADAPTERS = Run(family="web", lora=True)


def train(
    run: Run,
    engine_name: str,
    steps: range,
    *,
    resume: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    with start(run, make_model(run), **ENGINES[engine_name]) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        decisions: tuple[Any, ...] = ()
        if resume is not None:
            loaded_checkpoint = load_checkpoint(resume, engine=engine, shadows={"ema": ema})
            decisions = loaded_checkpoint.decisions
        loaded = contents(engine, ema)
        kept: dict[str, Any] = advance(run, engine, steps, ema)
        if save is not None:
            save_checkpoint(save, engine=engine, shadows={"ema": ema})
        kept["decisions"] = decisions
        return {**kept, "loaded": loaded, "contents": contents(engine, ema)}


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["losses"] == theirs["losses"]
    assert mine["norms"] == theirs["norms"]
    for when in ("loaded", "contents"):
        one, other = mine[when], theirs[when]
        assert one.keys() == other.keys()
        differing = [n for n in one if not all(map(torch.equal, one[n], other[n]))]
        assert not differing, when


def saved(folder: Path, run: Run, engine_name: str) -> Path:
    """Save a checkpoint after three steps."""
    train(run, engine_name, range(3), save=folder / engine_name)
    return folder / engine_name


@pytest.mark.parametrize(
    ("run", "whole", "engine"),
    [
        (FULL, "stage 2", "streamed"),
        (EAGER, "stage 2", "streamed"),
        (attrs.evolve(EAGER, optimizer="AdamW8BitStates"), "split", "split"),
        *nightly(
            (ADAPTERS, "stage 2", "streamed"),
            (EAGER, "split", "split"),
            (attrs.evolve(EAGER, optimizer="AdamWBF16States"), "split", "split"),
        ),
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, run, whole, engine):
    expected = train(run, whole, range(6))
    resumed = train(run, engine, range(3, 6), resume=saved(tmp_path, run, engine))
    assert expected["losses"][-len(resumed["losses"]) :] == resumed["losses"]
    for name, values in expected["contents"].items():
        assert all(map(torch.equal, values, resumed["contents"][name])), name


def test_a_run_resumed_at_its_second_step_equals_an_uninterrupted_one(tmp_path):
    """At this step a power of beta differs from the product that an op has accumulated."""
    run = Run(family="web", clipping=0.0, scheduler=False)
    whole = train(run, "streamed", range(4))
    train(run, "streamed", range(2), save=tmp_path / "two")
    resumed = train(run, "streamed", range(2, 4), resume=tmp_path / "two")
    assert all(
        all(map(torch.equal, whole["contents"][name], resumed["contents"][name]))
        for name in whole["contents"]
    )


@pytest.mark.parametrize("optimizer", ["AdamWBF16States", "AdamW8BitStates"])
def test_lean_moments_are_stored_and_loaded_as_they_are(tmp_path, monkeypatch, optimizer):
    run, path = attrs.evolve(EAGER, optimizer=optimizer), tmp_path / "lean"
    with start(run, make_model(run), **ENGINES["split"]) as engine:
        advance(run, engine, range(3))
        for name in ("encode", "decode"):
            monkeypatch.setattr(HostStepOp, name, None)
        save_checkpoint(path, engine=engine)
        expected = stored(engine)
    with start(run, make_model(run), **ENGINES["split"]) as engine:
        contents = load_checkpoint(path, engine=engine)
        loaded = stored(engine)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert not contents.manifest.not_finite
    dtype = torch.bfloat16 if optimizer == "AdamWBF16States" else torch.uint8
    for file in path.glob("optimizer.exp_avg*-*"):
        scales = "scale" in file.name
        found = {tensor.dtype for tensor in load_file(file).values()}
        assert found == {torch.float32 if scales else dtype}


def test_codes_that_the_manifest_does_not_describe_are_refused(tmp_path):
    run = attrs.evolve(EAGER, optimizer="AdamW8BitStates")
    path = saved(tmp_path, run, "split")
    manifest = attrs.evolve(Manifest.read(path), formats={})
    (path / "manifest.json").write_text(manifest.to_json())
    with start(run, make_model(run), **ENGINES["split"]) as engine:
        before = contents(engine)
        with pytest.raises(CheckpointCorruptError, match=r"is torch\.uint8 .* instead of"):
            load_checkpoint(path, engine=engine)
        after = contents(engine)
    assert all(all(map(torch.equal, before[name], after[name])) for name in before)


def stored(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (fragment.address.name, name): tensor.clone()
        for fragment in engine.master_weights.read()
        for name, tensor in fragment.stored.items()
    }


def test_8_bit_moments_load_into_other_units(tmp_path):
    run = Run(family="qwen", clipping=0.0, optimizer="AdamW8BitStates")
    with start(run, make_model(run), streamed=Streaming(split_masters=True)) as engine:
        advance(run, engine, range(3))
        save_checkpoint(tmp_path / "lean", engine=engine)
        expected = contents(engine)
    units = Streaming(split_masters=True, units=("ModuleList",))
    with start(run, make_model(run), streamed=units) as engine:
        load_checkpoint(tmp_path / "lean", engine=engine)
        found = contents(engine)
    for name, values in expected.items():
        assert all(map(torch.equal, values, found[name])), name


def test_8_bit_moments_convert_to_fp32_exactly_and_back_with_rounding(tmp_path):
    lean, exact = (attrs.evolve(EAGER, optimizer=name) for name in ("AdamW8BitStates", "AdamW"))
    path = saved(tmp_path, lean, "split")
    streamed = train(lean, "split", range(3, 4), resume=path)
    theirs = train(exact, "stage 2", range(3, 6), resume=path, save=tmp_path / "fp32")
    for name, values in streamed["loaded"].items():
        assert all(map(torch.equal, values, theirs["loaded"][name])), name
    back = train(lean, "split", range(6, 7), resume=tmp_path / "fp32")
    told = {decision.key: decision.reason for decision in back["decisions"]}
    assert "256 codes" in told["optimizer.type"]
    assert "halfway" in told["streamed.split_masters"]
    for name, (_, *kept) in back["loaded"].items():
        if kept:
            master, first, second, step = theirs["contents"][name][1:]
            torch.testing.assert_close(kept[0], master, rtol=2**-22, atol=0)
            for signed, mine, moment in ((True, kept[1], first), (False, kept[2], second)):
                codes, scales = encode(moment, signed=signed)
                assert torch.equal(mine, decode(codes, scales, signed=signed))
            assert torch.equal(kept[3], step)


# tests/checkpoint/test_matrix.py has all pairs of all plans.
@pytest.mark.parametrize(
    ("run", "source", "target"),
    [
        (FULL, "streamed", "stage 3"),
        (FULL, "split", "streamed"),
        *nightly(
            *((FULL, "streamed", target) for target in ("streamed", "streamed at stage 3")),
            *((FULL, source, "streamed") for source in ("stage 3", "plain")),
            *((ADAPTERS, "streamed", target) for target in ("streamed", "stage 3")),
        ),
    ],
    ids=str,
)
def test_streamed_checkpoints_are_read_and_written_as_those_of_stage_2(
    tmp_path, run, source, target
):
    path = saved(tmp_path, run, source)
    mine = train(run, target, range(3, 5), resume=path)
    if source == "streamed":
        theirs = train(run, target, range(3, 5), resume=saved(tmp_path, run, "stage 2"))
    else:
        theirs = train(run, "stage 2", range(3, 5), resume=path)
    same(mine, theirs)
