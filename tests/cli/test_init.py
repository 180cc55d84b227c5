from __future__ import annotations

import pytest
import torch
import yaml
from PIL import Image

from zerotune import cli
from zerotune.plan import DeepSpeedPlan, Streaming
from zerotune.plan.families import family_names, model_family
from zerotune.training.run_file import RunFile

CARD = ("--vram", "12", "--ram", "64")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number in range(8):
        torch.manual_seed(number)
        pixels = torch.randint(0, 256, (20, 24 if number % 2 else 16, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a cat" if number % 2 else 'a dog\'s "bone"')
    return folder


@pytest.fixture
def init(photos, tmp_path):
    def act(*arguments, family="sdxl", pictures=photos):
        where = str(tmp_path / "run")
        return cli.main(["init", where, "--family", family, "--photos", str(pictures), *arguments])

    return act


def written(tmp_path):
    """Return the run that the file describes."""
    return yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())


class TestWhatIsWritten:
    def test_the_written_plan_is_the_advised_one(self, init, tmp_path, photos, capsys):
        assert init(*CARD) == 0

        plan = DeepSpeedPlan.from_json(tmp_path / "run" / "plan.json")
        advised = DeepSpeedPlan.advise(
            "sdxl", vram="12GiB", ram="64GiB", ema="host", gradient_accumulation_steps=4,
            optimizer={"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        )  # fmt: skip
        assert plan.to_dict() == advised.plan.to_dict()
        found = written(tmp_path)
        assert found["gradient_checkpointing"] is advised.gradient_checkpointing
        assert found["activation_offload"] is advised.activation_offload
        assert found["model"] == "stabilityai/stable-diffusion-xl-base-1.0"
        assert found["validation"]["prompts"] == ['a dog\'s "bone"', "a cat"]
        assert "adapters" not in found
        assert found["steps"] == 2000
        assert found["data"]["folder"] == str(photos)
        printed = capsys.readouterr().out
        assert advised.chosen.title in printed
        assert "8 images, with captions" in printed
        file = tmp_path / "run" / "run.yaml"
        assert f"Train with: zerotune train {file}\n" in printed
        assert "12.00 GiB of device memory, 64.00 GiB of host memory" in file.read_text()

    def test_an_update_on_the_device_is_written_into_the_run(self, init, tmp_path):
        assert init("--vram", "24", "--ram", "64", "--update", "device:split") == 0
        where = tmp_path / "run"
        assert RunFile.load(where / "run.yaml").update == "device:split"

    def test_the_written_run_resolves_to_the_advised_plan(self, init, tmp_path):
        assert init("--vram", "16", "--ram", "192", family="sd35-large") == 0
        run = RunFile.load(tmp_path / "run" / "run.yaml")
        advised = DeepSpeedPlan.advise(
            "sd35-large", vram="16GiB", ram="192GiB", ema="host", gradient_accumulation_steps=4,
            optimizer={"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        )  # fmt: skip
        assert advised.streamed is not None
        assert run.streamed in (advised.streamed, advised.streamed == Streaming())
        assert run.update == (advised.update and advised.update.name)

    # Options for clips and ControlNets are tested below.
    @pytest.mark.parametrize(
        "family",
        [
            pytest.param(one, marks=() if one in ("sdxl", "flux") else pytest.mark.nightly)
            for one in family_names()
            if model_family(one).frames is None and not one.endswith("controlnet")
        ],
    )
    def test_init_writes_a_run_for_every_family(self, init, tmp_path, family):
        big = ("--vram", "80", "--ram", "2000", "--lora", "8")
        assert init(*big, "--model", "someone/pipeline", family=family) == 0

        found = written(tmp_path)
        assert (found["model"], found["adapters"]) == ("someone/pipeline", {"rank": 8})
        assert found["family"] == family
        run = RunFile.load(tmp_path / "run" / "run.yaml")
        assert run.facts().numel > model_family(family).facts.numel, "known without the model"
        plan = DeepSpeedPlan.from_json(tmp_path / "run" / "plan.json")
        assert plan.optimizer.params["lr"] == 1e-4

    def test_images_without_captions_are_reported(self, init, tmp_path, capsys):
        pictures = tmp_path / "pictures"
        pictures.mkdir()
        Image.new("RGB", (8, 8)).save(pictures / "one.png")

        assert init(*CARD, pictures=pictures) == 0

        assert "1 image, without captions" in capsys.readouterr().out
        assert written(tmp_path)["validation"]["prompts"] == ["a photo"]


class TestWhatIsRefused:
    @pytest.fixture
    def refused(self, init, capsys):
        def act(*arguments, **others):
            assert init(*arguments, **others) == 2
            return capsys.readouterr().err

        return act

    @pytest.mark.parametrize("name", ["plan.json", "run.yaml"])
    def test_an_existing_file_is_not_overwritten(self, refused, tmp_path, name):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).write_text("mine")

        said = refused(*CARD)

        assert f"{name}: already exists" in said
        assert "Fix: choose another folder" in said
        assert [file.name for file in (tmp_path / "run").iterdir()] == [name]
        assert (tmp_path / "run" / name).read_text() == "mine"

    @pytest.mark.parametrize(
        ("arguments", "others", "said"),
        [
            (CARD, {"family": "sdxxl"}, "family = 'sdxxl'"),
            (CARD, {"family": "sd21"}, "add --model"),
            (CARD, {"family": "wan-1.3b"}, "--family = 'wan-1.3b': is trained on clips"),
            (CARD, {"family": "sdxl-controlnet"}, "start from the ControlNet recipe"),
            (CARD, {"family": "mine:Mine"}, "cannot be imported"),
            ((*CARD, "--model", "./nowhere"), {}, "--model = './nowhere': is not a folder"),
            ((*CARD, "--resolution", "7"), {}, "resolution"),
            (("--vram", "1", "--ram", "2"), {}, "Fix:"),
            (("--vram", "much", "--ram", "2"), {}, "--vram = 'much'"),
            (CARD, {"pictures": "nowhere"}, "is not a folder"),
        ],
        ids=[
            *("family", "no pipeline", "clips", "ControlNet", "no class"),
            *("model", "resolution", "too little", "size", "pictures"),
        ],
    )
    def test_requests_that_cannot_be_trained_are_refused_and_nothing_is_written(
        self, refused, tmp_path, arguments, others, said
    ):
        assert said in refused(*arguments, **others)
        assert not (tmp_path / "run").exists()

    def test_a_folder_that_cannot_be_created_is_reported_with_a_fix(self, photos, tmp_path, capsys):
        (tmp_path / "file").write_text("mine")
        folder = str(tmp_path / "file" / "run")
        arguments = ["init", folder, "--family", "sdxl", "--photos", str(photos), *CARD]
        assert cli.main(arguments) == 2
        assert "Fix:" in capsys.readouterr().err


def test_what_would_help_names_only_options_of_init(init, capsys):
    assert init("--vram", "24", "--ram", "64", family="flux") == 2
    said = capsys.readouterr().err
    assert "--lora 16" in said
    assert not {"--optimizer", "--streamed", "--gradient-clipping"} & set(said.split())
