"""Files of runs: what they mean, and every mistake at once with its line."""

from __future__ import annotations

import json
import sys

import jsonschema
import pytest
import yaml
from PIL import Image

from zerotune.errors import CheckpointError, PlanFileError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan, Streaming
from zerotune.training.run import train
from zerotune.training.run_file import RunFile, schema

RUN = {
    "model": "hub/sdxl",
    "family": "sdxl",
    "data": {"folder": "photos", "resolution": 768},
    "plan": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "adapters": {"rank": 8, "targets": ["to_q"]},
    "ema": 0.999,
    "steps": 100,
    "validation": {"prompts": "a cat"},
}


def written(folder, content=None, name="run.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content or RUN))
    return path


def test_a_file_is_read_into_values(tmp_path):
    run = RunFile.load(written(tmp_path))
    assert (run.data.resolution, run.adapters.rank, run.steps) == (768, 8, 100)
    assert run.validation.prompts == ["a cat"]
    assert run.folder == run.place == tmp_path
    assert run.source() == "hub/sdxl"
    (tmp_path / "hub" / "sdxl").mkdir(parents=True)
    assert run.source() == str(tmp_path / "hub" / "sdxl"), "a folder beside the file comes first"


def test_other_files_in_the_place_of_the_export_are_found_before_training(tmp_path):
    run = RunFile.load(written(tmp_path))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"adapters: exists and is not replaced"):
        train(run)


def test_json_and_toml_say_the_same(tmp_path):
    found = RunFile.load(written(tmp_path))
    assert RunFile.load(written(tmp_path, json.dumps(RUN), "run.json")) == found
    toml = 'model = "hub/sdxl"\nsteps = 100\n[data]\nfolder = "photos"\n'
    path = written(tmp_path, toml, "run.toml")
    if sys.version_info < (3, 11):
        with pytest.raises(PlanFileError, match=r"needs Python 3\.11"):
            RunFile.load(path)
    else:
        assert RunFile.load(path).data.folder == "photos"


def test_every_mistake_is_reported_with_its_line(tmp_path):
    text = "model: 3\ndata:\n  foldr: photos\nsteps: 0\nema: 1\nlr: 1e-4\n"
    with pytest.raises(ZeroTuneError) as raised:
        RunFile.load(written(tmp_path, text))
    found = [str(each) for each in raised.value.each()]
    for line, words in ((1, "must be text"), (3, "'folder'"), (4, "out of range"),
                        (5, "out of range"), (6, "'overrides'")):  # fmt: skip
        assert any(f"line {line}: " in each and words in each for each in found), found
    assert any("data.folder: is missing" in each for each in found)


