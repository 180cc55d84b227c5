"""Counting the activations of a training step without computing it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel

from tests.support.declared_pipelines import MAKERS
from tests.support.models import tiny_unet
from tests.support.needs import needs
from tests.support.sampling import nightly
from zerotune.diffusion import LoRA, add_lora
from zerotune.diffusion import facts as counting
from zerotune.diffusion.configuration import ARGUMENTS, Configuration
from zerotune.diffusion.facts import (
    example_inputs,
    frames_per_latent,
    latent_scale,
    measure_step,
)
from zerotune.diffusion.model_facts import model_facts
from zerotune.diffusion.models.declared import Flux
from zerotune.diffusion.passes import counting as counting_passes
from zerotune.errors import InvalidValueError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import family, family_names, family_of, model_family

UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
SD3 = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "caption_projection_dim": 16,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "pos_embed_max_size": 64,
}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": [4, 6, 6],
    "joint_attention_dim": 16,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
}


def activation_peak(module, arguments):
    with counting_passes(module) as count:
        return count(arguments).peak


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


_measured = {}


@pytest.fixture
def counted(monkeypatch):
    """Record the classes of counted models; a repeated count reuses the first result."""
    seen = []

    def measure(module, **options):
        seen.append(type(module).__name__)
        key = json.dumps(dict(module.config), sort_keys=True), repr(options)
        if key not in _measured:
            _measured[key] = measure_step(module, **options)
        return _measured[key]

    monkeypatch.setattr(counting, "measure_step", measure)
    return seen


class Chain(torch.nn.Module):
    """A model whose activations can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32, bias=False)
        self.second = torch.nn.Linear(32, 4, bias=False)

    def forward(self, sample):
        return (self.second(torch.relu(self.first(sample))),)


def test_the_activation_peak_counts_what_is_alive_at_once():
    with torch.device("meta"):
        chain = Chain().to(torch.bfloat16)
        sample = torch.empty(16, 8, dtype=torch.bfloat16)
    for parameter in chain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    peak = activation_peak(chain, {"sample": sample})
    # Live as backward begins: relu's output for the weight's gradient (16 x 32), and for the loss
    # the output (16 x 4) in bf16 and fp32 and its square. Later gradients reuse this memory.
    kept = 16 * 32 * 2
    assert kept + 16 * 4 * (2 + 4) <= peak <= 4 * kept


@pytest.mark.parametrize("config", [UNET, *nightly(SD3, FLUX)])
def test_counting_on_meta_equals_a_real_pass(config):
    kind = {
        "UNet2DConditionModel": UNet2DConditionModel,
        "SD3Transformer2DModel": SD3Transformer2DModel,
        "FluxTransformer2DModel": FluxTransformer2DModel,
    }[config["_class_name"]]
    peaks = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = kind.from_config(dict(config)).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        arguments = _moved(example_inputs(model)(1, 128, 128), device)
        peaks.append(activation_peak(model, arguments))
    # Kernels differ in a few temporaries (the CPU's convolutions reorder their inputs).
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)
    assert peaks[0] > 100_000


def _moved(value, device):
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


def test_activation_costs_grow_with_batch_and_pixels_and_shrink_with_checkpointing():
    facts = model_facts(UNET, name="small")
    assert facts.name == "small"
    assert facts.numel == sum(
        p.numel() for p in UNet2DConditionModel.from_config(UNET).parameters()
    )
    costs = facts.activations
    small = costs.full.nbytes(batch=1, pixels=256**2)
    assert costs.full.nbytes(batch=4, pixels=256**2) == pytest.approx(4 * small, rel=0.05)
    assert costs.checkpointed.nbytes(batch=1, pixels=1024**2) < costs.full.nbytes(
        batch=1, pixels=1024**2
    )


def test_the_fit_predicts_unmeasured_sizes():
    with torch.device("meta"):
        model = UNet2DConditionModel.from_config(dict(UNET))
    costs, _ = measure_step(model)
    make = example_inputs(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for batch, height, width in [(2, 512, 768), (1, 2048, 2048), (16, 128, 128)]:
        peak = activation_peak(model, make(batch, height, width))
        assert costs.full.nbytes(batch=batch, pixels=height * width) == pytest.approx(
            peak, rel=0.03
        )


def test_a_configuration_is_read_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(UNET))
    from_folder = model_facts(tmp_path, activations=False)
    assert from_folder == model_facts(tmp_path / "config.json", activations=False)
    assert from_folder.activations is None
    assert from_folder.name == "UNet2DConditionModel"


# Like published files: with keys about the file, false for null, and a dropped argument.
PUBLISHED = {
    "_class_name": "QwenImageTransformer2DModel",
    "_diffusers_version": "0.34.0.dev0",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 768,
}


