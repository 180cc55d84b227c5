"""A user's class instead of a family name: costed from its configuration, without weights."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
import yaml

from tests.diffusion.families.own_family import family_of_the_page
from tests.support.declared_pipelines import ovis_image
from zerotune import cli
from zerotune.diffusion.facts import family_facts
from zerotune.diffusion.models.declared import Sana
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.families import model_family
from zerotune.platform import Platform

CARD = ["--vram", "12", "--ram", "64"]
OWN = "families_page:OvisImage"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    family_of_the_page()
    return ovis_image(tmp_path_factory.mktemp("ovis"))


def said(capsys, *arguments):
    assert cli.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_a_users_family_is_advised_and_explained(folder, tmp_path, capsys):
    own = ["--family", OWN, "--model", str(folder)]
    advice = said(capsys, "plan", "advise", *own, *CARD, "--json")
    facts = family_facts(sys.modules["families_page"].OvisImage, folder=folder).facts
    expected = DeepSpeedPlan.advise(facts, vram="12GiB", ram="64GiB", resolution=1024)
    peak = advice["estimate"]["places"]["device"]["peak"]
    assert peak == expected.estimate.device
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    explained = said(capsys, "plan", "explain", str(plan), *own, *CARD, "--json")
    assert explained["estimate"]["workload"]["height"] == 1024
    assert explained["estimate"]["places"]["device"]["peak"] > 0


def test_costs_are_computed_from_the_folders_configuration(folder):
    from diffusers import OvisImageTransformer2DModel

    known = family_facts(sys.modules["families_page"].OvisImage, folder=folder)
    model = OvisImageTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    assert known.class_name == "OvisImageTransformer2DModel"
    assert known.facts.parameters == ModelFacts.from_module(model).parameters
    assert known.facts.activations.full.per_pixel > 0


def test_costs_are_those_of_the_default_model_without_a_folder():
    class Small(Sana):
        """Identical to Sana."""

    found, usual = family_facts(Small), model_family("sana")
    assert found.facts.parameters == usual.facts.parameters
    ours, theirs = found.facts.activations.full, usual.facts.activations.full
    assert ours.per_pixel == pytest.approx(theirs.per_pixel, rel=1e-6)
    assert (found.resolution, found.frames) == (1024, None)


def test_init_writes_a_run_for_a_users_family(folder, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    from PIL import Image

    Image.fromarray(torch.zeros(16, 16, 3, dtype=torch.uint8).numpy()).save(photos / "a.png")
    arguments = ["--family", OWN, "--model", str(folder), "--photos", str(photos), *CARD]
    assert cli.main(["init", str(tmp_path / "run"), *arguments]) == 0
    written = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert written["family"] == OWN
    assert written["model"] == str(folder.resolve())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere_at_all:Family", "cannot be imported"),
        ("families_page:Nothing", "cannot be imported"),
        ("zerotune.plan:DeepSpeedPlan", "is not a family"),
        (OWN, "does not name the model's class"),
    ],
)
def test_a_class_whose_costs_are_unknown_is_refused_with_the_reason(folder, capsys, name, why):
    assert cli.main(["plan", "advise", "--family", name, *CARD]) == 2
    assert why in capsys.readouterr().err


def test_a_module_in_the_working_directory_is_found(folder, tmp_path, monkeypatch, capsys):
    page = importlib.import_module("families_page")
    (tmp_path / "my_family.py").write_text(
        "from zerotune.diffusion.models.declared import Sana\n\n"
        "class Mine(Sana):\n    '''Mine.'''\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert page is not None
    advice = said(capsys, "plan", "advise", "--family", "my_family:Mine", *CARD, "--json")
    assert advice["fits"] is True
    assert str(tmp_path) not in sys.path


def test_the_estimate_keeps_the_base_of_a_controlnet_on_the_device():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    card = Platform.synthetic("cuda", vram=24 * 2**30, ram=64 * 2**30)
    names = ("sdxl", "sdxl-controlnet")
    alone, steering = (plan.estimate(name, platform=card) for name in names)
    assert steering.device - alone.device == 2 * model_family("sdxl").facts.numel
