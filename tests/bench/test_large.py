"""Full-size trainings, scaled down; and cases that do not fit, or die, with stand-ins."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import attrs
import pytest

from bench import large
from bench.full_size import Training
from bench.random_pipeline import Tensors, configuration, empty_model, write_pipeline
from bench.runner import LeftOutError, load, run
from tests.bench.stand_ins import Broken, Huge, Killed, Quick, Small

CASE = "SD 1.5, streamed, 8-bit moments, EMA on disk"


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that measures a case with stand-ins for its phases."""

    def measure(preparation=Small, training=Quick):
        monkeypatch.setattr(large, "Preparation", preparation)
        monkeypatch.setattr(large, "Run", training)
        settings = attrs.asdict(Training(model="sd15", plan={"stage": 2}))
        return large.measure(settings, tmp_path)

    return measure


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_scaled_training_resumes_exactly_and_exports_every_tensor(tmp_path, capfd):
    result = run(load("large"), output=tmp_path, quick=True, only=[CASE])
    (case,) = result["cases"]
    facts, found = case["facts"], case["contestants"]
    assert "failed" not in facts
    assert facts["engine"] == "HostEngine"
    assert facts["resumed exactly"]
    assert facts["export of ema weights"] == "686 tensors, all finite"
    for quantity in ("disk_bytes", "checkpoint_bytes"):
        pair = (found[name][quantity]["median"] for name in ("measured", "estimated"))
        measured, estimated = pair
        assert measured == pytest.approx(estimated, rel=0.05)
    seconds = {f"{part}_seconds" for part in ("start", "forward", "optimizer", "save", "resume")}
    assert seconds <= set(found["measured"])
    assert [path.name for path in tmp_path.iterdir()] == ["large.json"], "work folders are removed"
    progress = capfd.readouterr().err
    assert progress.index("saving needs") < progress.index("write weights")


def test_a_case_beyond_free_memory_is_left_out_before_its_weights_are_written(measure, capfd):
    with pytest.raises(LeftOutError, match=r"1024\.0 GiB of memory is needed, 1\.0 GiB is free"):
        measure(Huge)
    assert "write weights" not in capfd.readouterr().err


def test_a_case_without_room_for_a_checkpoint_trains_and_exports(measure, monkeypatch, capfd):
    monkeypatch.setattr(large.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1))
    found = measure()
    assert found.facts["not saved"] == "the disk had no room for a checkpoint"
    assert found.facts["export of ema weights"] == "all finite"
    assert not {"save_seconds", "resume_seconds"} & set(found.samples["measured"])
    progress = capfd.readouterr().err
    assert progress.index("runs without saving") < progress.index("train: start")


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (Killed, "train: step 1: killed (exit code -9): memory ran out"),
        (Broken, "train: step 1: ValueError: this is why"),
    ],
)
def test_a_training_that_dies_is_recorded_with_its_phase(measure, training, reason):
    found = measure(training=training)
    assert found.facts["failed"] == reason
    assert found.samples["measured"]["host_bytes"] > [0]
    assert found.samples["measured"]["start_seconds"]


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_a_random_pipeline_has_the_shapes_of_its_model(tmp_path, model, monkeypatch):
    monkeypatch.setattr("bench.random_pipeline.SHARD_BYTES", 2**22)
    config = configuration(model, 0.1)
    *_, written = write_pipeline(tmp_path, model, config)
    state = empty_model(config).state_dict()
    found = Tensors.read(tmp_path / "unet")
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert written == 2 * sum(tensor.numel() for tensor in state.values())
    assert not found.not_finite
    index = json.loads(next((tmp_path / "unet").glob("*.index.json")).read_text())
    assert len(set(index["weight_map"].values())) > 1
    shutil.rmtree(tmp_path / "unet")


def test_full_size_is_the_published_configuration():
    from zerotune.plan.families import family

    for model in ("sd15", "sdxl"):
        state = empty_model(configuration(model, 1.0)).state_dict()
        assert sum(tensor.numel() for tensor in state.values()) == family(model).numel