def test_a_catalogued_configuration_is_neither_built_nor_measured(counted, monkeypatch):
    def built(_config):
        raise AssertionError("it was built")

    monkeypatch.setattr(Configuration, "build", built)
    for config, name in [
        ({"_class_name": "QwenImageTransformer2DModel"}, "qwen-image"),
        ({"_class_name": "WanTransformer3DModel"}, "wan-14b"),
        ({"_class_name": "Flux2Transformer2DModel"}, "flux2"),
        ({"_class_name": "ZImageTransformer2DModel"}, "z-image"),
        (PUBLISHED, "qwen-image"),
    ]:
        facts = model_facts(config, name=name)
        assert facts == family(name)
        bare = model_facts(config, activations=False)
        assert (bare.activations, bare.arithmetic) == (None, None)
        assert (bare.name, bare.parameters) == (config["_class_name"], facts.parameters)
    assert counted == []


def test_a_catalogued_configuration_has_the_parameters_of_its_model():
    config = {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}
    with torch.device("meta"):
        made = ModelFacts.from_module(UNet2DConditionModel.from_config(config))
    facts = model_facts(config | {"sample_size": 64, "attention_head_dim": 8})
    assert facts.parameters == made.parameters == family("sd15").parameters
    assert facts.blocks == made.blocks


def test_each_configuration_identifies_one_family():
    digests = {name: model_family(name).configuration for name in family_names()}
    assert all(len(digest) == 64 for digest in digests.values())
    # The same model class with other inputs (edit, ControlNet, image-to-video) is another family.
    alike = {name for name in digests if name.endswith(("-controlnet", "-edit-plus", "-i2v"))}
    alike |= {"flux-kontext", "qwen-image-edit"}
    assert len(set(digests.values())) == len(digests) - len(alike)
    for name, digest in digests.items():
        assert name in alike or family_of(digest).name == name


def test_facts_of_a_configuration_are_computed_once(counted):
    first = model_facts(UNET)
    assert model_facts(UNET) == first
    assert model_facts(dict(UNET), activations=False).activations is None
    assert model_facts(UNET, name="mine").name == "mine"
    assert counted == ["UNet2DConditionModel"]
    assert model_facts(UNET | {"layers_per_block": 2}).numel > first.numel
    assert len(counted) == 2


def test_damaged_cached_facts_are_computed_again(counted, monkeypatch, tmp_path):
    first = model_facts(UNET)
    for file in Configuration(UNET).file.parent.iterdir():
        file.write_text('{"name": 3}')
    assert model_facts(UNET) == first
    assert len(counted) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_facts(UNET) == first, "a cache that cannot be written changes nothing"


def test_the_stored_arguments_are_those_of_the_installed_classes():
    stored = json.loads(ARGUMENTS.read_text())
    assert stored["diffusers"] == diffusers.__version__
    assert stored["classes"].keys() == {model_family(name).class_name for name in family_names()}
    for name, arguments in stored["classes"].items():
        own = Configuration({"_class_name": name}).default_arguments()
        assert arguments == json.loads(json.dumps(own, default=repr)), name


def test_the_digest_of_another_diffusers_version_comes_from_the_class(monkeypatch, tmp_path):
    known = Configuration(UNET).digest
    other = json.loads(ARGUMENTS.read_text()) | {"diffusers": "0.1.0"}
    other["classes"]["UNet2DConditionModel"]["in_channels"] = 5
    file = tmp_path / "arguments.json"
    monkeypatch.setattr("zerotune.diffusion.configuration.ARGUMENTS", file)
    file.write_text(json.dumps(other))
    assert Configuration(UNET).digest == known
    file.write_text(json.dumps(other | {"diffusers": diffusers.__version__}))
    assert Configuration(UNET).digest != known


def test_known_facts_are_found_without_torch_and_transformers(counted):
    measured = model_facts(UNET)
    code = (
        "import sys; sys.modules.update(transformers=None, peft=None)\n"
        "from zerotune import model_facts\n"
        "assert model_facts({'_class_name': 'QwenImageTransformer2DModel'}).activations\n"
        f"assert model_facts({UNET}).numel == {measured.numel}\n"
        "assert sys.modules.keys().isdisjoint({'torch', 'diffusers'})\n"
        "model_facts({'_class_name': 'QwenImageTransformer2DModel', 'num_layers': 1})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert "QwenImagePipeline" in done.stderr
    assert "pip install transformers" in done.stderr


def test_parameters_can_be_read_from_a_module():
    unet = tiny_unet()
    assert model_facts(unet, activations=False).numel == sum(p.numel() for p in unet.parameters())
    with pytest.raises(InvalidValueError, match="on the meta device"):
        model_facts(unet)


@pytest.mark.parametrize("source", [{}, {"_class_name": "Nothing"}, {"_class_name": 3}])
def test_a_configuration_without_a_class_is_refused(source):
    with pytest.raises(InvalidValueError, match="_class_name"):
        model_facts(source)


def test_a_missing_file_and_an_unknown_model_are_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="cannot be read"):
        model_facts(tmp_path)
    with pytest.raises(InvalidValueError, match="does not know the arguments"):
        example_inputs(Chain())