def test_mistakes_of_an_inline_plan_and_of_overrides_are_reported_with_their_lines(tmp_path):
    plan = {"zero_optimization": {"stag": 2}, "steps_per_print": "often"}
    path = written(tmp_path, yaml.safe_dump({**RUN, "plan": plan}, sort_keys=False))
    with pytest.raises(ZeroTuneError) as raised:
        RunFile.load(path).chosen_plan()
    found = [str(each) for each in raised.value.each()]
    assert any("line 8: plan.zero_optimization.stag = 2: " in each for each in found), found
    assert any("line 9: plan.steps_per_print = 'often': " in each for each in found), found
    content = {**RUN, "plan": {}, "overrides": {"zero_optimization.stage": 7}}
    path = written(tmp_path, yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(ZeroTuneError, match=r"line \d+: overrides\.zero_optimization\.stage = 7: "):
        RunFile.load(path).chosen_plan()


def test_mistakes_of_the_command_do_not_name_a_line_of_the_file(tmp_path):
    with pytest.raises(ZeroTuneError, match=r"^--set data.step = 'a': "):
        RunFile.load(written(tmp_path), overrides=["data.step=a"])
    with pytest.raises(ZeroTuneError, match=r"^data.step = 'a': "):
        RunFile.load(written(tmp_path), overrides=["data={step: a, folder: photos}"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_mistakes_in_toml_have_lines_too(tmp_path):
    text = 'model = "x"\nsteps = 5\n\n[data]\nfolder = "photos"\nresolution = "big"\n'
    with pytest.raises(ZeroTuneError, match=r"line 6: data\.resolution"):
        RunFile.load(written(tmp_path, text, "run.toml"))
    with pytest.raises(PlanFileError, match=r"is not TOML: .*line 1"):
        RunFile.load(written(tmp_path, "model = \nsteps = 1\n", "run.toml"))


def test_settings_are_replaced_by_path(tmp_path):
    path = written(tmp_path)
    changed = RunFile.load(path, overrides=["steps=5", "data.step=32", "overrides.bf16=off"])
    assert (changed.steps, changed.data.step, changed.data.resolution) == (5, 32, 768)
    assert changed.overrides == {"bf16": False}
    with pytest.raises(ZeroTuneError, match="not a setting and its value"):
        RunFile.load(path, overrides=["steps"])
    with pytest.raises(ZeroTuneError, match="steps"):
        RunFile.load(path, overrides=["steps=many"])
    with pytest.raises(ZeroTuneError, match="--set"):
        RunFile.load(path, overrides=["steps=["])


def test_a_missing_folder_of_images_is_reported_before_the_model_is_read(tmp_path):
    with pytest.raises(ZeroTuneError, match="is not a folder"):
        train(RunFile.load(written(tmp_path, {**RUN, "model": "nowhere"})))


@pytest.mark.parametrize(
    ("setting", "line"), [({}, "line 4: data.folder"), ({"plan": "plan.yaml"}, "line 6: plan")]
)
def test_what_the_run_does_not_find_is_named_with_the_line_of_the_setting(tmp_path, setting, line):
    path = written(tmp_path, yaml.safe_dump({**RUN, **setting}, sort_keys=False))
    with pytest.raises(ZeroTuneError, match=f"run.yaml, {line} "):
        train(RunFile.load(path))


def test_a_model_that_is_nowhere_is_named_with_the_line_of_the_setting(tmp_path):
    path = written(tmp_path, {**RUN, "model": str(tmp_path / "nowhere")})
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "photos" / "a.png")
    with pytest.raises(ZeroTuneError, match=r"run.yaml, line \d+: model .*nowhere"):
        train(RunFile.load(path))


def test_the_plan_is_written_or_named_or_advised(tmp_path):
    run = RunFile.load(written(tmp_path, {**RUN, "overrides": {"optimizer.params.lr": 3e-4}}))
    plan = run.chosen_plan()
    assert (plan.stage, plan.optimizer.params["lr"]) == (2, 3e-4)
    (tmp_path / "plan.json").write_text(DeepSpeedPlan.build(stage=3).to_json())
    named = RunFile.load(written(tmp_path, {**RUN, "plan": "plan.json"}))
    assert named.chosen_plan().stage == 3
    without = {key: value for key, value in RUN.items() if key != "plan"}
    advised = RunFile.load(written(tmp_path, {**without, "family": "sd15"})).chosen_plan()
    assert advised.resolved.model.trainable_numel < 1e8, "only adapters"
    nowhere = RunFile.load(written(tmp_path, {**without, "family": None}))
    with pytest.raises(ZeroTuneError, match="needed to advise"):
        nowhere.chosen_plan()


def test_the_advice_is_for_the_images_that_the_run_trains_on(tmp_path):
    without = {key: value for key, value in RUN.items() if key != "plan"}
    # Without a resolution images have 1024 pixels a side, whatever is native to the model.
    content = {**without, "family": "sd15", "data": {"folder": "photos"}}
    work = RunFile.load(written(tmp_path, content)).chosen_plan().estimate.workload
    assert (work.height, work.width) == (1024, 1024)


@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", ""), ("nf4", " on nf4"), ("int8", " on int8")]
)
def test_the_dtype_of_the_frozen_weights_reaches_the_advice(tmp_path, dtype, name):
    without = {key: value for key, value in RUN.items() if key != "plan"}
    content = {**without, "family": "sd15", "adapters": {"rank": 8, "base_dtype": dtype}}
    model = RunFile.load(written(tmp_path, content)).chosen_plan().resolved.model
    assert model.name.endswith(f"adapters of rank 8{name}")


@pytest.mark.parametrize("dtype", ["nf4", "fp4", "int8"])
def test_frozen_weights_are_quantized_while_they_are_read(tmp_path, monkeypatch, dtype):
    asked = []

    def configuration(**told):
        return asked.append(told)

    def read(*_, **settings):
        raise FloatingPointError(str("quantization" in settings))

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "photos" / "0.png")
    monkeypatch.setattr("diffusers.BitsAndBytesConfig", configuration)
    monkeypatch.setattr("zerotune.training.run.load_pretrained", read)
    run = RunFile.load(written(tmp_path, {**RUN, "adapters": {"rank": 8, "base_dtype": dtype}}))
    with pytest.raises(FloatingPointError, match="True"):
        train(run)
    (told,) = asked
    assert told.get("bnb_4bit_quant_type", "int8") == dtype


def test_the_update_reaches_the_advice(tmp_path):
    without = {key: value for key, value in RUN.items() if key != "plan"}
    content = {**without, "family": "sd15", "update": "device:split"}
    assert RunFile.load(written(tmp_path, content)).chosen_plan().update.name == "device:split"


@pytest.mark.parametrize(
    "setting", ["overrides: {bf16: true}", "streamed: true", "streamed: {window: 4}"]
)
def test_what_replaces_the_advice_needs_a_plan_of_the_file(tmp_path, setting):
    text = f"model: x\nfamily: sd15\ndata: {{folder: photos}}\nsteps: 5\n{setting}\n"
    name = setting.partition(":")[0]
    with pytest.raises(ZeroTuneError, match=f"line 5: {name}.* plan that the file names"):
        RunFile.load(written(tmp_path, text))


def test_streaming_is_a_switch_or_its_options(tmp_path):
    path = written(tmp_path)
    assert RunFile.load(path).streamed is None
    assert RunFile.load(path, overrides=["streamed=on"]).streamed is True
    asked = ["streamed.memory=6GiB", "streamed.split_masters=true", "streamed.units=Block"]
    options = RunFile.load(path, overrides=asked).streamed
    assert options == Streaming(memory="6GiB", split_masters=True, units=("Block",))
    assert options.to_dict() == {"memory": 6 * 2**30, "split_masters": True, "units": ("Block",)}
    assert RunFile.load(written(tmp_path, {**RUN, "streamed": {}})).streamed == Streaming()
    with pytest.raises(ZeroTuneError, match=r"set streamed.window = 2: has no effect beside"):
        RunFile.load(path, overrides=["streamed.memory=6GiB", "streamed.window=2"])
    content = yaml.safe_dump(RUN) + "streamed:\n  memory: much\n  window: 1\n  room: 2\n"
    with pytest.raises(ZeroTuneError) as raised:
        RunFile.load(written(tmp_path, content))
    start = content.splitlines().index("streamed:") + 2
    lines = [f"line {start + index}: streamed.{name}" for index, name in
             enumerate(("memory", "window", "room"))]  # fmt: skip
    found = [str(each) for each in raised.value.each()]
    assert [line for line in lines if not any(line in each for each in found)] == []


def test_a_run_may_exclude_streamed_plans_from_the_advice(tmp_path):
    content = {**RUN, "plan": "advise", "family": "sd15", "streamed": False}
    assert RunFile.load(written(tmp_path, content)).chosen_plan().streamed is None


def test_the_schema_accepts_what_the_reader_accepts(tmp_path):
    for right in (True, {"memory": "6GiB", "units": ["Block"], "gradient_buffers": 2}):
        wanted = {"validation": {"prompts": ["a cat"]}, "streamed": right}
        jsonschema.validate(RUN | wanted, schema())
        RunFile.load(written(tmp_path, {**RUN, **wanted}))
    for wrong in (
        {"steps": 0},
        {"update": "card"},
        {"streamed": "often"},
        {"streamed": {"window": 1}},
        {"streamed": {"rooms": 3}},
        {"data": {"foldr": "x"}},
        {"export": {"dtype": "int4"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())
        with pytest.raises(ZeroTuneError):
            RunFile.load(written(tmp_path, {**RUN, **wrong}))