def test_planned_adapters_equal_those_that_peft_creates():
    needs("peft")
    for config, kind, targets in (
        (UNET, UNet2DConditionModel, None),
        (SD3, SD3Transformer2DModel, None),
        (FLUX, FluxTransformer2DModel, Flux.lora_targets),
        (UNET, UNet2DConditionModel, ("conv1", "conv2")),
    ):
        planned = model_facts(config, activations=False).with_adapters(3, targets=targets)
        model = kind.from_config(config)
        add_lora(model, LoRA(rank=3, targets=targets))
        made = ModelFacts.from_module(model)
        shapes = [Counter(each.shape for each in facts.trainable) for facts in (planned, made)]
        assert shapes[0] == shapes[1], config["_class_name"]
        assert planned.numel == made.numel


# -- Declared families: the inputs their pipelines pass to the models.


def declared(name, folder):
    """Return the configuration of a tiny model, and the model."""
    path = MAKERS[name](folder)
    config = json.loads((path / "transformer" / "config.json").read_text())
    kind = getattr(diffusers, config["_class_name"])
    with torch.device("meta"):
        return config, kind.from_config(config).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["z-image", "hunyuan-video"])
def test_the_model_accepts_a_captured_call(name, tmp_path):
    config, model = declared(name, tmp_path / name)
    facts = model_facts(config, activations=False)
    assert facts.numel == sum(p.numel() for p in model.parameters())
    make = example_inputs(model)
    small, large = (activation_peak(model, make(batch, 256, 256)) for batch in (1, 2))
    wide = activation_peak(model, make(1, 256, 512))
    assert 0 < small < wide
    assert small < large <= 2.2 * small


def test_pipelines_that_process_samples_one_by_one_keep_all_graphs(tmp_path):
    _, model = declared("aura-flow", tmp_path / "aura-flow")
    make = example_inputs(model)
    one, four = (make(batch, 128, 128) for batch in (1, 4))
    assert (one["hidden_states"].shape[0], four["hidden_states"].shape[0]) == (1, 4)
    assert activation_peak(model, four) > 2 * activation_peak(model, one)


def test_a_captured_call_equals_the_hand_written_one(monkeypatch):
    """Flux has hand-written inputs; its declaration must produce the same ones."""

    with torch.device("meta"):
        model = FluxTransformer2DModel.from_config(FLUX)
    by_hand = example_inputs(model)(2, 256, 512)
    monkeypatch.setattr("zerotune.diffusion.facts.family_of_model", lambda _model: Flux)
    captured = example_inputs(model)(2, 256, 512)
    for key, tensor in by_hand.items():
        assert captured[key].shape == tensor.shape, key
    # The pipeline's position ids are fp32, which matters in a tiny model.
    assert activation_peak(model, captured) == pytest.approx(
        activation_peak(model, by_hand), rel=0.05
    )


@pytest.mark.parametrize("name", ["wan", pytest.param("ltx", marks=pytest.mark.nightly)])
def test_activations_are_predicted_for_clips_of_any_shape(name, tmp_path):
    config, model = declared(name, tmp_path / name)
    facts, make = model_facts(config), example_inputs(model)
    each = facts.frames_per_latent
    assert each == (8 if name == "ltx" else 4)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for batch, height, width, latents in [(1, 256, 384, 9), (3, 640, 320, 1), (8, 128, 128, 3)]:
        frames = (latents - 1) * each + 1
        pixels = facts.positions(height=height, width=width, frames=frames)
        assert pixels == latents * height * width
        peak = activation_peak(model, make(batch, height, width, frames=frames))
        predicted = facts.activations.full.nbytes(batch=batch, pixels=pixels)
        assert predicted == pytest.approx(peak, rel=0.05), (batch, height, width, latents)


def test_the_latent_scale_follows_the_family(tmp_path):
    _, sana = declared("sana", tmp_path / "sana")
    assert (latent_scale(sana), latent_scale(torch.nn.Linear(1, 1))) == (32, 8)
    assert frames_per_latent(sana) is None
